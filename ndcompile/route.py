"""The cheapest way from one layout of a value to another: a shortest path over layouts, whose steps are conversions."""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ndcompile.cost import conversion_time
from ndcompile.placement import Conversion, I, Layout, P, Placement, R, S, row_of

T = TypeVar("T")

MOVE = 1e-12
"""Seconds added to each move in the search: of equally fast ways, whose sums round differently, the shortest wins."""

Divides = Callable[[int, tuple[str, ...]], bool]
"""Whether a dim can be cut evenly in as many parts as these axes together have ranks."""

Cuts = frozenset[tuple[int, tuple[str, ...]]]
"""What the search knows of a value's shape: dims, and sets of axes in mesh order that divide them."""

Sizes = tuple[tuple[str, int], ...]
"""The mesh's axes and their sizes."""

Slots = tuple[tuple[int, ...], ...]
"""A layout in the search: for each placement the numbers of the axes that have it; a shard's are major first."""

Shard = tuple[int, tuple[int, ...]]
"""A dim and the axes on it, major first."""

Step = tuple[int, int, tuple[int, ...]]
"""A move in the search: from which slot, to which slot, which axes."""


class RouteError(ValueError):
    """Two layouts that no legal conversions connect."""


@dataclass(frozen=True)
class Move:
    """One conversion of a value, on one axis or on several flattened into one, major first.

    >>> move = Move(("dp_replicate", "dp_shard"), P(), R)
    >>> print(move, "by", move.conversion.name)
    dp_replicate × dp_shard P→R by all_reduce
    >>> move.apply(Layout.make(1, {"dp_replicate": P(), "dp_shard": P(), "tp": S(0)}))
    tp S(0) · dp_replicate R · dp_shard R
    """

    axes: tuple[str, ...]
    source: Placement
    target: Placement

    @property
    def conversion(self) -> Conversion:
        """The row of the table: its runtime function and its primitives."""
        row = row_of(self.source, self.target)
        assert row is not None, f"no conversion is {self.source}→{self.target}"
        return row

    def apply(self, layout: Layout) -> Layout:
        """The layout after the move; new shards are the minor ones of their dim."""
        for axis in self.axes:
            layout = layout.replace(axis, self.target)
        return layout

    def __str__(self) -> str:
        turned = " in order" if self.source == self.target else ""
        return f"{' × '.join(self.axes)} {self.source}→{self.target}{turned}"


def route(
    source: Layout,
    target: Layout,
    sizes: Mapping[str, int],
    nbytes: float,
    grad: bool = True,
    divides: Divides | None = None,
) -> tuple[Move, ...]:
    """The cheapest legal moves from one layout of a value to another.

    `sizes` are the mesh's axes, in mesh order; `nbytes` is the whole value's. On a dim only the minor axis may move, or
    several minor axes at once where they stand in mesh order; the target's order of axes is reached exactly. Without
    `grad` both replicated placements are one. `divides(dim, axes)` opens further shards on the way; left out, a dim is
    cut only as finely as one of the two ends cuts it, and both ends are taken to divide evenly.

    >>> sizes = {"dp_shard": 2, "tp": 4}
    >>> here, there = Layout.make(2, {"tp": S(0)}), Layout.make(2, {"dp_shard": S(1), "tp": S(1)})
    >>> [str(move) for move in route(here, there, sizes, nbytes=2**20)]
    ['dp_shard R→S(1)', 'tp S(0)→S(1)']

    Raises `RouteError` if there is no way.
    """
    return _cheapest(source, target, tuple(sizes.items()), nbytes, grad, _cuts(source, sizes, divides))[1]


def route_time(
    source: Layout,
    target: Layout,
    sizes: Mapping[str, int],
    nbytes: float,
    grad: bool = True,
    divides: Divides | None = None,
) -> float:
    """Seconds of the cheapest way, as `cost` reckons them; infinite if there is none.

    >>> route_time(Layout.make(1, {"tp": S(0)}), Layout.make(1, {"tp": S(0)}), {"tp": 4}, nbytes=2**20)
    0.0
    """
    try:
        return _cheapest(source, target, tuple(sizes.items()), nbytes, grad, _cuts(source, sizes, divides))[0]
    except RouteError:
        return math.inf


