"""Gradients of several microbatches, reduced once, are those of one device on all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

import ndcompile as nd
from ndcompile.mesh import MeshSpec
from ndcompile.runtime import Bucket, Mesh, private
from ndcompile.runtime.harvest import Forward, Harvest
from ndcompile.runtime.lane import Lane
from tests.claims import assert_same_gradients
from tests.equivalence.compare import own_rows
from tests.models import Stack, seeded, tokens
from tests.ranks import run
from tests.runtime.test_weights import SHAPES, batch, check, compute, plain, setup, whole

MICROBATCHES = 3
SHARDED = "dp_shard=2, cp=2"
"""Every parameter is sharded over both axes: no gradient is held back."""


def batches() -> list[dict[str, Tensor]]:
    """Of different tokens each, the same on every rank."""
    found = []
    for number in range(MICROBATCHES):
        torch.manual_seed(number)
        found.append({name: x[torch.randperm(len(x))].roll(number, 1) for name, x in tokens().items()})
    return found


def rows(of: dict[str, Tensor], mesh: str) -> dict[str, Tensor]:
    return own_rows(of, MeshSpec.parse(mesh), dist.get_rank())


@contextmanager
def counted() -> Iterator[Counter]:
    """The calls of the two reductions of gradients."""
    counts: Counter = Counter()

    def noting(name: str) -> Callable[..., Any]:
        original = getattr(private, name)

        def call(*args: Any) -> Any:
            counts[name] += 1
            return original(*args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce_in_place", "start_reduce_scatter_each"):
            patch.setattr(private, name, noting(name))
        yield counts


def train(parallel: nd.ParallelModule, mesh: str, accumulating: bool) -> Counter:
    with counted() as counts:
        for number, of in enumerate(batches()):
            last = number == MICROBATCHES - 1
            with nullcontext() if last or not accumulating else parallel.accumulate():
                (parallel(**rows(of, mesh))["loss"] / MICROBATCHES).backward()
    return counts


def accumulates(mesh: str) -> None:
    model = seeded(Stack, depth=2).double()
    parallel = nd.parallelize(model, mesh, tokens(), float64=True)
    for of in batches():
        (model(**of)["loss"] / MICROBATCHES).backward()
    each = train(parallel, mesh, accumulating=False)
    assert_same_gradients(parallel, model)
    parallel.zero_grad()
    once = train(parallel, mesh, accumulating=True)
    assert_same_gradients(parallel, model)
    add, scatter = "all_reduce_in_place", "start_reduce_scatter_each"
    assert once[add] * MICROBATCHES == each[add] and once[scatter] == each[scatter]
    assert (each[add] > 0) == (mesh != SHARDED)
    torch.optim.AdamW(parallel.parameters()).step()


def what_is_held_back_is_lent_to_the_lane(mesh: str) -> None:
    """So that its memory is nobody else's while the lane reads it."""
    parallel = nd.parallelize(seeded(Stack), mesh, tokens())
    with parallel.accumulate():
        parallel(**rows(tokens(), mesh))["loss"].backward()
    buckets = parallel._program()[0]._state.order
    held = deferred(*buckets)
    with lending() as lent:
        parallel(**rows(tokens(), mesh))["loss"].backward()
    assert held and held <= lent


def deferred(*buckets: Bucket) -> set[int | None]:
    """The memory of what buckets hold back."""
    return {private.storage_id(x) for bucket in buckets for x in bucket._deferred.values()}


@contextmanager
def lending() -> Iterator[set[int | None]]:
    """The memory that is lent to lanes meanwhile."""
    lent, call = set[int | None](), Lane.__call__

    def noting(lane: Lane, *tensors: Tensor) -> Any:
        lent.update(map(private.storage_id, tensors))
        return call(lane, *tensors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lane, "__call__", noting)
        yield lent


