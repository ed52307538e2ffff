"""Recognise rows that are each multiplied by a matrix of their own: `bmm(weight[ids], x)` is one op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ndcompile import runtime
from ndcompile.rules.registry import arguments

aten = torch.ops.aten
BATCHED = (aten.bmm.default, aten.matmul.default)


def recognise_experts(graph: fx.GraphModule) -> fx.GraphModule:
    """`bmm(w[ids], x.unsqueeze(-1))` and `bmm(x.unsqueeze(1), w[ids])` become `grouped_linear(x, w, ids)`.

    They are equal row by row, whatever the ids. The matrices are then sharded where they lie, and none is copied.
    """
    for node in list(graph.graph.nodes):
        found = _match(node) if node.target in BATCHED else None
        if found is not None:
            _rewrite(graph.graph, node, found)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


@dataclass(frozen=True)
class _Match:
    """A batch of products of one row and one looked-up matrix; `dim` is the dim of size 1 beside the row's."""

    x: fx.Node
    weight: fx.Node
    ids: fx.Node
    dim: int


def _match(node: fx.Node) -> _Match | None:
    first, second = arguments(node).values()
    for matrices, x, dim in ((first, second, 2), (second, first, 1)):
        table = _looked_up(_uncast(matrices))
        if table is not None and len(x.meta["sizes"]) == 3 and x.meta["sizes"][dim] == 1:
            weight, ids = table
            if x.meta["sizes"][0] == ids.meta["sizes"][0]:
                return _Match(x, weight, ids, dim)
    return None


def _uncast(value: fx.Node) -> fx.Node:
    return _uncast(arguments(value)["self"]) if value.target is aten.to.dtype else value


def _looked_up(value: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The matrices `[e, …, …]` and ids `[s]` of `weight[ids]`."""
    if value.target not in (aten.index.Tensor, aten.index_select.default):
        return None
    given: dict[str, Any] = arguments(value)
    indices = given["indices"] if "indices" in given else [None] * given["dim"] + [given["index"]]
    table, ids = given["self"], indices[0]
    fits = len(indices) == 1 and ids is not None and ids.meta["dtype"] in (torch.int64, torch.int32)
    return (table, ids) if fits and len(table.meta["sizes"]) == 3 and len(ids.meta["sizes"]) == 1 else None


def _rewrite(graph: fx.Graph, node: fx.Node, found: _Match) -> None:
    """Rows lose the dim of size 1 before the product and get it after; where the model did both, neither is left."""
    sizes, dtype, rows = node.meta["sizes"], node.meta["dtype"], found.x.meta["sizes"]
    with graph.inserting_before(node):
        weight = found.weight
        if weight.meta["dtype"] != dtype:
            weight = _like(graph, node, aten.to.dtype, (weight, dtype), weight.meta["sizes"], dtype)
        x = _without(graph, node, found.x, found.dim, tuple(n for d, n in enumerate(rows) if d != found.dim))
        flat = tuple(n for d, n in enumerate(sizes) if d != found.dim)
        given = (x, weight, found.ids, *([True] if found.dim == 1 else []))
        product = _like(graph, node, runtime.grouped_linear, given, flat, dtype)
    for user in list(node.users):
        if user.target is aten.squeeze.dim and arguments(user)["dim"] % 3 == found.dim:
            user.replace_all_uses_with(product)
            graph.erase_node(user)
    if node.users:
        with graph.inserting_before(node):
            node.replace_all_uses_with(_like(graph, node, aten.unsqueeze.default, (product, found.dim), sizes, dtype))
    graph.erase_node(node)


def _without(graph: fx.Graph, node: fx.Node, x: fx.Node, dim: int, sizes: tuple[Any, ...]) -> fx.Node:
    if x.target is aten.unsqueeze.default and arguments(x)["dim"] % 3 == dim:
        row: fx.Node = arguments(x)["self"]
        return row
    return _like(graph, node, aten.squeeze.dim, (x, dim), sizes, x.meta["dtype"])


def _like(
    graph: fx.Graph, node: fx.Node, target: Any, args: tuple[Any, ...], sizes: tuple[Any, ...], dtype: torch.dtype
) -> fx.Node:
    new = graph.call_function(target, args)
    known = {k: node.meta[k] for k in ("module", "source", "place") if k in node.meta}
    new.meta = known | dict(sizes=sizes, dtype=dtype)
    return new
