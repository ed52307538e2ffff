"""Section I of docs/bugs.md: order, overlap, waits; and what else shows on real ranks alone."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ndcompile import runtime
from ndcompile.runtime import Ranks, private
from tests.bugs import saved
from tests.bugs.conftest import Found
from tests.bugs.models import Experts, batch
from tests.bugs.planted import situation
from tests.claims import assert_close, whole

STARTS = [name for name in vars(private) if name.startswith("start_")]
"""What starts a collective."""


def late(function: Callable[..., Any], chance: random.Random) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        time.sleep(chance.random() * 2e-3)
        return function(*args, **kwargs)

    return called


def trained(name: str) -> list[Tensor]:
    parallel = saved.load(name)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    for _ in range(3):
        for _ in range(2):
            parallel(**saved.share(name))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().to_local().clone() for p in parallel.parameters()]  # type: ignore[attr-defined]


def delays_change_no_bit() -> None:
    """Each rank comes late to each collective and to each wait, by another time each step."""
    for name in ("tp", "hsdp"):
        expected, chance = trained(name), random.Random(dist.get_rank())
        with ExitStack() as delayed:
            for each in (*STARTS, "wait"):
                delayed.enter_context(patch.object(private, each, late(getattr(private, each), chance)))
            found = trained(name)
        assert all(map(torch.equal, found, expected))


def equal_batches_on_data_ranks_are_told() -> None:
    """Each rank has the first rows, of which the global batch then has four copies."""
    with warnings.catch_warnings(record=True, action="always") as equal:
        saved.load("hsdp")(**{name: rows[:1] for name, rows in batch().items()})
    with warnings.catch_warnings(record=True, action="always") as parts:
        saved.load("hsdp")(**saved.share("hsdp"))
    told = [str(w.message) for w in equal]
    first = dist.get_rank() == 0
    assert [text.partition("\n")[0] for text in told if "batch" in text] == (
        ["all data-parallel ranks have the same batch"] if first else []
    )
    assert not [w for w in parts if "same batch" in str(w.message)]


def gradients_have_their_parameters_dtypes(name: str) -> None:
    """Matrices in half precision, norms in float32: nothing is cast to the other's dtype on its way."""
    parallel, model = saved.load(name), saved.model(name)
    loss, expected = parallel(**saved.share(name))["loss"], model(**batch())["loss"]
    loss.backward()
    expected.backward()
    assert_close(loss, expected, 1e-2)
    assert {p.dtype for p in parallel.parameters()} == {torch.bfloat16, torch.float32}
    mine = dict(parallel.named_parameters())
    for what, parameter in model.named_parameters():
        gradient, right = mine[what].grad, parameter.grad
        assert gradient is not None and right is not None
        assert mine[what].dtype == gradient.dtype == parameter.dtype
        assert_close(whole(gradient), right, 5e-2, what)


def two_dtypes_in_one_bucket() -> None:
    gradients_have_their_parameters_dtypes("hsdp, two dtypes")


def a_loss_over_sharded_classes_in_half_precision() -> None:
    gradients_have_their_parameters_dtypes("tp, two dtypes")


ON_FOUR = (
    delays_change_no_bit,
    equal_batches_on_data_ranks_are_told,
    two_dtypes_in_one_bucket,
    a_loss_over_sharded_classes_in_half_precision,
)


@pytest.mark.parametrize("claim", ON_FOUR, ids=lambda claim: claim.__name__)
def test_on_four_ranks(claim: Callable[[], None], found: Found) -> None:
    assert [theirs[claim.__name__] for theirs in found] == [""] * 4


def test_a_sum_that_is_used_before_it_has_come() -> None:
    found = situation(Experts, batch, "dp_shard=2")
    right = found.line("ratio = all_reduce_invariant(ratio")
    assert found.seen_by(right, "ratio = wrong.unwaited(ratio, dp_shard)") == "field"


def test_a_gathered_sequence_of_any_length_has_its_length() -> None:
    """Traced once, with sizes as symbols: what 4 ranks gather is 4 times as long, what they cut a quarter."""
    axis = Ranks("tp", 4, 1, "tp")

    def there_and_back(x: Tensor) -> tuple[Tensor, Tensor]:
        whole = runtime.all_gather(x, axis, dim=1).sin()
        return whole, runtime.shard(whole, axis, dim=1).cos()

    traced = make_fx(there_and_back, tracing_mode="symbolic")(torch.ones(3, 5))
    (given,) = traced.graph.find_nodes(op="placeholder")
    sizes = [tuple(node.meta["val"].shape) for node in (given, *traced.graph.output_node().all_input_nodes)]
    (b, s), (_, whole), (_, part) = sizes
    assert len({str(b), str(s)}) == 2 and not str(s).isdigit(), "they are symbols"
    assert statically_known_true(whole == 4 * s) and statically_known_true(part == s), sizes
