"""Every row of the conversion table against four simulated ranks: the value forward, the adjoint backward."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ndcompile.placement import (
    BY_NAME,
    COLLECTIVES,
    CONVERSIONS,
    REDUCING,
    TABLE,
    Conversion,
    I,
    Layout,
    P,
    Placement,
    R,
    S,
)
from tests.simulate import Illegal, Ranks, backward, deal, denote, numbers, perform

RANKS, SHAPE = 4, (16, 32)
OF_KIND = {"R": (R,), "I": (I,), "P": (P(),), "S": (S(0), S(1))}
PRIMITIVES = ("identity", "first", "chunk", "pad", *sorted(COLLECTIVES))


def ends(row: Conversion) -> list[tuple[Placement, Placement]]:
    """The placements of a two-dim value that a row converts."""
    pairs = itertools.product(OF_KIND[row.source], OF_KIND[row.target])
    return [(source, target) for source, target in pairs if source != target]


CASES = [pytest.param(row, *pair, id=f"{pair[0]}→{pair[1]}") for row in TABLE for pair in ends(row)]


def converts(row: Conversion, source: Placement, target: Placement) -> bool:
    """The forward primitive keeps the value, in tensors that the target allows."""
    value = numbers(*SHAPE)
    try:
        return torch.equal(denote(perform(row.forward, source, target, deal(value, source, RANKS)), target), value)
    except Illegal:
        return False


def is_adjoint(row: Conversion, source: Placement, target: Placement) -> bool:
    """⟨cotangent, forward(x)⟩ = ⟨backward(cotangent), x⟩, in tensors that the gradients' placements allow."""
    value, gradient = numbers(*SHAPE), numbers(*SHAPE)
    out = perform(row.forward, source, target, deal(value, source, RANKS))
    try:
        back = backward(row.backward, source, target, deal(gradient, target.dual, RANKS))
        arrived = denote(back, source.dual)
    except Illegal:
        return False
    return arrived.shape == value.shape and torch.equal((gradient * denote(out, target)).sum(), (arrived * value).sum())


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(("row", "source", "target"), CASES)
def test_forward_keeps_the_value(row: Conversion, source: Placement, target: Placement) -> None:
    assert all(converts(row, source, target) for _ in range(10))


@pytest.mark.parametrize(("row", "source", "target"), CASES)
def test_backward_is_the_adjoint(row: Conversion, source: Placement, target: Placement) -> None:
    assert all(is_adjoint(row, source, target) for _ in range(10))


@pytest.mark.parametrize(("row", "source", "target"), CASES)
def test_backward_is_what_autograd_finds(row: Conversion, source: Placement, target: Placement) -> None:
    gradient = numbers(*SHAPE)
    cotangents = deal(gradient, target.dual, RANKS)
    leaves = [x.requires_grad_() for x in deal(numbers(*SHAPE), source, RANKS)]
    paired(perform(row.forward, source, target, leaves), cotangents, target).backward()
    found = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
    # Autograd counts every rank's copy of an I by itself: together, the copies' gradients are the value's.
    back = backward(row.backward, source, target, cotangents)
    assert torch.equal(denote(found, P() if source == I else source.dual), denote(back, source.dual))


def paired(xs: Ranks, cotangents: Ranks, placement: Placement) -> Tensor:
    """⟨cotangent, value⟩ from the ranks' tensors: their products add up, except that an I is one value, not four."""
    products = torch.stack([(x * c).sum() for x, c in zip(xs, cotangents, strict=True)])
    return products[0] if placement == I else products.sum()


@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("target", [R, I])
def test_extremes_reduce_like_sums(op: str, target: Placement) -> None:
    assert converts(CONVERSIONS["P", target.kind], P(op), target)


def test_only_a_placement_itself_is_not_in_the_table() -> None:
    kinds = set(itertools.product("RISP", repeat=2))
    assert kinds - set(CONVERSIONS) == {("R", "R"), ("I", "I"), ("P", "P")}
    assert len(CONVERSIONS) == len(TABLE) == 13


# What leaves P without a reduction, or makes one of S without a gather, or adds up equal tensors.
ILLEGAL = [
    (P(), R, "identity"),
    (P(), I, "identity"),
    (P(), R, "first"),
    (P(), S(0), "chunk"),
    (S(0), R, "identity"),
    (S(0), I, "identity"),
    (S(0), R, "all_reduce"),
    (S(0), I, "all_reduce"),
    (S(0), S(1), "identity"),
    (R, I, "all_reduce"),
    (I, R, "all_reduce"),
    (R, P(), "identity"),
    (I, P(), "identity"),
    (R, S(0), "reduce_scatter"),
    (I, S(0), "reduce_scatter"),
]


@pytest.mark.parametrize(("source", "target", "primitive"), ILLEGAL)
def test_illegal_conversions_change_the_value(source: Placement, target: Placement, primitive: str) -> None:
    assert not converts(Conversion(source.kind, target.kind, "wrong", primitive, primitive), source, target)


@pytest.mark.parametrize(("row", "source", "target"), CASES)
def test_no_other_primitive_goes_forward(row: Conversion, source: Placement, target: Placement) -> None:
    working = [name for name in PRIMITIVES if converts(replace(row, forward=name), source, target)]
    assert working == [row.forward]


