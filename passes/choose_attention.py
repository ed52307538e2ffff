"""Say how attention over a sharded sequence brings keys and values to the queries."""

from __future__ import annotations

from torch import fx

from ndcompile.axes import KINDS
from ndcompile.cost import collective_time
from ndcompile.errors import CompileError
from ndcompile.mesh import MeshSpec
from ndcompile.rules.layers import HEADS
from ndcompile.rules.registry import describe, op_name, operands, signature, source_line
from ndcompile.runtime.context import HOW, heads_divide


def choose_attention(graph: fx.GraphModule, mesh: MeshSpec, how: str | None = None) -> fx.GraphModule:
    """Set `how` on each attention op whose keys are sharded: the way that is asked for, else the one that sends least.

    With c ranks, a rank sends (c - 1)/c of keys and values to gather them, and (c - 1)/c² of queries, keys, values and
    results to exchange heads; seconds are those of `cost.BUS`. The arithmetic is the same.

    Raises `CompileError` where heads do not divide as asked.
    """
    assert how is None or how in HOW, "an option is checked before"
    for node in graph.graph.nodes:
        for axis, _ in node.meta.get("algorithm_axes", []):
            if KINDS[mesh[axis].kind].attends and len(signature(node).together) > 1:
                node.meta["how"] = _way(node, axis, mesh, how)
    return graph


def _way(node: fx.Node, axis: str, mesh: MeshSpec, asked: str | None) -> str:
    heads, kv_heads = (_heads(value, mesh) for value in operands(node)[:2])
    ranks = mesh.size(axis)
    divide = heads_divide(heads, kv_heads, ranks) and "dropout" not in op_name(node.target)
    if asked == "heads" and not divide:
        raise CompileError(
            f"a rank's {heads} heads over {kv_heads} of keys and values do not divide over {ranks} ranks of '{axis}'",
            node=describe(node), source=source_line(node),
            why="each rank would compute some heads of the whole sequence; with dropout, keys are gathered",
            tries=("cp_attention='gather'", "cp_attention='ring'"),
        )  # fmt: skip
    if asked is not None:
        return asked
    queries, keys, values = (value.meta["nbytes"] for value in operands(node)[:3])
    exchanged = sum(collective_time("all_to_all", x, ranks) for x in (2 * queries, keys, values))
    return "heads" if divide and exchanged < collective_time("all_gather", keys + values, ranks) else "gather"


def _heads(value: fx.Node, mesh: MeshSpec) -> int:
    """How many heads a rank has of a value `[…, heads, tokens, head_dim]`."""
    dim = len(value.meta["shape"]) + HEADS
    return int(value.meta["shape"][dim].coefficient) // mesh.size(*value.meta["layout"].dims[dim])