def _cuts(source: Layout, sizes: Mapping[str, int], divides: Divides | None) -> Cuts | None:
    """Everything that `divides` answers about a value: hashable, so that the search can be memoised."""
    if divides is None:
        return None
    axes = [axis for axis, size in sizes.items() if size > 1]
    cuts = ((dim, some) for dim in range(len(source.dims)) for some in _subsets(axes))
    return frozenset((dim, some) for dim, some in cuts if divides(dim, some))


def _subsets(items: Sequence[T]) -> Iterator[tuple[T, ...]]:
    """The subsets that are not empty, each in the order of the items."""
    return itertools.chain.from_iterable(itertools.combinations(items, n + 1) for n in range(len(items)))


def _orders(axes: tuple[int, ...], inner: bool) -> Iterator[tuple[int, ...]]:
    """The axes in every order, and with `inner` those of every part of them."""
    some = _subsets(axes) if inner else (axes,)
    return itertools.chain.from_iterable(map(itertools.permutations, some))


@functools.lru_cache(maxsize=65536)
def _cheapest(
    source: Layout, target: Layout, sizes: Sizes, nbytes: float, grad: bool, cuts: Cuts | None
) -> tuple[float, tuple[Move, ...]]:
    """The least time and its moves, by Dijkstra's algorithm; layouts are made as it reaches them."""
    space = _Space.between(source, target, sizes, nbytes, grad, cuts)
    start, goal = space.slots(source), space.slots(target)
    best = {start: 0.0}
    came: dict[Slots, tuple[Slots, Step]] = {}
    queue = [(0.0, start)]
    while queue:
        time, here = heapq.heappop(queue)
        if here == goal:
            moves = space.moves(came, goal)
            return time - MOVE * len(moves), moves
        if time > best[here]:
            continue
        for step, there, seconds in space.steps(here):
            reached = time + seconds + MOVE
            if there not in best or reached < best[there]:
                best[there], came[there] = reached, (here, step)
                heapq.heappush(queue, (reached, there))
    raise _no_way(source, target, grad)


def _no_way(source: Layout, target: Layout, grad: bool) -> RouteError:
    odd = [p for layout in (source, target) for _, p in layout.rest if p.kind == "P" and p.op != "sum"]
    assert odd, f"a sum can always be reduced, gathered and sliced: {source} to {target}"
    if grad:
        why, hint = f"no gradient flows through {odd[0]}", "detach the value first"
    else:
        why, hint = f"only an op makes {odd[0]}, and it only reduces to R or I", "reduce it where it is made"
    return RouteError(f"cannot convert {source} to {target}\n  why  {why}\n  try  {hint}")


