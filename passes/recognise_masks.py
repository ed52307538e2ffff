"""Give attention masks that depend on sizes alone their names: causal, or none at all."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import Tensor, fx

from ndcompile.rules.registry import arguments

aten = torch.ops.aten
ATTENTION = aten.scaled_dot_product_attention.default
TRIED = ((2, 5), (3, 8), (2, 13), (4, 32))
"""Batch and sequence sizes at which a mask is computed and compared."""

LONGEST = 4096
"""The longest sequence at which a mask is computed: one whose numbers are larger (a window of 8192) is not named."""


def recognise_masks(graph: fx.GraphModule) -> fx.GraphModule:
    """Name the masks that no value of an input reaches: computed at several sizes, causal or all-pass at each of them,
    attention is told so and the mask is dropped. One of the sizes is beyond every number in the mask's own
    computation, so that a window shows. Any other mask stays as it is, a tensor.
    """
    known: dict[fx.Node, str | None] = {}
    for node in graph.graph.find_nodes(op="call_function", target=ATTENTION):
        given = arguments(node)
        mask = given["attn_mask"]
        if not isinstance(mask, fx.Node) or given["is_causal"]:
            continue
        if mask not in known:
            known[mask] = name_of(mask)
        name = known[mask]
        square = given["query"].meta["sizes"][-2] == given["key"].meta["sizes"][-2]
        if name == "full" or (name == "causal" and square):
            kept = {k: given[k] for k in ("scale", "enable_gqa") if given[k]}
            node.args = (given["query"], given["key"], given["value"], None, given["dropout_p"], name == "causal")
            node.kwargs = kept
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def name_of(mask: fx.Node) -> str | None:
    """`causal`, `full`, or None where the mask is neither, or depends on more than sizes."""
    nodes = ancestors(mask)
    if nodes is None:
        return None
    beyond = largest(nodes) + 3
    if beyond > LONGEST + 3:
        return None
    names = {_named(evaluate(nodes, mask, b, s)) for b, s in (*TRIED, (1, beyond), (1, 2 * beyond))}
    return names.pop() if len(names) == 1 else None


def ancestors(mask: fx.Node) -> list[fx.Node] | None:
    """The nodes that compute the mask, in order; None if a tensor from outside is among them."""
    found: dict[fx.Node, None] = {}
    pending = [mask]
    while pending:
        node = pending.pop()
        if node in found:
            continue
        if node.op != "call_function":
            return None
        found[node] = None
        if "size" not in node.meta:
            pending += node.all_input_nodes
    return sorted(found)


def largest(nodes: list[fx.Node]) -> int:
    """The largest number in the nodes' arguments that can be a position; larger ones are fill values and open ends."""
    found = [2]

    def visit(value: Any) -> None:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e8:
            found.append(abs(int(value)))
        elif isinstance(value, (list, tuple)):
            for item in value:
                visit(item)

    for node in nodes:
        for value in (*node.args, *node.kwargs.values()):
            visit(value)
    return max(found)


def evaluate(nodes: list[fx.Node], mask: fx.Node, b: int, s: int) -> Tensor:
    """The mask at one batch and sequence size."""
    values: dict[fx.Node, Any] = {}
    sizes = {"b": b, "s": s}
    for node in nodes:
        if "size" in node.meta:
            expression = sympy.sympify(node.meta["size"])
            values[node] = int(expression.subs({symbol: sizes[str(symbol)] for symbol in expression.free_symbols}))
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
        if "device" in kwargs:
            kwargs = {**kwargs, "device": "cpu"}
        values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    result = values[mask]
    assert isinstance(result, Tensor), "a mask is a tensor"
    return result


def _named(mask: Tensor) -> str | None:
    allowed = mask if mask.dtype == torch.bool else mask == 0
    if mask.is_floating_point() and not bool((allowed | (mask <= torch.finfo(mask.dtype).min / 2)).all()):
        return None
    if bool(allowed.all()):
        return "full"
    causal = torch.ones(mask.shape[-2:], dtype=torch.bool).tril()
    return "causal" if bool((allowed == causal).all()) else None
