"""Recognise rows that are each multiplied by a matrix of their own: `bmm(weight[ids], x)` is one op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ndcompile import runtime
from ndcompile.build import Builder
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
    sizes, dtype, dim = node.meta["sizes"], node.meta["dtype"], found.dim
    build = Builder(graph, node)
    with graph.inserting_before(node):
        given = (_row(build, found.x, dim), build.cast(found.weight, dtype), found.ids, *[True] * (dim == 1))
        product = build(runtime.grouped_linear, *given, sizes=sizes[:dim] + sizes[dim + 1 :], dtype=dtype)
        for user in list(node.users):
            if user.target is aten.squeeze.dim and arguments(user)["dim"] % 3 == dim:
                user.replace_all_uses_with(product)
                graph.erase_node(user)
        if node.users:
            node.replace_all_uses_with(build(aten.unsqueeze.default, product, dim, sizes=sizes, dtype=dtype))
    graph.erase_node(node)


def _row(build: Builder, x: fx.Node, dim: int) -> fx.Node:
    if x.target is aten.unsqueeze.default and arguments(x)["dim"] % 3 == dim:
        row: fx.Node = arguments(x)["self"]
        return row
    sizes = x.meta["sizes"]
    return build(aten.squeeze.dim, x, dim, sizes=sizes[:dim] + sizes[dim + 1 :], dtype=x.meta["dtype"])
