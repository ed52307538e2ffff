"""Say of every value how large it is, and whether a gradient flows through it."""

from __future__ import annotations

import math
from typing import Any

import sympy
from torch import fx

from ndcompile.axes import KINDS
from ndcompile.cost import NOMINAL
from ndcompile.mesh import MeshSpec
from ndcompile.passes.mark_blocks import is_port
from ndcompile.rules.registry import STOPS_GRADIENTS, op_name, operands
from ndcompile.size import Size


def measure_values(graph: fx.GraphModule, mesh: MeshSpec) -> fx.GraphModule:
    """Set `shape` (monomials), `nbytes` (at nominal sizes) and `grad` of every tensor. Reads `sizes` and `dtype`."""
    measure(graph, mesh)
    mark_gradients(graph)
    return graph


def measure(graph: fx.GraphModule, mesh: MeshSpec) -> None:
    """Set `shape` (monomials): the batch is a multiple of the data axes, the sequence of the others."""
    data = math.prod(axis.size for axis in mesh.axes if KINDS[axis.kind].shards_batch)
    rest = math.prod(axis.size for axis in mesh.axes if not KINDS[axis.kind].shards_batch)
    symbols = {"b": Size(data, ("b",)), "s": Size(rest, ("s",))}
    nominal = {sympy.Symbol("b", positive=True, integer=True): NOMINAL["b"] * data}
    nominal[sympy.Symbol("s", positive=True, integer=True)] = NOMINAL["s"]
    for node in graph.graph.nodes:
        if "sizes" in node.meta:
            node.meta["shape"] = tuple(Size.of(size, symbols) for size in node.meta["sizes"])
            count = math.prod(int(sympy.sympify(size).subs(nominal)) for size in node.meta["sizes"])
            node.meta["nbytes"] = count * node.meta["dtype"].itemsize


def mark_gradients(graph: fx.GraphModule) -> None:
    """Set `grad`: whether a gradient flows through the value; for a block's port, through that of any equal block."""
    ports: set[Any] = set()
    while True:
        for node in graph.graph.nodes:
            if "shape" in node.meta and node.op == "call_function":
                stopped = op_name(node.target) in STOPS_GRADIENTS or not node.meta["dtype"].is_floating_point
                flows = any(o.meta["grad"] for o in operands(node)) or (is_port(node) and node.meta["alias"] in ports)
                node.meta["grad"] = flows and not stopped
        found = {n.meta["alias"] for n in graph.graph.nodes if is_port(n) and n.meta["grad"]}
        if found == ports:
            return
        ports = found
