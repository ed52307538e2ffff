"""The list of a program's collectives, derived from the conversions in its graph."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import fx

from ndcompile.mesh import MeshSpec
from ndcompile.placement import COLLECTIVES
from ndcompile.rules.registry import op_name
from ndcompile.runtime.loss import CROSS_ENTROPY_COLLECTIVES, SMOOTHED_CROSS_ENTROPY_COLLECTIVES


@dataclass(frozen=True)
class Collective:
    """One collective: over which axes, of what kind, on which side; `bytes` are those of the whole value on a rank's
    other axes (the input of a reduction, the output of a gather), at nominal sizes.
    """

    axis: tuple[str, ...]
    kind: str
    side: str
    bytes: int
    dtype: torch.dtype
    module: str
    source: str
    block: str | None

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(self.axis)})"


def collectives(graph: fx.GraphModule, mesh: MeshSpec) -> list[Collective]:
    """All collectives in order of the forward; a segment's bucket is one an axis and side."""
    found: list[Collective] = []
    buckets: dict[tuple[object, ...], int] = {}
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        for made in _of(node, mesh):
            key = (node.meta.get("segment"), made.axis, made.kind, made.side, made.dtype)
            if node.meta.get("bucket") and key in buckets:
                found[buckets[key]] = _joined(found[buckets[key]], made)
                continue
            if node.meta.get("bucket"):
                buckets[key] = len(found)
            found.append(made)
    return found


def _of(node: fx.Node, mesh: MeshSpec) -> list[Collective]:
    move = node.meta.get("move")
    if move is None:
        return _inside(node, mesh)
    layout = node.meta["layout"]
    shards = mesh.size(*(a for axes in layout.dims for a in axes if a not in move.axes))
    found = []
    for side in ("forward", "backward"):
        kind, dtype = getattr(move.conversion, side), node.meta[f"{side}_dtype"]
        if kind not in COLLECTIVES or (side == "backward" and not node.meta["grad"]):
            continue
        nbytes = node.meta["nbytes"] // shards * dtype.itemsize // node.meta["dtype"].itemsize
        found.append(_collective(node, move.axes, kind, side, nbytes, dtype))
    return found


def _inside(node: fx.Node, mesh: MeshSpec) -> list[Collective]:
    """What an op with a special algorithm sends."""
    if op_name(node.target) != "runtime.cross_entropy" or not node.meta.get("algorithm_axes"):
        return []
    rows = SMOOTHED_CROSS_ENTROPY_COLLECTIVES if node.args[5] else CROSS_ENTROPY_COLLECTIVES
    axes = tuple(axis for axis, _ in node.meta["algorithm_axes"])
    shards = mesh.size(*(a for dim in node.meta["layout"].dims for a in dim))
    nbytes = node.meta["nbytes"] // shards
    return [_collective(node, axes, kind, "forward", nbytes * count, node.meta["dtype"]) for kind, _, count in rows]


def _collective(
    node: fx.Node, axes: tuple[str, ...], kind: str, side: str, nbytes: int, dtype: torch.dtype
) -> Collective:
    module, source = node.meta.get("module") or "", node.meta.get("source") or ""
    return Collective(axes, kind, side, int(nbytes), dtype, module, source, node.meta.get("block") or None)


def _joined(one: Collective, two: Collective) -> Collective:
    return replace(one, bytes=one.bytes + two.bytes, module=one.block or "")
