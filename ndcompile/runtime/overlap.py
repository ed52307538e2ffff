"""What inductor makes of exchanges by copies and the products beside them: both at once, piece by piece.

After a gather a rank multiplies its own rows while those of the others come; before a reduce-scatter it multiplies the
rows of the others first, which travel while it multiplies its own (`Wire.gather_and_multiply`, `multiply_and_scatter`).
The emitted text is the same, and so are the values, but for the order in which some sums are rounded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import fx

from ndcompile.runtime import private
from ndcompile.runtime.wires import GATHER_AND_MULTIPLY, MULTIPLY_AND_SCATTER, STARTS

_aten = torch.ops.aten
MM, ADDMM, ADD = _aten.mm.default, _aten.addmm.default, _aten.add.Tensor
VIEWS = (_aten.reshape.default, _aten.view.default, _aten._unsafe_view.default)
MOVED = (_aten.permute.default, _aten.t.default)


def join_products(graph: fx.Graph) -> None:
    """Join gathers with the products of what they bring, and reduce-scatters with the products that they sum."""
    for node in list(graph.nodes):
        if node.target is STARTS["all_gather"]:
            _join_gather(graph, node)
        elif node.target is STARTS["reduce_scatter"]:
            _join_scatter(graph, node)


class Product(NamedTuple):
    """`rows @ factor`, and a bias that is added."""

    node: fx.Node
    rows: Any
    factor: Any
    bias: Any = None


def _product(node: fx.Node) -> Product | None:
    """The product that a node is, with no more than a bias of one dim."""
    if node.kwargs:
        return None
    if node.target is MM:
        return Product(node, *node.args)
    if node.target is ADDMM and _value(node.args[0]).dim() == 1:
        bias, rows, factor = node.args
        return Product(node, rows, factor, bias)
    return None


def _join_gather(graph: fx.Graph, gather: fx.Node) -> None:
    x, dim, ranks, group = gather.args
    whole, (wait, *others) = _value(gather), gather.users
    rows = [user for user in wait.users if user.target in VIEWS and _is_rows(user, whole)]
    if wait.target is not private.WAIT or others or not rows or not _is_plain(whole, dim):
        return
    order = {node: number for number, node in enumerate(graph.nodes)}
    first = min(wait.users, key=order.__getitem__)
    found = [p for row in rows for p in map(_product, row.users) if p and p.rows is row and p.factor is not row]
    products = [p for p in found if all(n is None or order[_origin(n)] < order[first] for n in (p.factor, p.bias))]
    if not products:
        return
    with graph.inserting_before(first):
        factors = [_again(graph, p.factor) for p in products]
        biases = [None if p.bias is None else _again(graph, p.bias) for p in products]
        joined = _call(graph, GATHER_AND_MULTIPLY, (x, dim, ranks, group, factors, biases))
        whole_again, *results = (_item(graph, joined, i) for i in range(1 + len(products)))
        for product, result in zip(products, results, strict=True):
            product.node.replace_all_uses_with(_call(graph, VIEWS[0], (result, list(_value(product.node).shape))))
            graph.erase_node(product.node)
    wait.replace_all_uses_with(whole_again)
    for node in (wait, gather):
        graph.erase_node(node)


def _join_scatter(graph: fx.Graph, scatter: fx.Node) -> None:
    summed, dim, ranks, group = scatter.args
    whole = _value(summed)
    passed: list[fx.Node] = []
    products = list(_terms(summed, passed))
    biases = [p.bias for p in products if p is not None and p.bias is not None]
    if len(biases) > 1 or not _is_plain(whole, dim) or not all(p and _is_rows(p.node, whole) for p in products):
        return
    rows, factors = ([getattr(p, name) for p in products] for name in ("rows", "factor"))
    with graph.inserting_before(scatter):
        args = rows, factors, biases[0] if biases else None, list(whole.shape), dim, ranks, group
        scatter.replace_all_uses_with(_call(graph, MULTIPLY_AND_SCATTER, args))
    for node in (scatter, *passed):
        graph.erase_node(node)


def _terms(node: Any, passed: list[fx.Node]) -> Iterator[Product | None]:
    """The products that a node is the sum of, None among them for what is none; nodes on the way go to `passed`."""
    passed.append(node)
    if len(node.users) > 1:
        yield None
    elif (product := _product(node)) is not None:
        yield product
    elif node.target in VIEWS:
        yield from _terms(node.args[0], passed)
    elif node.target is ADD and not node.kwargs and _alike(*node.args):
        for term in node.args:
            yield from _terms(term, passed)
    elif node.target is ADDMM and not node.kwargs and _alike(node, node.args[0]):
        more, rows, factor = node.args
        yield from _terms(more, passed)
        yield Product(node, rows, factor)
    else:
        yield None


def _alike(*nodes: Any) -> bool:
    """Whether all are tensors of one shape and dtype."""
    return len({(_value(n).shape, _value(n).dtype) if isinstance(n, fx.Node) else None for n in nodes}) == 1


def _is_plain(whole: torch.Tensor, dim: Any) -> bool:
    """Of sizes that are numbers, and exchanged along another dim than the one that products sum over."""
    return all(isinstance(n, int) for n in whole.shape) and dim < whole.dim() - 1


def _is_rows(view: fx.Node, whole: torch.Tensor) -> bool:
    """Whether a view is the whole with all dims but the last as one."""
    return tuple(_value(view).shape) == (math.prod(whole.shape[:-1]), whole.shape[-1])


def _origin(node: fx.Node) -> Any:
    """Where a matrix comes from that may be transposed."""
    return node.args[0] if node.target in MOVED else node


def _again(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """The matrix, transposed here if it is."""
    return node if _origin(node) is node else _call(graph, node.target, node.args)


def _value(node: Any) -> Any:
    return node.meta["val"]


def _call(graph: fx.Graph, target: Any, args: tuple[Any, ...]) -> fx.Node:
    node, values = graph.call_function(target, args), fx.map_arg(args, _value)
    with private.fake_mode_of(values):
        node.meta["val"] = target(*values)
    return node


def _item(graph: fx.Graph, node: fx.Node, number: int) -> fx.Node:
    item = graph.call_function(getitem, (node, number))
    item.meta["val"] = _value(node)[number]
    return item
