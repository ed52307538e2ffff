"""The parts that lengths are multiples of: the ranks that share them, and whole chunks."""

from __future__ import annotations

import math

import sympy
from torch import fx

from ndcompile.axes import KINDS, data_ranks
from ndcompile.known import number_of_chunks
from ndcompile.mesh import MeshSpec
from ndcompile.size import Size


def units_of(graph: fx.GraphModule, mesh: MeshSpec) -> dict[str, Size]:
    """What each symbol of the graph's sizes stands for in those of `shape`; so does a length's number of whole chunks.

    A symbol of `shape` is a part that they all are multiples of, where what an axis cuts divides (`multiples`): of
    chunks there are as many as ranks that share sequences.
    """
    data = data_ranks(mesh)
    given = [n for n in graph.graph.find_nodes(op="placeholder") if n.meta["role"] == "input"]
    lengths = {str(x) for n in given for size in n.meta["sizes"] for x in sympy.sympify(size).free_symbols} - {"b"}
    chunks = {name: chunk for node in given for name, chunk in node.meta.get("chunks", {}).items() if name in lengths}
    rest, sharing = mesh.world_size // data, mesh.size(*(axis.name for axis in mesh.axes if KINDS[axis.kind].attends))
    units = {name: math.lcm(rest, chunks.get(name, 1) * sharing) for name in lengths}
    whole = {str(number_of_chunks(name, chunk)): Size(units[name] // chunk, (name,)) for name, chunk in chunks.items()}
    return {"b": Size(data, ("b",))} | {name: Size(unit, (name,)) for name, unit in units.items()} | whole
