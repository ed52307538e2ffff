"""Placements of a value on the axes of a mesh, and the conversions between them: the tables that all else stands on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Placement:
    """What the ranks along one axis hold of a value.

    `R` and `I` hold equal tensors: the gradient of `R` is partial, that of `I` is equal on every rank. `S(dim)` holds
    the parts of dim `dim`, in rank order. `P(op)` holds different tensors that `op` makes the value of.

    `S(dim)` with `within` is of a dim that is a product: for each index of its major part, whose size `within` names,
    the ranks hold the parts of the rest. So lies a sequence in a dim that joins batch and sequence.
    """

    kind: str
    dim: int | None = None
    op: str | None = None
    within: str = ""

    def __str__(self) -> str:
        if self.kind == "S":
            return f"S({self.dim} in {self.within})" if self.within else f"S({self.dim})"
        return f"P({self.op})" if self.kind == "P" and self.op != "sum" else self.kind

    __repr__ = __str__

    @property
    def whole(self) -> bool:
        """Every rank holds the whole value."""
        return self.kind in "RI"

    @property
    def dual(self) -> Placement:
        """The placement of the gradient; `P(max)` and `P(min)` carry none."""
        if self.kind == "P" and self.op != "sum":
            raise ValueError(f"no gradient flows through {self}")
        return {"R": P(), "I": I, "S": self, "P": R}[self.kind]


R = Placement("R")
I = Placement("I")  # noqa: E741 - the field's letter for invariant


def S(dim: int, within: str = "") -> Placement:
    """Sharded along tensor dim `dim`, or along what is minor to its part of size `within`."""
    return Placement("S", dim=dim, within=within)


def P(op: str = "sum") -> Placement:
    """Partial: the value is the reduction of the ranks' tensors by `op` (sum, max or min)."""
    return Placement("P", op=op)


@dataclass(frozen=True)
class Conversion:
    """One legal change of a placement: its runtime function, and what moves in each direction.

    `forward` and `backward` are primitives: `identity`, `first` (zero on all ranks but the first), `chunk` (own part),
    `pad` (own part among zeros), and the collectives `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`.
    """

    source: str
    target: str
    name: str
    forward: str
    backward: str


TABLE: tuple[Conversion, ...] = (
    Conversion("I", "R", "replicate", "identity", "all_reduce"),
    Conversion("R", "I", "invariant", "identity", "first"),
    Conversion("R", "S", "shard", "chunk", "pad"),
    Conversion("R", "P", "partial", "first", "first"),
    Conversion("I", "S", "shard_invariant", "chunk", "all_gather"),
    Conversion("I", "P", "partial_invariant", "first", "identity"),
    Conversion("S", "R", "all_gather", "all_gather", "reduce_scatter"),
    Conversion("S", "I", "all_gather_invariant", "all_gather", "chunk"),
    Conversion("S", "S", "all_to_all", "all_to_all", "all_to_all"),
    Conversion("S", "P", "pad", "pad", "chunk"),
    Conversion("P", "R", "all_reduce", "all_reduce", "all_reduce"),
    Conversion("P", "I", "all_reduce_invariant", "all_reduce", "identity"),
    Conversion("P", "S", "reduce_scatter", "reduce_scatter", "all_gather"),
)
"""Every legal conversion on one axis. Nothing else leaves `P`, and nothing reduces an `R` or an `I`."""

IN_ORDER = Conversion("S", "S", "in_order", "all_to_all", "all_to_all")
"""From `S(d)` to `S(d)`: the ranks held two chunks of the dim each, head–tail, and now hold one part each, in order."""

CONVERSIONS: Mapping[tuple[str, str], Conversion] = {(row.source, row.target): row for row in TABLE}
BY_NAME: Mapping[str, Conversion] = {row.name: row for row in (*TABLE, IN_ORDER)}


def row_of(source: Placement, target: Placement) -> Conversion | None:
    """The conversion between two placements: of a shard that stays one of its dim, the one that puts it in order."""
    stays = source == target and source.kind == "S"
    return IN_ORDER if stays else CONVERSIONS.get((source.kind, target.kind))


COLLECTIVES = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all"})
"""The primitives that move bytes between ranks."""

REDUCING = frozenset({"all_reduce", "reduce_scatter"})
"""The primitives that add: each states its dtype."""


@dataclass(frozen=True)
class Layout:
    """A value's placements over all axes: for each dim the axes that shard it, major first, and the rest.

    >>> Layout.make(3, {"dp_shard": S(0), "tp": S(1)})
    dp_shard S(0) · tp S(1)
    """

    dims: tuple[tuple[str, ...], ...]
    rest: tuple[tuple[str, Placement], ...]
    within: tuple[tuple[str, str], ...] = ()
    """Of an axis that shards the minor part of its dim, the major part's size."""

    @classmethod
    def make(cls, rank: int, placements: Mapping[str, Placement]) -> Layout:
        """A layout for a tensor of `rank` dims; axes on one dim are in the mapping's order, major first."""
        dims: list[tuple[str, ...]] = [()] * rank
        for axis, placement in placements.items():
            if placement.kind == "S":
                assert placement.dim is not None and 0 <= placement.dim < rank, (
                    f"{placement} of {rank} dims on '{axis}'"
                )
                dims[placement.dim] += (axis,)
        rest = tuple(sorted((axis, p) for axis, p in placements.items() if p.kind != "S"))
        return cls(tuple(dims), rest, tuple(sorted((axis, p.within) for axis, p in placements.items() if p.within)))

    def on(self, axis: str) -> Placement:
        """The placement on one axis; an axis that is not named is replicated."""
        for dim, axes in enumerate(self.dims):
            if axis in axes:
                return S(dim, dict(self.within).get(axis, ""))
        return dict(self.rest).get(axis, R)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that the layout names."""
        return tuple(axis for axes in self.dims for axis in axes) + tuple(axis for axis, _ in self.rest)

    @property
    def dual(self) -> Layout:
        """The gradient's layout."""
        return Layout(self.dims, tuple((axis, placement.dual) for axis, placement in self.rest), self.within)

    def replace(self, axis: str, placement: Placement) -> Layout:
        """The layout with another placement on one axis; a new shard is the minor one of its dim."""
        dims = [tuple(a for a in axes if a != axis) for axes in self.dims]
        rest = tuple((a, p) for a, p in self.rest if a != axis)
        within = tuple((a, size) for a, size in self.within if a != axis)
        if placement.kind == "S":
            assert placement.dim is not None and 0 <= placement.dim < len(dims), f"{placement} of {len(dims)} dims"
            dims[placement.dim] += (axis,)
            within = tuple(sorted((*within, (axis, placement.within)))) if placement.within else within
        else:
            rest = tuple(sorted((*rest, (axis, placement))))
        return Layout(tuple(dims), rest, within)

    def without(self, axes: Iterable[str]) -> Layout:
        """The layout on the other axes only."""
        gone = set(axes)
        return Layout(
            tuple(tuple(a for a in dim if a not in gone) for dim in self.dims),
            tuple((a, p) for a, p in self.rest if a not in gone),
            tuple((a, size) for a, size in self.within if a not in gone),
        )

    def __str__(self) -> str:
        parts = [f"{axis} {self.on(axis)}" for axes in self.dims for axis in axes]
        return " · ".join(parts + [f"{axis} {placement}" for axis, placement in self.rest])

    __repr__ = __str__
