"""The masks that stayed dense: where, how large, and why they got no name."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from ndcompile.fold import repeat_of
from ndcompile.mesh import MeshSpec
from ndcompile.rules.registry import arguments


@dataclass(frozen=True)
class DenseMask:
    """A mask of queries by keys that is a tensor; its bytes are a rank's, at nominal sizes."""

    module: str
    """The first module that attends under it."""
    source: str
    bytes: int
    why: str
    count: int
    """How many attentions take it."""

    def __str__(self) -> str:
        more = f" and {self.count - 1} more" if self.count > 1 else ""
        return f"{self.module or 'the model'}{more}: a dense mask of {self.bytes:,} bytes a rank, since {self.why}"


def dense_masks(graph: fx.GraphModule, mesh: MeshSpec) -> list[DenseMask]:
    """One for each mask, in order of the forward."""
    users: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.graph.nodes:
        if "dense_mask" in node.meta:
            users.setdefault(_origin(arguments(node)[_slot(node)]), []).append(node)
    found = []
    for nodes in users.values():
        taken = arguments(nodes[0])[_slot(nodes[0])]
        shards = mesh.size(*(axis for axes in taken.meta["layout"].dims for axis in axes))
        module, source, why = (str(nodes[0].meta[k] or "") for k in ("module", "source", "dense_mask"))
        found.append(DenseMask(module, source, taken.meta["nbytes"] // shards, why, sum(map(repeat_of, nodes))))
    return found


def _slot(node: fx.Node) -> str:
    """What the op calls its mask."""
    return "attn_mask" if "attn_mask" in arguments(node) else "mask"


def _origin(value: fx.Node) -> fx.Node:
    """What is handed on to a block, or converted."""
    while "move" in value.meta or value.meta.get("port"):
        (value,) = value.all_input_nodes
    return value
