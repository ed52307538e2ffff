"""Reshape by factors: each row is a reshape of the parts alone, and no even shard that needs nothing is missed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ndcompile.placement import Placement, R, S
from ndcompile.rules.notation import Call, Signature
from ndcompile.rules.reshape import reshape
from ndcompile.rules.rows import rows
from ndcompile.rules.trial import Trial, deal, row_combinations
from ndcompile.size import Shape, Size, product

SYMBOLS = {"b": 3, "s": 5, "t": 2}
ATOMS = st.one_of(
    st.integers(1, 6).map(Size),
    st.sampled_from([Size(2, ("b",)), Size(1, ("b",)), Size(4, ("s",)), Size(1, ("s",)), Size(1, ("t",))]),
)
WAYS = st.sampled_from([(2,), (3,), (4,), (2, 2), (2, 3)])


@st.composite
def shapes(draw: st.DrawFn) -> tuple[Shape, Shape]:
    """Two groupings of the same factors, the second often in another order."""
    atoms = draw(st.lists(ATOMS, min_size=1, max_size=5))
    others = draw(st.permutations(atoms)) if draw(st.booleans()) else atoms
    return _grouped(draw, atoms), _grouped(draw, others)


def _grouped(draw: st.DrawFn, atoms: Sequence[Size]) -> Shape:
    cuts = sorted(draw(st.sets(st.integers(0, len(atoms)), max_size=len(atoms))))
    bounds = [0, *cuts, len(atoms)]
    return tuple(product(tuple(atoms[a:b])) for a, b in itertools.pairwise(bounds))


def numbers(shape: Shape) -> list[int]:
    return [size.value(SYMBOLS) for size in shape]


def sizes(*dims: int) -> Shape:
    return tuple(map(Size, dims))


def signature(source: Shape, target: Shape) -> Signature:
    return reshape(Call("reshape", (source,), target, {}))


def trial(source: Shape, target: Shape) -> Trial:
    values = torch.randn(numbers(source), dtype=torch.float64)
    return Trial(
        signature(source, target),
        (values,),
        (True,),
        lambda tensors: (tensors[0].reshape(numbers(target)),),
        lambda tensors, place: (tensors[0].reshape(place.shape),),
    )


def placements(source: Shape, target: Shape, *ways: int) -> set[tuple[tuple[Placement, ...], tuple[Placement, ...]]]:
    """What the rows allow on these axes: the placements of the operand, and those of the output."""
    found = row_combinations(signature(source, target), ways, [True])
    return {(tuple(row.operands[0] for row in chosen), tuple(row.output for row in chosen)) for chosen in found}


def needs_nothing(
    source: Shape, target: Shape, before: Sequence[Placement], after: Sequence[Placement], *ways: int
) -> bool:
    """By brute force: each rank's part, reshaped, is its part of the whole reshaped."""
    whole = torch.arange(math.prod(numbers(source))).reshape(numbers(source))
    given, wanted = deal(whole, before, ways), deal(whole.reshape(numbers(target)), after, ways)
    return all(torch.equal(given[i].reshape(-1), wanted[i].reshape(-1)) for i in given)


@settings(max_examples=150, deadline=None)
@given(shapes(), WAYS)
def test_every_row_reshapes_the_parts_alone(pair: tuple[Shape, Shape], ways: tuple[int, ...]) -> None:
    trial(*pair).check(*ways)


@settings(max_examples=150, deadline=None)
@given(shapes())
def test_factors_multiply_to_the_dims(pair: tuple[Shape, Shape]) -> None:
    bound = signature(*pair)
    for shape, dims in zip(pair, (bound.operands[0], bound.output), strict=True):
        assert [product(tuple(bound.sizes[f] for f in factors)) for factors in dims] == list(shape)


