"""What calls are drawn of: sizes that divide or not, 0, 1 and symbols; shapes that broadcast; dims; indices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ndcompile.size import Size
from tests.rules.case import Case, Number, Spec, ints, value

Draw = st.DrawFn
Calls = dict[str, st.SearchStrategy[Case]]

NUMBERS = (2, 3, 4, 6, 5, 1, 7, 8, 9, 12)
SYMBOLIC = (Size(12, ("b",)), Size(12, ("s",)), Size(8, ("b", "s")))


def calls(names: str, drawn: Callable[..., Case], *args: Any) -> Calls:
    """The calls of several ops (of `aten`, if not said otherwise), drawn alike."""
    full = [name if name.startswith("runtime.") else f"aten.{name}" for name in names.split()]
    return {op: st.composite(drawn)(op, *args) for op in full}


def chance(draw: Draw, one_in: int) -> bool:
    return draw(st.integers(0, one_in - 1)) == one_in - 1


def number(draw: Draw, low: int = 0, high: int = 12) -> int:
    """A size without symbols; 0 now and then, where `low` lets it."""
    if low == 0 and chance(draw, 20):
        return 0
    return draw(st.sampled_from([n for n in NUMBERS if max(low, 1) <= n <= high]))


def numbers(draw: Draw, least: int, most: int, low: int = 0, high: int = 12) -> list[int]:
    return [number(draw, low, high) for _ in range(draw(st.integers(least, most)))]


def sizes(draw: Draw, least: int = 0, most: int = 3, low: int = 0, high: int = 12) -> list[Number]:
    """The sizes of a tensor, of which one may be a symbol's."""
    found: list[Number] = list(numbers(draw, least, most, low, high))
    if found and chance(draw, 6):
        found[draw(st.integers(0, len(found) - 1))] = draw(st.sampled_from(SYMBOLIC))
    return found


def among(draw: Draw, rank: int) -> int:
    """A dim, counted from either end."""
    return draw(st.sampled_from([*range(-1, -rank - 1, -1), *range(rank)]))


def several(draw: Draw, rank: int, least: int = 1) -> list[int]:
    """Different dims in any order, each counted from either end."""
    chosen = draw(st.permutations(range(rank)))[: draw(st.integers(least, rank))]
    return [d - rank * draw(st.booleans()) for d in chosen]


def smaller(draw: Draw, shape: Sequence[Number]) -> list[Number]:
    """A shape that broadcasts to `shape`: without leading dims, or with some of size 1."""
    kept = list(shape)[draw(st.integers(0, len(shape))) if chance(draw, 2) else 0 :]
    return [1 if chance(draw, 4) else n for n in kept]


def pair(draw: Draw, low: int = 0) -> tuple[list[Number], list[Number]]:
    """Two shapes that broadcast, either the larger, or each in a dim of its own."""
    whole = sizes(draw, low=low)
    first = whole if chance(draw, 2) else smaller(draw, whole)
    second = whole if first != whole and chance(draw, 2) else smaller(draw, whole)
    return (first, second) if draw(st.booleans()) else (second, first)


def maybe_out_of_range(draw: Draw, call: Case, at: int, low: int, high: int) -> Case:
    """Now and then one index of the argument `at` is below `low` or not below `high`, and the call must fail."""
    given = call.args[at]
    index = (
        given[draw(st.sampled_from([i for i, g in enumerate(given) if g is not None]))]
        if isinstance(given, list)
        else given
    )
    if not chance(draw, 8) or call.empty:
        return call
    place = draw(st.integers(0, 1 << 20))
    wrong = draw(st.sampled_from([low - 1, high, high + 3]))

    def make(shape: tuple[int, ...]) -> Tensor:
        made = index.make(shape)
        made.view(-1)[place % made.numel()] = wrong
        return made

    spoilt = Spec(index.sizes, make, False)
    changed = [spoilt if g is index else g for g in given] if isinstance(given, list) else spoilt
    return replace(call, args=(*call.args[:at], changed, *call.args[at + 1 :]), fails=True)


def indices(draw: Draw, shape: Sequence[Number], high: int, negative: bool = False) -> Spec:
    """Indices of a dim of size `high`, which may count from its end."""
    return ints(*shape, low=-high if negative and draw(st.booleans()) else 0, high=max(high, 1))


def shape_of(spec: Spec) -> list[int]:
    return [value(n) for n in spec.sizes]


def scalar(values: float) -> Spec:
    return Spec((), lambda shape: torch.tensor(values), False)
