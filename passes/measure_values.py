"""Say of every value how large it is, and whether a gradient flows through it."""

from __future__ import annotations

import math
from typing import Any

import sympy
from torch import fx

from ndcompile.axes import data_ranks
from ndcompile.cost import NOMINAL
from ndcompile.mesh import MeshSpec
from ndcompile.passes.mark_blocks import is_port
from ndcompile.rules.registry import operands, passes_gradients
from ndcompile.size import Size
from ndcompile.units import units_of


def measure_values(graph: fx.GraphModule, mesh: MeshSpec) -> fx.GraphModule:
    """Set `shape` (monomials), `nbytes` (at nominal sizes) and `grad` of every tensor. Reads `sizes` and `dtype`."""
    measure(graph, mesh)
    mark_gradients(graph)
    return graph


def measure(graph: fx.GraphModule, mesh: MeshSpec) -> None:
    """Set `shape` (monomials): the batch is a multiple of the data axes, a sequence of the others."""
    data, symbols = data_ranks(mesh), units_of(graph, mesh)
    for node in graph.graph.nodes:
        if "sizes" in node.meta:
            node.meta["shape"] = tuple(Size.of(size, symbols) for size in node.meta["sizes"])
            count = math.prod(_nominal(sympy.sympify(size), data) for size in node.meta["sizes"])
            node.meta["nbytes"] = count * node.meta["dtype"].itemsize


def _nominal(size: sympy.Expr, data: int) -> int:
    """A size where `b` is the nominal batch of every data rank, and any other symbol a nominal sequence."""
    sizes = {symbol: NOMINAL.get(str(symbol), NOMINAL["s"]) for symbol in size.free_symbols}
    return int(size.subs({symbol: n * data if str(symbol) == "b" else n for symbol, n in sizes.items()}))


def mark_gradients(graph: fx.GraphModule) -> None:
    """Set `grad`: whether a gradient flows through the value; for a block's port, through that of any equal block."""
    ports: set[Any] = set()
    while True:
        for node in graph.graph.nodes:
            if "shape" in node.meta and node.op == "call_function":
                flows = any(o.meta["grad"] for o in operands(node)) or (is_port(node) and node.meta["alias"] in ports)
                node.meta["grad"] = flows and passes_gradients(node)
        found = {n.meta["alias"] for n in graph.graph.nodes if is_port(n) and n.meta["grad"]}
        if found == ports:
            return
        ports = found