@dataclass(frozen=True)
class _Space:
    """The layouts between two ends, and the steps between them. Axes are numbered in mesh order, without size 1.

    `even` has the shards that cut evenly: there, several axes move as one. `opens` has those and what the ends show.
    """

    rank: int
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    places: tuple[Placement, ...]
    nbytes: float
    grad: bool
    even: frozenset[Shard]
    opens: frozenset[Shard]
    legal: tuple[tuple[int, ...], ...]
    times: dict[tuple[int, int, int, float], float] = field(default_factory=dict)

    @classmethod
    def between(
        cls, source: Layout, target: Layout, sizes: Sizes, nbytes: float, grad: bool, cuts: Cuts | None
    ) -> _Space:
        rank = len(source.dims)
        assert rank == len(target.dims), f"{source} and {target} are of tensors with {rank} and {len(target.dims)} dims"
        unknown = (set(source.axes) | set(target.axes)) - {axis for axis, _ in sizes}
        assert not unknown, f"the mesh has no axis {sorted(unknown)}"
        number = {axis: i for i, axis in enumerate(axis for axis, size in sizes if size > 1)}
        dims = (*enumerate(source.dims), *enumerate(target.dims))
        ends = [(dim, tuple(number[a] for a in axes if a in number)) for dim, axes in dims]
        sets = ends if cuts is None else [(dim, tuple(number[a] for a in some)) for dim, some in cuts]
        even = frozenset((dim, order) for dim, some in sets for order in _orders(some, inner=cuts is None))
        tails = frozenset((dim, axes[: n + 1]) for dim, axes in ends for n in range(len(axes)))
        places = _places(source, target, grad)
        legal = tuple(tuple(j for j, q in enumerate(places) if _legal(p, q, grad)) for p in places)
        big = tuple(size for _, size in sizes if size > 1)
        return cls(rank, tuple(number), big, places, nbytes, grad, even, even | tails, legal)

    def slots(self, layout: Layout) -> Slots:
        """A layout in the form of the search."""
        rest = {axis: R if p == I and not self.grad else p for axis, p in layout.rest}
        shards = [tuple(self.axes.index(a) for a in axes if a in self.axes) for axes in layout.dims]
        free = [i for i in range(len(self.axes)) if not any(i in axes for axes in shards)]
        others = [tuple(i for i in free if rest.get(self.axes[i], R) == place) for place in self.places[len(shards) :]]
        return (*shards, *others)

    def moves(self, came: Mapping[Slots, tuple[Slots, Step]], end: Slots) -> tuple[Move, ...]:
        """The moves that led to an end."""
        found: list[Move] = []
        while end in came:
            end, (i, j, group) = came[end]
            found.append(Move(tuple(self.axes[a] for a in group), self.places[i], self.places[j]))
        return tuple(reversed(found))

    def steps(self, here: Slots) -> Iterator[tuple[Step, Slots, float]]:
        """Every legal step from a layout: what it is, where it leads, and its seconds."""
        cut = math.prod(self.sizes[a] for axes in here[: self.rank] for a in axes)
        for i, axes in enumerate(here):
            for group in self._groups(i, axes):
                ranks = math.prod(self.sizes[a] for a in group)
                local = self.nbytes / cut * (ranks if i < self.rank else 1)
                left = tuple(a for a in axes if a not in group)
                for j in self.legal[i]:
                    more = (*here[j], *group)
                    if j >= self.rank:
                        more = tuple(sorted(more))
                    elif (j, more) not in (self.opens if len(group) == 1 else self.even):
                        continue
                    there = list(here)
                    there[i], there[j] = left, more
                    yield (i, j, group), tuple(there), self._time(i, j, ranks, local)

    def _groups(self, i: int, axes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """The axes that may leave a slot together: of a shard the minor ones, in mesh order; of another, any."""
        if i >= self.rank:
            yield from _subsets(axes)
        elif axes:
            yield axes[-1:]
            start = len(axes) - 1
            while (i, axes) in self.even and start and axes[start - 1] < axes[start]:
                start -= 1
                yield axes[start:]

    def _time(self, i: int, j: int, ranks: int, local: float) -> float:
        key = (i, j, ranks, local)
        if key not in self.times:
            self.times[key] = conversion_time(self.places[i], self.places[j], local, ranks, self.grad)
        return self.times[key]


def _places(source: Layout, target: Layout, grad: bool) -> tuple[Placement, ...]:
    """The placements that a way may use: every shard first, then the replicated and the partial ones."""
    reductions = {p for layout in (source, target) for _, p in layout.rest if p.kind == "P"} | {P()}
    shards = tuple(S(dim) for dim in range(len(source.dims)))
    return (*shards, R, *([I] if grad else []), *sorted(reductions, key=str))


def _legal(source: Placement, target: Placement, grad: bool) -> bool:
    return source != target and math.isfinite(conversion_time(source, target, 1.0, 2, grad))
