"""A head–tail sequence: who holds what, and conversions that give the value and its gradient back in natural order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ndcompile.mesh import MeshSpec
from ndcompile.placement import IN_ORDER, TABLE, Placement, S
from ndcompile.runtime import collectives
from ndcompile.runtime.mesh import Mesh, Ranks
from ndcompile.runtime.random import uniform_bits
from ndcompile.runtime.sequence import dealt, natural, positions, spans
from ndcompile.verify.domain import Float64
from ndcompile.verify.lockstep import RanksDisagree, mesh_of, run_ranks
from tests.ranks import run
from tests.runtime.test_collectives import denoted, placed, spread


def held(ranks: int, size: int) -> list[list[int]]:
    """The positions that each rank holds, by the definition."""
    step = size // (2 * ranks)
    chunks = [list(range(i * step, (i + 1) * step)) for i in range(2 * ranks)]
    return [chunks[r] + chunks[2 * ranks - 1 - r] for r in range(ranks)]


def test_a_rank_holds_an_early_and_a_late_chunk() -> None:
    axes = [Ranks("cp", 3, rank, "cp") for rank in range(3)]
    assert [positions(12, axis).tolist() for axis in axes] == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    assert [positions(7, axis, balanced=False).tolist() for axis in axes] == [[0, 1, 2], [3, 4, 5], [6]]
    assert positions(5, Ranks("cp", 1, 0, "cp")).tolist() == [0, 1, 2, 3, 4]
    assert spans(12, axes[2]) == [(4, 6), (6, 8)]


def test_each_rank_has_the_same_number_of_causal_pairs() -> None:
    for ranks in (2, 3, 4):
        pairs = {sum(q + 1 for q in own) for own in held(ranks, 8 * ranks)}
        assert len(pairs) == 1


def test_a_length_that_does_not_divide_says_which_would() -> None:
    with pytest.raises(ValueError) as error:
        spans(10, Ranks("cp", 2, 0, "cp"))
    assert str(error.value) == (
        "a sequence of 10 does not divide into 4 equal chunks\n"
        "  why  each of 2 ranks holds two of them, an early one and a late one\n"
        "  try  a length of 8 or 12, or balanced=False"
    )


@given(ranks=st.integers(2, 5), step=st.integers(0, 3))
def test_dealt_and_natural_are_inverse(ranks: int, step: int) -> None:
    x = torch.arange(2 * 2 * ranks * step).view(2, -1)
    there = dealt(x, 1, ranks)
    assert there[0].tolist() == [p for own in held(ranks, 2 * ranks * step) for p in own]
    assert torch.equal(natural(there, 1, ranks), x)


def reordered(x: Tensor, ranks: int, dims: list[int]) -> Tensor:
    for dim in dims:
        x = x.index_select(dim, torch.tensor([p for own in held(ranks, x.shape[dim]) for p in own]))
    return x


Case = tuple[str, Placement, Placement, tuple[bool, bool]]


def cases() -> list[Case]:
    """Every row that has a sharded dim, on every dim; between two shards, either or both of them head–tail."""
    found: list[Case] = []
    for row in TABLE:
        both = row.source == row.target == "S"
        for dim in range(3) if "S" in (row.source, row.target) else ():
            source, target = placed(row.source, dim), placed(row.target, (dim + 1) % 3 if both else dim)
            for orders in [(True, False), (False, True), (True, True)] if both else [(True, True)]:
                found.append((row.name, source, target, orders))
    return found + [(IN_ORDER.name, S(dim), S(dim), (True, False)) for dim in range(3)]


def convert(
    name: str, x: Tensor, axis: Ranks, source: Placement, target: Placement, orders: tuple[bool, bool]
) -> Tensor:
    if name == IN_ORDER.name:
        assert source.dim is not None
        return collectives.in_order(x, axis, dim=source.dim)
    dims = [p.dim for p in (source, target) if p.kind == "S"]
    given = dict(balanced=orders[0], balanced_target=orders[1]) if len(dims) == 2 else dict(balanced=True)
    return getattr(collectives, name)(x, axis, *dims, **given)


@settings(max_examples=20, deadline=None)
@given(ranks=st.integers(2, 5), step=st.integers(1, 2), data=st.data())
def test_each_conversion_keeps_the_value_and_the_gradient(ranks: int, step: int, data: st.DataObject) -> None:
    name, source, target, orders = data.draw(st.sampled_from(cases()))
    spec = MeshSpec.parse(f"tp={ranks}")
    x, c = (torch.randint(-99, 99, (2 * ranks * step,) * 3).double() for _ in range(2))

    def in_order(value: Tensor, placement: Placement, balanced: bool) -> Tensor:
        return reordered(value, ranks, [placement.dim] if placement.dim is not None and balanced else [])

    own = spread(in_order(x, source, orders[0]), source, ranks)
    cotangents = spread(in_order(c, target, orders[1]), target.dual, ranks)

    def both_sides(rank: int) -> tuple[Tensor, Tensor]:
        leaf = own[rank].clone().requires_grad_()
        y = convert(name, leaf, mesh_of(spec, rank)["tp"], source, target, orders)
        y.backward(cotangents[rank])
        assert leaf.grad is not None
        return y.detach(), leaf.grad

    answers = run_ranks(spec, Float64(0), both_sides)
    assert torch.equal(denoted([y for y, _ in answers], target), in_order(x, target, orders[1]))
    assert torch.equal(denoted([g for _, g in answers], source.dual), in_order(c, source, orders[0]))


def test_random_numbers_follow_the_positions() -> None:
    key = torch.tensor(3)
    whole = uniform_bits((2, 12, 5), key, 1)
    for rank, own in enumerate(held(3, 12)):
        part = uniform_bits((2, 4, 5), key, 1, {1: Ranks("cp", 3, rank, "cp")}, balanced=(1,))
        assert torch.equal(part, whole[:, own])


def on_gloo(ranks: int) -> list[Tensor]:
    axis = Mesh.bound(MeshSpec.parse(f"tp={ranks}"))["tp"]

    def there_and_back(x: Tensor) -> Tensor:
        own = collectives.shard(x, axis, 1, balanced=True)
        own = own * positions(8, axis)
        turned = collectives.all_to_all(own, axis, 1, 0, balanced=True)
        return collectives.all_gather(turned, axis, 0)

    found = []
    for function in (there_and_back, torch.compile(there_and_back, backend="aot_eager", fullgraph=True)):
        x = torch.arange(16.0).view(2, 8).requires_grad_()
        y = function(x)
        y.sum().backward()
        assert x.grad is not None
        found += [y.detach(), x.grad]
    return found


def test_real_ranks_and_compiled_code_agree() -> None:
    x, p = torch.arange(16.0).view(2, 8), torch.arange(8.0)
    answers = run(2, on_gloo, 2)
    for y, _, again, _ in answers:
        assert torch.equal(y, x * p) and torch.equal(again, x * p)
    for i in (1, 3):
        assert torch.equal(answers[0][i] + answers[1][i], 2 * p.expand(2, 8))


def test_ranks_that_expect_other_rows_than_are_sent_disagree() -> None:
    def uneven(rank: int) -> Tensor:
        ops = torch.ops._c10d_functional
        return ops.wait_tensor(ops.all_to_all_single(torch.ones(2), [1, 1], [2, 0] if rank else [1, 1], "tp"))

    with pytest.raises(RanksDisagree, match=r"waits for \[1, 1\] rows, but \[1, 2\] are sent"):
        run_ranks(MeshSpec.parse("tp=2"), Float64(0), uneven)
