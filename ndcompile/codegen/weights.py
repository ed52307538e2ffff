"""The weights of a segment as text: how each comes to compute, and the collectives of its bucket."""

from __future__ import annotations

import re
from typing import Any

from torch import fx

from ndcompile.codegen.names import identifier
from ndcompile.codegen.segments import Entry, Segment
from ndcompile.codegen.wrap import commented
from ndcompile.fold import inside
from ndcompile.mesh import MeshSpec
from ndcompile.placement import COLLECTIVES, R
from ndcompile.rules.registry import op_name


def weight_names(segment: Segment) -> list[str]:
    """The shortest distinct tails of the parameters' paths, without `.weight`."""
    names: list[str] = []
    for entry in segment.entries:
        parts = re.sub(r"\.weight$", "", entry.parameter).split(".")
        if parts == [entry.parameter] and entry.parameter == "weight":
            parts = ["weight"]
        count = 2 if parts[-1] == "bias" or parts[-1].isdigit() else 1
        name = identifier("_".join(parts[-count:]))
        while name in names and count < len(parts):
            count += 1
            name = identifier("_".join(parts[-count:]))
        number = 2
        while name in names:
            name, number = f"{name}_{number}", number + 1
        names.append(name)
    return names


def weight_lines(segment: Segment, mesh: MeshSpec, margin: str) -> list[str]:
    """One `name=weight(…),` for each, and how it lies where it is used."""
    return [
        _line(entry, name, segment.block, mesh, margin)
        for entry, name in zip(segment.entries, weight_names(segment), strict=True)
    ]


def _line(entry: Entry, name: str, block: str, mesh: MeshSpec, margin: str) -> str:
    path = entry.parameter[len(block) + 1 :] if inside(entry.parameter, block) else "/" + entry.parameter
    arguments = [f'"{path}"']
    gather = {
        m.meta["move"].axes[0]: m.kwargs["dim"]
        for m in reversed(entry.moves)  # the minor axis of a dim is gathered first
        if op_name(m.target) == "runtime.all_gather"
    }
    reduce = [m.meta["move"].axes[0] for m in entry.moves if op_name(m.target) == "runtime.replicate"]
    arguments += [f"gather={gather!r}".replace("'", '"')] if gather else []
    arguments += [f"reduce={tuple(reduce)!r}".replace("'", '"')] if reduce else []
    layout = entry.node.meta["layout"]
    used = layout.without(axis for axis in mesh.names if layout.on(axis) == R)
    return commented(f"{margin}{name}=weight({', '.join(arguments)}),", str(used))


def bucket_comments(segment: Segment, mesh: MeshSpec) -> list[str]:
    """One line for each collective of the segment's bucket."""
    parts: dict[Any, list[fx.Node]] = {}
    for entry in segment.entries:
        for node in entry.moves:
            move = node.meta["move"]
            row = move.conversion
            sides = f"{row.forward if row.forward in COLLECTIVES else '–'} ⇄ {row.backward}"
            kinds = f"{move.source.kind}→{move.target.kind}"
            parts.setdefault((move.axes, kinds, sides), []).append(node)
    return [
        f"{' × '.join(axes)} {kinds}   {sides}   {_bytes(sum(_local_bytes(n, axes, mesh) for n in nodes))}"
        for (axes, kinds, sides), nodes in parts.items()
    ]


def _local_bytes(node: fx.Node, axes: tuple[str, ...], mesh: MeshSpec) -> float:
    layout = node.meta["layout"]
    shards = mesh.size(*(a for dim in layout.dims for a in dim if a not in axes))
    return float(node.meta["nbytes"]) / shards


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
