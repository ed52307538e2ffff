"""What the lengths of sequences must divide by, as the layouts of a graph's values say."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import fx

from ndcompile.axes import KINDS, parts
from ndcompile.mesh import MeshSpec
from ndcompile.size import Size
from ndcompile.units import units_of


def multiples(graph: fx.GraphModule, mesh: MeshSpec) -> dict[str, dict[str, int]]:
    """For each symbol the axes that cut it, those that shard it somewhere and all on one dim, and into how many parts.

    Reads `layout`.
    """
    found, units = dict[str, dict[str, int]](), units_of(graph, mesh)
    for node in graph.graph.nodes:
        if "layout" not in node.meta or node.meta["layout"] is None:
            continue
        for dim, axes in enumerate(node.meta["layout"].dims):
            size = node.meta["shape"][dim]
            here = [a for a in axes if not KINDS[mesh[a].kind].shards_batch]
            kinds = list(dict.fromkeys(mesh[a].kind for a in here))
            for symbol in set(size.symbols) - {"b"} if kinds else ():
                for over in {" × ".join(kinds), kinds[0]}:
                    ranks = mesh.size(*(a for a in here if mesh[a].kind in over.split(" × ")))
                    least = found.setdefault(symbol, {}).get(over, 1)
                    found[symbol][over] = max(parts(over, ranks) * _chunk(size, units), least)
    return found


def _chunk(size: Size, units: Mapping[str, Size]) -> int:
    """How many places of a sequence stand in one of a dim of this size: in a dim of chunks as many as a chunk has."""
    whole = math.prod(units[symbol].coefficient for symbol in size.symbols if symbol in units)
    return whole // math.gcd(whole, size.coefficient)
