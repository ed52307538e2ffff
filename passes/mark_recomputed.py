"""Say of each block what backward recomputes, and of each segment whether its gathered weights stay until then."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from ndcompile.errors import CompileError
from ndcompile.remat import Kept
from ndcompile.rules.registry import op_name
from ndcompile.runtime.remat import SAVABLE

MADE_BY: Mapping[str, tuple[str, ...]] = {
    "linear": ("aten.linear", "aten.mm", "aten.addmm", "runtime.grouped_linear"),
    "matmul": ("aten.matmul", "aten.bmm", "aten.baddbmm", "aten.einsum"),
    "convolution": ("aten.conv", "aten.convolution"),
    "attention": (
        "aten.scaled_dot_product_attention", "runtime.attention", "runtime.attention_with_dropout",
        "runtime.context_attention",
    ),
}  # fmt: skip
"""Names that results are saved under, and the ops of a graph that make such. Collectives are told by conversions."""


def mark_recomputed(graph: fx.GraphModule, kept: Kept) -> fx.GraphModule:
    """Set `saved` on the nodes of blocks that backward recomputes (the names of the results that it need not), and
    `gathered` on those of segments whose gathered weights stay.

    Reads `segment` and `block`. Raises `CompileError` where none of the blocks has a result of some name.
    """
    for node in graph.graph.nodes:
        block = node.meta.get("block")
        if node.op == "call_function" and block is not None:
            node.meta["saved"], node.meta["gathered"] = kept.saved.get(block), block in kept.gathered
    wanted = dict.fromkeys(name for names in kept.saved.values() for name in names)
    if missing := [name for name in wanted if name not in made_in(graph, frozenset(kept.saved))]:
        raise CompileError(
            f"remat saves '{missing[0]}', but no recomputed block has such a result",
            why="saved results are told by the ops that make them",
            tries=f"remat without '{missing[0]}'",
        )
    return graph


def made_in(graph: fx.GraphModule, blocks: frozenset[str] | None = None) -> set[str]:
    """The names under which results of blocks (of these, or of all) may be saved."""
    ops = [n for n in graph.graph.nodes if n.op == "call_function" and n.meta.get("block")]
    inside = [n for n in ops if blocks is None or n.meta["block"] in blocks]
    return {name for name in SAVABLE if any(_makes(node, name) for node in inside)}


def _makes(node: fx.Node, name: str) -> bool:
    if "move" in node.meta:
        return not node.meta.get("bucket") and name == node.meta["move"].conversion.forward
    if node.meta.get("how"):
        return name in ("attention", "all_gather" if node.meta["how"] == "gather" else "all_to_all")
    base = op_name(node.target).removeprefix("aten._")
    return any(base == made or base.startswith((made + ".", made + "_")) for made in MADE_BY.get(name, ()))
