"""Give attention keys and values once for each group of queries, where the model repeats them for each head."""

from __future__ import annotations

import torch
from torch import fx

from ndcompile.axes import KINDS
from ndcompile.mesh import MeshSpec
from ndcompile.rules.layers import HEADS
from ndcompile.rules.registry import op_name

SCALED = "aten.scaled_dot_product_attention.default"
ATTENTION = (SCALED, "runtime.attention", "runtime.attention_with_dropout")
JOINS = ("aten.reshape.default", "aten.view.default", "aten._unsafe_view.default", "aten.flatten.using_ints")


HALF = (torch.bfloat16, torch.float16)


def share_keys(graph: fx.GraphModule, mesh: MeshSpec, compute: torch.dtype | None = None) -> fx.GraphModule:
    """`[b, g, t, d] → [b, g, r, t, d] → [b, g · r, t, d]` before an attention op is left out, which groups by itself.

    Where keys and values travel, `r` times fewer bytes do; elsewhere `r` times fewer are kept for backward. The latter
    where a kernel does it: torch's take grouped heads in half precision, without a dense mask. And where a rank of `tp`
    has whole groups, since repeated heads can be sharded further.
    """
    travels = any(KINDS[axis.kind].attends for axis in mesh.axes)
    ranks = mesh.size(*(axis.name for axis in mesh.axes if axis.kind == "tp"))
    for node in graph.graph.nodes:
        if node.op == "call_function" and op_name(node.target) in ATTENTION:
            if not travels and not _in_a_kernel(node, compute):
                continue
            once = [_unrepeated(value) for value in node.args[1:3]]
            groups = {value.meta["sizes"][HEADS] for value in once if value is not None}
            if None in once or len(groups) != 1:
                continue
            (heads,) = groups
            if travels or (isinstance(heads, int) and heads % ranks == 0):
                node.args = (node.args[0], *once, *node.args[3:])
                if op_name(node.target) == SCALED:
                    node.kwargs = {**node.kwargs, "enable_gqa": True}
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _in_a_kernel(node: fx.Node, compute: torch.dtype | None) -> bool:
    """Whether torch's own attention, which can be called without a dense mask and in half precision, does the op."""
    mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
    held = node.meta["dtype"] if compute is None else compute
    return op_name(node.target) == SCALED and mask is None and held in HALF


def _unrepeated(value: object) -> fx.Node | None:
    """What a value repeats for each head of a group; none if it repeats nothing."""
    expanded = _source(value, JOINS)
    single = _source(expanded, ("aten.expand.default",))
    source = _source(single, ("aten.unsqueeze.default",))
    if source is None or expanded is None or single is None or not isinstance(value, fx.Node):
        return None
    batch, heads, *rest = source.meta["sizes"]
    times = expanded.meta["sizes"][2] if len(expanded.meta["sizes"]) == 5 else None
    repeats = [batch, heads, times, *rest] == list(expanded.meta["sizes"])
    joined = isinstance(times, int) and [batch, heads * times, *rest] == list(value.meta["sizes"])
    return source if repeats and joined and list(single.meta["sizes"]) == [batch, heads, 1, *rest] else None


def _source(value: object, ops: tuple[str, ...]) -> fx.Node | None:
    """The tensor that one of these ops is of."""
    if not isinstance(value, fx.Node) or value.op != "call_function" or op_name(value.target) not in ops:
        return None
    source = value.args[0]
    return source if isinstance(source, fx.Node) else None