@pytest.mark.parametrize(("row", "source", "target"), CASES)
def test_no_other_primitive_goes_backward(row: Conversion, source: Placement, target: Placement) -> None:
    working = [name for name in PRIMITIVES if is_adjoint(replace(row, backward=name), source, target)]
    assert working == [row.backward]


SWAPS = [
    (one.name, other.name)
    for one, other in itertools.permutations(TABLE, 2)
    if one.forward == other.forward and one.backward != other.backward
]


@pytest.mark.parametrize(("name", "other"), SWAPS)
def test_rows_with_one_forward_cannot_exchange_backwards(name: str, other: str) -> None:
    mutant = replace(BY_NAME[name], backward=BY_NAME[other].backward)
    assert not any(is_adjoint(mutant, *pair) for pair in ends(mutant))


def test_the_swaps_that_break_gradients_in_practice_are_among_them() -> None:
    assert {("all_reduce", "all_reduce_invariant"), ("all_gather", "all_gather_invariant")} <= set(SWAPS)
    assert {("shard", "shard_invariant"), ("replicate", "invariant"), ("partial", "partial_invariant")} <= set(SWAPS)


def test_backward_of_a_row_is_the_forward_of_the_dual_row() -> None:
    for row in TABLE:
        source, target = ends(row)[0]
        if target.dual != source.dual:
            assert CONVERSIONS[target.dual.kind, source.dual.kind].forward == row.backward


@pytest.mark.parametrize("placement", [R, I, P(), S(0), S(3)])
def test_dual_is_an_involution(placement: Placement) -> None:
    assert placement.dual.dual == placement


def test_duals() -> None:
    assert (R.dual, I.dual, P().dual, S(2).dual) == (P(), I, R, S(2))


@pytest.mark.parametrize("op", ["max", "min"])
def test_an_extreme_has_no_gradient(op: str) -> None:
    with pytest.raises(ValueError, match=rf"^no gradient flows through P\({op}\)$"):
        _ = P(op).dual


def test_placements_print_as_written() -> None:
    assert [str(p) for p in (R, I, S(1), P(), P("max"))] == ["R", "I", "S(1)", "P", "P(max)"]
    assert repr(S(1)) == "S(1)"


def test_only_replicated_placements_are_whole() -> None:
    assert [p for p in (R, I, S(0), P()) if p.whole] == [R, I]


def test_what_reduces_also_communicates() -> None:
    assert REDUCING < COLLECTIVES
    assert {row.forward for row in TABLE} | {row.backward for row in TABLE} == set(PRIMITIVES)


LAYOUT = Layout.make(3, {"dp_shard": S(0), "tp": S(1), "dp_replicate": S(0), "tp.1": P(), "cp": I})


def test_a_layout_prints_shards_by_dim_then_the_rest() -> None:
    assert str(LAYOUT) == repr(LAYOUT) == "dp_shard S(0) · dp_replicate S(0) · tp S(1) · cp I · tp.1 P"


def test_a_layout_knows_the_placement_on_every_axis() -> None:
    axes = ("dp_shard", "dp_replicate", "tp", "cp", "tp.1", "elsewhere")
    assert [LAYOUT.on(axis) for axis in axes] == [S(0), S(0), S(1), I, P(), R]
    assert LAYOUT.axes == ("dp_shard", "dp_replicate", "tp", "cp", "tp.1")


def test_axes_on_one_dim_keep_their_order() -> None:
    tp_major, dp_major = ({"tp": S(0), "dp_shard": S(0)}, {"dp_shard": S(0), "tp": S(0)})
    assert Layout.make(1, tp_major).dims == (("tp", "dp_shard"),)
    assert Layout.make(1, tp_major) != Layout.make(1, dp_major)


def test_the_order_of_other_axes_means_nothing() -> None:
    assert Layout.make(1, {"tp": P(), "dp_shard": I}) == Layout.make(1, {"dp_shard": I, "tp": P()})


def test_a_replaced_shard_is_the_minor_one_of_its_dim() -> None:
    assert LAYOUT.replace("tp", S(0)).dims == (("dp_shard", "dp_replicate", "tp"), (), ())
    assert LAYOUT.replace("dp_shard", S(0)).dims[0] == ("dp_replicate", "dp_shard")


def test_replace_changes_one_axis_only() -> None:
    changed = LAYOUT.replace("dp_shard", R)
    assert changed.on("dp_shard") == R
    assert changed.without(["dp_shard"]) == LAYOUT.without(["dp_shard"])


def test_the_dual_of_a_layout_is_the_dual_on_every_axis() -> None:
    assert LAYOUT.dual.dual == LAYOUT
    assert all(LAYOUT.dual.on(axis) == LAYOUT.on(axis).dual for axis in LAYOUT.axes)


@pytest.mark.parametrize("dim", [-1, 2])
def test_a_shard_is_of_a_dim_that_exists(dim: int) -> None:
    with pytest.raises(AssertionError, match="of 2 dims"):
        Layout.make(2, {"tp": S(dim)})
    with pytest.raises(AssertionError, match="of 2 dims"):
        Layout.make(2, {}).replace("tp", S(dim))
