"""The data axes: the batch is sharded; parameters are whole where they are used."""

from __future__ import annotations

from ndcompile.axes.kind import AxisKind
from ndcompile.placement import I, Placement, R, S
from ndcompile.size import Shape


def used_whole(shape: Shape, ranks: int) -> list[Placement]:
    return [R]


def kept_whole(use: Placement, dim: int | None) -> Placement:
    return I


def kept_sharded(use: Placement, dim: int | None) -> Placement:
    return I if dim is None else S(dim)


DP_REPLICATE = AxisKind("b", False, True, used_whole, kept_whole, price=0.0)
"""DDP: parameters are `I`; at use `I→R`, whose backward is the all-reduce."""

DP_SHARD = AxisKind("b", False, True, used_whole, kept_sharded, price=0.0)
"""FSDP: parameters are `S(dim)`; at use `S→R`, an all-gather whose backward is the reduce-scatter."""