@settings(max_examples=150, deadline=None)
@given(shapes(), st.sampled_from([2, 3, 4]))
def test_no_even_shard_that_needs_nothing_is_missed(pair: tuple[Shape, Shape], ranks: int) -> None:
    source, target = (sizes(*numbers(shape)) for shape in pair)
    even = [[S(d) for d, size in enumerate(shape) if size.divides_by(ranks)] for shape in (source, target)]
    allowed = placements(source, target, ranks)
    for before, after in itertools.product(*even):
        assert (((before,), (after,)) in allowed) == needs_nothing(source, target, [before], [after], ranks)


def test_two_axes_on_a_dim_divide_by_their_product() -> None:
    found = placements(sizes(24), sizes(6, 4), 2, 2)
    assert ((S(0), R), (S(0), R)) in found
    assert ((S(0), S(0)), (S(0), S(0))) not in found


def test_heads_on_three_axes_divide_by_the_product_of_two() -> None:
    source, target = sizes(4, 16, 24), sizes(4, 16, 6, 4)
    found = {before for before, _ in placements(source, target, 2, 2, 2)}
    assert (S(0), S(2), R) in found and (S(0), S(2), S(1)) in found
    assert (S(0), S(2), S(2)) not in found
    trial(source, target).check(2, 2, 2)


def test_heads_that_divide_take_all_three_axes() -> None:
    source, target = sizes(4, 16, 32), sizes(4, 16, 8, 4)
    assert ((S(0), S(2), S(2)), (S(0), S(2), S(2))) in placements(source, target, 2, 2, 2)


B, SEQ, HIDDEN = Size(2, ("b",)), Size(2, ("s",)), Size(6)


@pytest.mark.parametrize("inverse", [False, True], ids=["flatten", "unflatten"])
def test_a_sequence_shard_does_not_pass_a_flattened_batch(inverse: bool) -> None:
    apart, flat = (B, SEQ, HIDDEN), (B * SEQ, HIDDEN)
    pair = (flat, apart) if inverse else (apart, flat)
    found = placements(*pair, 2, 2)
    assert ((S(0), R), (S(0), R)) in found
    sides = [after if inverse else before for before, after in found]  # the placements of the tensor with three dims
    assert not any(S(1) in side for side in sides)
    trial(*pair).check(2, 2)


def test_a_batch_of_one_a_rank_lets_the_sequence_pass() -> None:
    there, back = (sizes(2, 12, 5), sizes(24, 5)), (sizes(24, 5), sizes(2, 12, 5))
    assert ((S(0), S(1)), (S(0), S(0))) in placements(*there, 2, 3)
    assert ((S(0), S(0)), (S(0), S(1))) in placements(*back, 2, 3)
    trial(*there).check(2, 3)
    trial(*back).check(2, 3)


def test_a_minor_factor_is_sharded_where_its_major_is_full() -> None:
    source, target = sizes(2, 16), sizes(8, 4)
    assert ((S(0), S(1)), (S(0), S(0))) in placements(source, target, 2, 2)
    assert needs_nothing(source, target, [S(0), S(1)], [S(0), S(0)], 2, 2)


def test_columns_of_another_width_are_not_taken() -> None:
    source, target = sizes(12, 8), sizes(16, 6)
    assert S(1) not in {row.operands[0] for row in rows(signature(source, target), 4)}
    assert not needs_nothing(source, target, [S(1)], [S(0)], 4)


def test_what_follows_an_uncommon_stretch_is_shardable() -> None:
    found = placements(sizes(3, 2, 8), sizes(2, 3, 8), 4)
    assert ((S(2),), (S(2),)) in found


def test_an_uneven_dim_that_stays_a_dim_is_cut_unevenly() -> None:
    assert ((S(0),), (S(0),)) in placements(sizes(5, 6), sizes(5, 2, 3), 2)
    assert not [before for before, _ in placements(sizes(5, 6), sizes(30), 2) if before == (S(0),)]


def test_each_rank_of_an_uneven_dim_has_a_part() -> None:
    assert S(0) not in {row.output for row in rows(signature(sizes(4), sizes(4)), 3)}, "2, 2 and nothing"
    assert S(0) in {row.output for row in rows(signature(sizes(5), sizes(5)), 3)}, "2, 2 and 1"
