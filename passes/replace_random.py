"""Make every random number a function of a key and a global index."""

from __future__ import annotations

import torch
from torch import fx

from ndcompile import runtime
from ndcompile.errors import CompileError
from ndcompile.rules.registry import arguments, describe

aten = torch.ops.aten


def replace_random(graph: fx.GraphModule) -> fx.GraphModule:
    """`dropout` becomes `runtime.dropout` with the step's key, folded with the segment's number, and a site number.

    So `rand`, to which `lower_draws` brought other draws, becomes `runtime.uniform`, and attention with dropout
    `runtime.attention_with_dropout`. Adds a placeholder with role `key` if any is used. What is left is refused.
    """
    _refuse_other_draws(graph)
    sites = [n for n in graph.graph.nodes if n.target in REPLACED and (n.target not in ATTENTIONS or _p(n) > 0)]
    if not sites:
        return graph
    first = next(n for n in graph.graph.nodes if n.op != "placeholder")
    with graph.graph.inserting_before(first):
        key = graph.graph.placeholder("key")
    key.meta = dict(role="key", name="key", alias="key", module="", source=None)
    key.meta |= dict(sizes=(), dtype=torch.int64, grad=False)
    folded: dict[int, fx.Node] = {}
    counts: dict[int, int] = {}
    for node in sites:
        segment = node.meta["segment"]
        if segment not in folded:
            with graph.graph.inserting_before(_start(graph, segment)):
                fold = folded[segment] = graph.graph.call_function(runtime.fold, (key, segment))
            fold.meta = key.meta | dict(role="fold", alias=("fold", node.meta["kind"]), place=node.meta.get("place"))
        site = counts[segment] = counts.get(segment, -1) + 1
        _replace(graph, node, folded[segment], site)
    graph.recompile()
    return graph


ATTENTION = aten.scaled_dot_product_attention.default
ATTENTIONS = (ATTENTION, runtime.attention)
REPLACED = (aten.dropout.default, aten.rand.default, *ATTENTIONS)


def _refuse_other_draws(graph: fx.GraphModule) -> None:
    for node in graph.graph.nodes:
        seeded = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if seeded and node.target not in REPLACED:
            raise CompileError(
                f"forward draws random numbers by {node.target}",
                node=describe(node),
                source=node.meta["source"],
                why="each rank would draw others than one device does",
                tries=("pass them to forward as an input", "torch.rand or torch.randn, which no mesh changes"),
            )


def _p(node: fx.Node) -> float:
    return float(arguments(node)["dropout_p"])


def _start(graph: fx.GraphModule, segment: int) -> fx.Node:
    return next(n for n in graph.graph.nodes if n.meta.get("segment") == segment)


def _replace(graph: fx.GraphModule, node: fx.Node, key: fx.Node, site: int) -> None:
    given = arguments(node)
    with graph.graph.inserting_before(node):
        if node.target is ATTENTION:
            tensors = (given["query"], given["key"], given["value"])
            scale = given["scale"] or tensors[0].meta["sizes"][-1] ** -0.5
            args = (*tensors, given["attn_mask"], given["dropout_p"], key, site, given["is_causal"], scale)
            new = graph.graph.call_function(runtime.attention_with_dropout, args)
        elif node.target is runtime.attention:
            named = {k: v for k, v in node.kwargs.items() if k not in ("scale", "dropout_p", "causal")}
            scale = given["scale"] or given["q"].meta["sizes"][-1] ** -0.5
            args = (given["q"], given["k"], given["v"], None, given["dropout_p"], key, site, given["causal"], scale)
            new = graph.graph.call_function(runtime.attention_with_dropout, args, named)
        elif node.target is aten.rand.default:
            new = graph.graph.call_function(runtime.uniform, (given["size"], key, site, node.meta["dtype"]))
        else:
            new = graph.graph.call_function(runtime.dropout, (given["input"], given["p"], key, site))
    new.meta = dict(node.meta)
    for size in graph.graph.nodes:  # a count of the node's elements is one of the new node's
        if size.meta.get("of", (None,))[0] is node:
            size.meta["of"] = (new, *size.meta["of"][1:])
    node.replace_all_uses_with(new)
    graph.graph.erase_node(node)
