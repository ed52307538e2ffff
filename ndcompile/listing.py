"""The list of a program's collectives, derived from the conversions in its graph."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import fx

from ndcompile.cost import NOMINAL
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


# ---- by block, in texts --------------------------------------------------------------------------------------------

OUTSIDE = "outside blocks"

Row = tuple[str, str]
"""The axes and the kind of a collective."""

Counts = dict[Row, dict[str, tuple[int, int]]]
"""For each kind of collective and each side: how many, and their bytes."""


def collectives_rows(collectives: Iterable[Collective]) -> list[list[tuple[str, ...]]]:
    """A row of texts for each axis and kind in a block: the block (in its first row), axis, kind, forward, backward."""
    found: list[list[tuple[str, ...]]] = []
    for blocks, counts in grouped(collectives):
        title = block_title(blocks)
        rows: list[tuple[str, ...]] = []
        for (axis, kind), sides in sorted(counts.items()):
            rows.append((title, axis, kind, _amount(sides.get("forward")), _amount(sides.get("backward"))))
            title = ""
        found.append(rows)
    return found


def grouped(collectives: Iterable[Collective]) -> list[tuple[list[str], Counts]]:
    """The counts of each block, blocks with equal counts together, in program order."""
    blocks: dict[str, Counts] = {}
    for c in collectives:
        sides = blocks.setdefault(c.block or OUTSIDE, {}).setdefault((" × ".join(c.axis), c.kind), {})
        number, size = sides.get(c.side, (0, 0))
        sides[c.side] = number + 1, size + c.bytes
    groups: list[tuple[list[str], Counts]] = []
    for block, counts in blocks.items():
        same = next((names for names, other in groups if other == counts and OUTSIDE not in (block, *names)), None)
        if same is None:
            groups.append(([block], counts))
        else:
            same.append(block)
    return groups


def block_title(blocks: list[str]) -> str:
    """The first and last of equal blocks and their number."""
    return blocks[0] if len(blocks) == 1 else f"{blocks[0]} … {blocks[-1]} (each of {len(blocks)})"


def amount(size: float) -> str:
    """Bytes for people: 1536 is "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def nominal_sizes() -> str:
    """At which sizes bytes are told."""
    return ", ".join(f"{name} = {size}" for name, size in NOMINAL.items())


def _amount(found: tuple[int, int] | None) -> str:
    return "–" if found is None else f"{found[0]} × {amount(found[1] / found[0])}"