def a_step_in_between_is_an_error(mesh: str) -> None:
    parallel = nd.parallelize(seeded(Stack).double(), mesh, tokens(), float64=True)
    optimizer = torch.optim.SGD(parallel.parameters())
    with parallel.accumulate():
        parallel(**rows(tokens(), mesh))["loss"].backward()
    with pytest.raises(private.UnfinishedGradients, match="before the last microbatch"):
        optimizer.step()
    parallel.zero_grad()
    parallel(**rows(tokens(), mesh))["loss"].backward()
    model = seeded(Stack).double()
    model(**tokens())["loss"].backward()
    assert_same_gradients(parallel, model)
    optimizer.step()


def what_the_last_does_not_use_is_reduced_too() -> None:
    """Two buckets, of which the last microbatch uses the first alone."""
    made = [setup("dp_replicate=2", seed) for seed in range(2)]
    (first, _), (second, _) = made
    x = batch(dist.get_rank())

    def flush(harvest: Harvest) -> None:
        for bucket in (first, second):
            bucket.flush(harvest)

    def used(bucket: Bucket, forward: Forward, defer: bool) -> Tensor:
        with bucket.gathered(forward, defer=defer) as w:
            return (compute(w, x) ** 2).sum()

    for bucket, held in made:
        used(bucket, Forward.of(Harvest(held, bucket._lane)), defer=True).backward()
        assert all(p.grad is None for p in held.values())
    harvest = Harvest(made[0][1] | {f"second {n}": p for n, p in made[1][1].items()}, first._lane, flush)
    second._names = tuple(f"second {n}" for n in second._names)
    second.parameters = {f"second {n}": p for n, p in made[1][1].items()}
    held_back = deferred(second)
    with lending() as lent:
        used(first, Forward.of(harvest), defer=False).backward()
    assert held_back and held_back <= lent
    mesh = Mesh(MeshSpec.parse("dp_replicate=2"), dist.get_rank())
    for (_, held), want, times in zip(made, [expected_of(0), expected_of(1)], (2.0, 1.0), strict=True):
        check(held, want, mesh, factor=times)


def expected_of(seed: int) -> dict[str, Tensor]:
    """Gradients on one device of one bucket alone, on both ranks' batches."""
    block = plain(whole(seed))
    for rank in range(2):
        (compute(block, batch(rank)) ** 2).sum().backward()
    return {name: getattr(block, name).grad for name in SHAPES}


def all_claims(mesh: str) -> None:
    accumulates(mesh)
    if mesh != SHARDED:
        a_step_in_between_is_an_error(mesh)
        what_is_held_back_is_lent_to_the_lane(mesh)


MORE = [pytest.param(mesh, marks=pytest.mark.full) for mesh in ("dp_replicate=2", SHARDED)]


@pytest.mark.parametrize("mesh", ["tp=2", "dp_replicate=2, dp_shard=2", *MORE])
def test_microbatches(mesh):
    ranks = 4 if "," in mesh else 2
    run(ranks, all_claims, mesh, timeout=240)


def test_the_ends_of_gradients_are_as_autograd_has_them():
    run(2, hooks_accumulation_and_grad, timeout=240)


def hooks_accumulation_and_grad() -> None:
    """Hooks of parameters see whole gradients, `autograd.grad` gives them, and `.grad` adds up."""
    model = seeded(Stack, depth=2).double()
    mesh = "dp_shard=2"
    parallel = nd.parallelize(model, mesh, tokens(), float64=True)
    named, seen = dict(parallel.named_parameters()), dict[str, Any]()
    for name, parameter in named.items():
        parameter.register_hook(partial(seen.__setitem__, name))
    model(**tokens())["loss"].backward()
    parallel(**rows(tokens(), mesh))["loss"].backward()
    parallel(**rows(tokens(), mesh))["loss"].backward()
    found = torch.autograd.grad(parallel(**rows(tokens(), mesh))["loss"], list(named.values()))
    for (name, parameter), got in zip(model.named_parameters(), found, strict=True):
        want = parameter.grad
        assert want is not None
        for value, times in ((seen[name], 1), (got, 1), (named[name].grad, 2)):
            assert isinstance(value, DTensor)
            assert_close(value.full_tensor(), times * want, rtol=1e-10, atol=1e-12)


def test_flush():
    run(2, what_the_last_does_not_use_is_reduced_too)
