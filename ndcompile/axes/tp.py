"""The tensor-parallel axis: inputs are replicated, matrices are sharded where a rule allows, the rest is propagated."""

from __future__ import annotations

from ndcompile.axes.kind import AxisKind
from ndcompile.placement import I, Placement, S
from ndcompile.size import Shape


def _uses(shape: Shape, ranks: int) -> list[Placement]:
    """Whole, or sharded along any dim that has a part for each rank (evenly or not)."""
    return [I] + [S(dim) for dim, size in enumerate(shape) if size.coefficient >= ranks]


def _kept_as_used(use: Placement, dim: int | None) -> Placement:
    return use


TP = AxisKind("s", True, False, _uses, _kept_as_used, price=1e3)
"""`price` makes sharding the matrices come first, and the least communication second: that is what the axis is for.

The matrices of keys and values whose heads the ranks repeat are exempt (`propagate_layouts`).
"""
