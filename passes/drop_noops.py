"""Drop the nodes that change nothing."""

from __future__ import annotations

from collections import Counter
from operator import getitem
from typing import Any

import torch
from torch import fx

from ndcompile.rules.registry import passes_gradients

aten = torch.ops.aten
CASTS = (
    aten.to.dtype,
    aten.to.device,
    aten.to.dtype_layout,
    aten.to.other,
    aten.type_as.default,
    aten._to_copy.default,
)
COPIES = (aten.contiguous.default, aten.clone.default, aten.alias.default, aten.lift_fresh_copy.default)
VIEWS = (aten.expand.default, aten.view.default, aten.reshape.default, aten.slice.Tensor, aten.flatten.using_ints)


def drop_noops(graph: fx.GraphModule) -> fx.GraphModule:
    """Casts to the dtype at hand, copies, full slices, views to the same shape, dropout that drops nothing, what is
    empty of what is joined, `detach` of what carries no gradient.

    What is left of casts is `aten.to.dtype`; what no output needs is erased. Afterwards `no_noops` holds.
    """
    idle = _idle(graph.graph)
    for node in list(graph.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is getitem and node.args[0].target is aten.broadcast_tensors.default:
            source = node.args[0].args[0][node.args[1]]
            if source.meta["sizes"] == node.meta["sizes"]:
                node.replace_all_uses_with(source)
        elif node.target is aten.cat.default and (left := _without_empty(node)):
            if len(left) > 1:
                node.args = (left, *node.args[1:])
            else:
                node.replace_all_uses_with(left[0])
        elif is_noop(node) or node in idle:
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
        elif node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default  # copies that made a view possible are gone
        elif node.target is aten.broadcast_to.default:
            node.target = aten.expand.default
        elif node.target in CASTS:
            node.target, node.args, node.kwargs = aten.to.dtype, (node.args[0], node.meta["dtype"]), {}
    graph.graph.eliminate_dead_code(is_impure)
    graph.recompile()
    return graph


def _without_empty(node: fx.Node) -> list[fx.Node]:
    """What `cat` joins without tensors `[0]`, which go with those of any shape (a cache that begins with nothing).

    Nothing where there is none of them, or where the others have another dtype than the result.
    """
    joined: Any = node.args[0]
    left = [x for x in joined if x.meta.get("sizes") != (0,)]
    same = all(x.meta["dtype"] == node.meta["dtype"] and len(x.meta["sizes"]) > 1 for x in left)
    return left if same and len(left) < len(joined) else []


def _idle(graph: fx.Graph) -> set[fx.Node]:
    """Each `detach` that no gradient comes to; of a run in neither of its rounds, so that they stay equal."""
    carrying, rounds, number = set[fx.Node](), dict[Any, list[fx.Node]](), Counter[Any]()
    for node in graph.nodes:
        given = node.meta.get("grad") if node.op == "placeholder" else not carrying.isdisjoint(node.all_input_nodes)
        if given and passes_gradients(node):
            carrying.add(node)
        if node.target is aten.detach.default:
            place = node.meta.get("place")
            number[place] += 1
            twins = node if place is None or place.run is None else (place.run, place.position, number[place])
            rounds.setdefault(twins, []).append(node)
    return {node for same in rounds.values() if carrying.isdisjoint(n.args[0] for n in same) for node in same}


def is_impure(node: fx.Node) -> bool:
    """fx keeps what may draw random numbers (attention too), with all that leads to it; here draws depend on their
    place alone.
    """
    return node.is_impure() and torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ())


def is_noop(node: fx.Node) -> bool:
    if not node.args or not isinstance(node.args[0], fx.Node):
        return False
    before, after = node.args[0].meta, node.meta
    if node.target in CASTS:
        return bool(before.get("dtype") == after.get("dtype"))
    if node.target in COPIES:
        return True
    if node.target is aten.dropout.default:
        return bool(not node.args[2] or node.args[1] == 0)
    return node.target in VIEWS and before.get("sizes") == after.get("sizes")
