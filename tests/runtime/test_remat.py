"""A recomputed function keeps its arguments, gives the same gradients, draws the same bits, and gathers no more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import ndcompile as nd
from ndcompile.runtime import dropout, private, recomputed
from ndcompile.runtime.remat import SAVABLE
from ndcompile.verify import lockstep
from ndcompile.verify.domain import Float64
from ndcompile.verify.execute import on_ranks
from ndcompile.verify.sample import draw
from tests.models import Stack, seeded, tokens

KEY = torch.tensor(7)


class Weights(NamedTuple):
    up: Tensor
    down: Tensor


def inner(w: Weights, x: Tensor, key: Tensor) -> Tensor:
    hidden = dropout(F.gelu(F.linear(x, w.up)), 0.5, key, 3)
    return x + dropout(F.linear(hidden, w.down), 0.25, key, 4)


def given() -> tuple[Weights, Tensor]:
    generator = torch.Generator().manual_seed(0)
    up, down, x = (torch.randn(n, generator=generator, dtype=torch.float64) for n in ((20, 12), (12, 20), (6, 12)))
    return Weights(up.requires_grad_(), down.requires_grad_()), x.requires_grad_()


def gradients(function: Callable[..., Tensor]) -> list[Tensor]:
    w, x = given()
    y = function(w, x, KEY)
    return [y, *torch.autograd.grad(y.square().sum(), [*w, x])]


@contextmanager
def counted() -> Iterator[Counter[Any]]:
    """How often each op is done inside."""
    found: Counter[Any] = Counter()

    def run(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found[op] += 1
        return op(*args, **kwargs)

    with private.dispatched(run):
        yield found


@pytest.mark.parametrize("save", [(), ("linear",)])
def test_results_gradients_and_dropped_elements_are_the_same_bits(save: tuple[str, ...]) -> None:
    for found, right in zip(gradients(recomputed(inner, save=save)), gradients(inner), strict=True):
        assert torch.equal(found, right)


def test_random_numbers_of_torch_are_left_alone() -> None:
    before = torch.get_rng_state()
    gradients(recomputed(inner))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("save, products", [(None, 0), ((), 2), (("linear",), 0)])
def test_saved_results_are_not_computed_again(save: tuple[str, ...] | None, products: int) -> None:
    """Each product has two of its own in backward."""
    w, x = given()
    y = (inner if save is None else recomputed(inner, save=save))(w, x, KEY).square().sum()
    with counted() as ops:
        y.backward()
    assert sum(ops[op] for op in SAVABLE["linear"]) == 4 + products


def test_only_arguments_are_saved() -> None:
    w, x = given()
    kept: list[Tensor] = []

    def pack(saved: Tensor) -> Tensor:
        kept.append(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        recomputed(inner)(w, x, KEY)
    with_elements = [saved for saved in kept if saved.numel()]  # torch 2.11 keeps one without
    assert {private.storage_id(x) for x in with_elements} == {private.storage_id(x) for x in (*w, x, KEY)}


def test_without_gradients_it_is_the_function() -> None:
    w, x = given()
    with torch.no_grad():
        assert torch.equal(recomputed(inner)(w, x, KEY), inner(w, x, KEY))


@pytest.mark.parametrize("save", [(), ("linear",)])
def test_compiled_as_one_graph(save: tuple[str, ...]) -> None:
    compiled = torch.compile(recomputed(inner, save=save), backend="aot_eager", fullgraph=True)
    for found, right in zip(gradients(compiled), gradients(inner), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)


def collectives(monkeypatch: pytest.MonkeyPatch, remat: str | tuple[str, ...]) -> Counter[tuple[str, str]]:
    """Of one forward and backward of two blocks on two axes."""
    model, found = seeded(Stack).double(), Counter[tuple[str, str]]()
    program = nd.compile(model, "dp_shard=2, tp=2", tokens(), float64=True, remat=remat)
    domain, perform = Float64(0), lockstep.perform

    def noted(domain: Any, requests: Any) -> Any:
        found[requests[0].op, requests[0].group] += 1
        return perform(domain, requests)

    sample = draw(program, domain, model, microbatches=1, steps=1)
    with monkeypatch.context() as patch:
        from ndcompile.verify.execute import on_one_device

        on_one_device(program, sample, domain)
        patch.setattr(lockstep, "perform", noted)
        on_ranks(program, sample, domain)
    return found


def test_a_recomputation_gathers_no_weights_and_stops_before_the_last_reduction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a block's two conversions forward, the gather is done again, and the last reduction is not needed."""
    none, block = collectives(monkeypatch, "none"), collectives(monkeypatch, "block")
    blocks, groups = 2, 2
    assert block - none == Counter({("all_gather_into_tensor", "tp"): blocks * groups})
    assert none - block == Counter()
    assert collectives(monkeypatch, ("linear", "all_gather")) == none
