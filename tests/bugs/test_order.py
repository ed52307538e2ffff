"""Section I of docs/bugs.md: order, overlap, waits; and what else shows on real ranks alone."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ndcompile.runtime import private
from ndcompile.verify.mutants import mutants
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
        with patch.multiple(private, **{n: late(getattr(private, n), chance) for n in (*STARTS, "wait")}):
            found = trained(name)
        assert all(map(torch.equal, found, expected))


def sequences_of_any_length_compile() -> None:
    """Shapes that change from step to step, gathered over tp inside of what is compiled."""
    torch.compiler.reset()
    parallel, model = saved.load("tp"), saved.model()
    parallel.compile(backend="eager", dynamic=True)
    for length in (8, 12):
        given = batch(length=length)
        with torch.no_grad():
            assert_close(parallel(**saved.share("tp", given))["loss"], model(**given)["loss"])


def two_dtypes_in_one_bucket() -> None:
    """Matrices in half precision and norms in float32 stay what they are, and so do their gradients."""
    name = "hsdp, two dtypes"
    parallel, model = saved.load(name), saved.model(name)
    loss, expected = parallel(**saved.share(name))["loss"], model(**batch())["loss"]
    loss.backward()
    expected.backward()
    assert_close(loss, expected, 1e-2)
    assert {p.dtype for p in parallel.parameters()} == {torch.bfloat16, torch.float32}
    mine = dict(parallel.named_parameters())
    for what, parameter in model.named_parameters():
        assert mine[what].dtype == mine[what].grad.dtype == parameter.dtype
        assert_close(whole(mine[what].grad), parameter.grad, 5e-2, what)


ON_FOUR = (delays_change_no_bit, sequences_of_any_length_compile, two_dtypes_in_one_bucket)


@pytest.mark.parametrize("claim", ON_FOUR, ids=lambda claim: claim.__name__)
def test_on_four_ranks(claim: Callable[[], None], found: Found) -> None:
    assert [theirs[claim.__name__] for theirs in found] == [""] * 4


def test_a_sum_that_is_used_before_it_has_come() -> None:
    found = situation(Experts, batch, "dp_shard=2")
    right = found.line("ratio = all_reduce_invariant(ratio")
    assert found.seen_by(right, "ratio = wrong.unwaited(ratio, dp_shard)") in ("collectives", "field")
