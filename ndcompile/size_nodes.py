"""Nodes that compute a global size from the inputs' sizes."""

from __future__ import annotations

import operator
from typing import Any

import sympy
import torch
from torch import fx


def size_node(graph: fx.Graph, expression: sympy.Expr) -> Any:
    """A number where the expression is one, else a node, made where the graph inserts; each carries `size`."""
    if expression.is_Integer:
        return int(expression)
    if expression.is_Symbol:
        return _measured(graph, expression)
    operation = operator.add if expression.is_Add else operator.mul
    total, *rest = [size_node(graph, base) for factor in expression.args for base in _repeated(factor)]
    for part in rest:
        total = graph.call_function(operation, (total, part))
        total.meta = dict(module="", source=None)
    total.meta["size"] = expression
    return total


def _measured(graph: fx.Graph, symbol: sympy.Symbol) -> fx.Node:
    for node in graph.find_nodes(op="placeholder"):
        for dim, size in enumerate(node.meta.get("sizes", ())):
            if str(size) == str(symbol):
                measured = graph.call_function(torch.ops.aten.sym_size.int, (node, dim))
                measured.meta = dict(module="", source=None, size=symbol)
                return measured
    raise AssertionError(f"no input has a dim of size {symbol}")


def _repeated(factor: sympy.Expr) -> list[sympy.Expr]:
    base, exponent = factor.as_base_exp()
    return [base] * int(exponent)
