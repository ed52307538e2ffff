"""Nodes that compute a global size from the inputs' sizes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import fx

from ndcompile.errors import CompileError


def size_node(graph: fx.Graph, expression: sympy.Expr) -> Any:
    """A number where the expression is one, else a node, made where the graph inserts; each carries `size`."""
    if expression.is_Integer:
        return int(expression)
    if expression.is_Symbol:
        return _measured(graph, expression)
    operation, terms = _parts(expression)
    total, *rest = [size_node(graph, term) for term in terms]
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


def _parts(size: sympy.Expr) -> tuple[Any, list[sympy.Expr]]:
    """An operation, and what it joins."""
    name = type(size).__name__
    if size.is_Add:
        return operator.add, list(size.args)
    if name in OPERATIONS:
        return OPERATIONS[name], list(size.args)
    powers = [factor.as_base_exp() for factor in sympy.Mul.make_args(size)]
    if (size.is_Mul or size.is_Pow) and all(exponent.is_Integer and exponent > 0 for _, exponent in powers):
        return operator.mul, [base for base, exponent in powers for _ in range(int(exponent))]
    raise CompileError(
        f"a tensor's size is {size}, which cannot be computed on a mesh",
        tries="sizes that are sums, products, quotients, minima",
    )


OPERATIONS: dict[str, Callable[..., Any]] = {
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "Min": min,
    "Max": max,
}
"""Classes of sizes that are computed of two, and what does so."""
