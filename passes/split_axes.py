"""Cut an axis into parts where keys and values have fewer heads than it has ranks."""

from __future__ import annotations

import itertools

from torch import fx

from ndcompile.axes import KINDS
from ndcompile.heads import attentions
from ndcompile.mesh import MeshSpec


def split_axes(graph: fx.GraphModule, mesh: MeshSpec) -> MeshSpec:
    """The mesh with axes that shard heads in parts: keys and values lie on the first ones, repeated on the rest.

    8 heads of keys and values on `tp=16` give `tp.0=8, tp.1=2`. An axis stays whole where parts do not help, and parts
    that the user gave stay as they are. Reads `shape`.
    """
    counts = [(a.queries, a.keys) for a in attentions(graph)]
    for axis in mesh.axes:
        parts = _parts(axis.size, counts)
        if axis.name == axis.kind and KINDS[axis.kind].integers and len(parts) > 1:
            mesh = mesh.split(axis.name, *parts)
    return mesh


def _parts(ranks: int, counts: list[tuple[int, int]]) -> list[int]:
    """Sizes of parts, major first: each number of heads of keys is the product of the first few."""
    ends = {ranks} | {keys for queries, keys in counts if queries % ranks == 0 and ranks % keys == 0}
    ordered = [1, *sorted(ends)]
    steps = list(itertools.pairwise(ordered))
    if any(larger % smaller for smaller, larger in steps):
        return [ranks]
    return [larger // smaller for smaller, larger in steps if larger > smaller]
