"""Cut a linear layer whose result is only used in pieces into a layer for each piece, so that tp can shard each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx

from ndcompile import runtime
from ndcompile.axes import KINDS
from ndcompile.mesh import MeshSpec
from ndcompile.pins import Pins, placements_of
from ndcompile.placement import S
from ndcompile.rules.registry import arguments

aten = torch.ops.aten

WEIGHTS = {
    aten.linear.default: (("weight", 0), ("bias", 0)),
    aten.addmm.default: (("mat2", 1), ("self", 0)),
    aten.mm.default: (("mat2", 1),),
    runtime.grouped_linear: (("weight", 1),),
}
"""Products with their matrix and bias by name, and the dim of each that makes the last of the result."""

CUTS = (aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.slice.Tensor)


def cut_linears(graph: fx.GraphModule, mesh: MeshSpec, pins: Pins) -> fx.GraphModule:
    """Fused projections (queries, keys and values in one matrix; gate and up) become one product a piece.

    The weight stays one parameter. Its pieces are sharded by an exchange of weights, where those of a sharded result
    would need one of activations. Done where some axis shards fixed sizes, and each piece divides by it; not where the
    user pins the matrix on the dim that is cut. Sets `piece` on what is cut from parameters. Reads `sizes`; blocks are
    marked.
    """
    ranks = mesh.size(*(axis.name for axis in mesh.axes if KINDS[axis.kind].integers))
    for node in list(graph.graph.nodes) if ranks > 1 else ():
        fused = None if _pinned(node, pins) else _fused(node)
        if fused is not None and all(piece.length % ranks == 0 for piece in fused.pieces):
            _take_apart(graph, fused)
    graph.graph.lint()
    graph.recompile()
    return graph


@dataclass(frozen=True)
class Piece:
    """A part of the result's last dim, and the node that is it."""

    node: fx.Node
    start: int
    length: int


@dataclass(frozen=True)
class Fused:
    """A product, the reshapes on the way to where its result is cut, and the pieces; `old` is all that goes."""

    product: fx.Node
    reshapes: tuple[fx.Node, ...]
    pieces: tuple[Piece, ...]
    old: tuple[fx.Node, ...]


def _pinned(node: fx.Node, pins: Pins) -> bool:
    """Whether the user wants a parameter of the product sharded along the result's last dim."""
    known, given = _weights(node), arguments(node) if _weights(node) else {}
    parameters = [(given[name], dim) for name, dim in known if isinstance(given.get(name), fx.Node)]
    return any(S(dim) in placements_of(value.meta.get("name", ""), pins) for value, dim in parameters)


def _fused(node: fx.Node) -> Fused | None:
    if not _has_own_parameters(node):
        return None
    value, reshapes = node, list[fx.Node]()
    while len(value.users) == 1 and _keeps_last(user := next(iter(value.users)), value):
        value = user
        reshapes.append(value)
    cuts = list(value.users)
    if len(cuts) == 0 or not all(_cuts_last(user, value) for user in cuts):
        return None
    pieces = [piece for cut in cuts for piece in _pieces(cut, value)]
    spans = {(piece.start, piece.length) for piece in pieces}
    if len(spans) < 2 or any(length == 0 for _, length in spans):
        return None
    lists = (cut for cut in cuts if cut.target is not aten.slice.Tensor)
    old = (*(piece.node for piece in pieces), *lists, *reversed(reshapes), node)
    return Fused(node, tuple(reshapes), tuple(pieces), old)


def _has_own_parameters(node: fx.Node) -> bool:
    """Matrix and bias are parameters, and of one size along the result's last dim."""
    known, given = _weights(node), arguments(node) if _weights(node) else {}
    for name, dim in known:
        value = given.get(name)
        if value is None:
            continue
        if not isinstance(value, fx.Node) or value.meta.get("role") != "parameter":
            return False
        if len(value.meta["sizes"]) <= dim or value.meta["sizes"][dim] != node.meta["sizes"][-1]:
            return False
    return bool(known)


def _weights(node: fx.Node) -> tuple[tuple[str, int], ...]:
    if node.target is runtime.grouped_linear and arguments(node)["transposed"]:
        return (("weight", 2),)
    return WEIGHTS.get(node.target, ())


def _keeps_last(node: fx.Node, value: fx.Node) -> bool:
    return node.target is aten.reshape.default and node.meta["sizes"][-1] == value.meta["sizes"][-1]


def _cuts_last(node: fx.Node, value: fx.Node) -> bool:
    last = len(value.meta["sizes"]) - 1
    if node.target not in CUTS or arguments(node)["dim"] % (last + 1) != last or arguments(node).get("step", 1) != 1:
        return False
    return node.target is aten.slice.Tensor or all(user.target is getitem for user in node.users)


def _pieces(cut: fx.Node, value: fx.Node) -> Iterator[Piece]:
    """The pieces, by cutting the numbers of the last dim as it is cut."""
    given = dict(arguments(cut), dim=0)
    given["self"] = torch.arange(int(value.meta["sizes"][-1]))
    parts = cut.target(**given)  # type: ignore[operator]
    if cut.target is aten.slice.Tensor:
        yield Piece(cut, int(parts[0]) if len(parts) else 0, len(parts))
        return
    for user in cut.users:
        part = parts[user.args[1]]
        yield Piece(user, int(part[0]) if len(part) else 0, len(part))


def _take_apart(graph: fx.GraphModule, fused: Fused) -> None:
    made: dict[tuple[int, int], fx.Node] = {}
    for piece in fused.pieces:
        span = (piece.start, piece.length)
        if span not in made:
            made[span] = _made(graph, fused, piece, len(made))
        piece.node.replace_all_uses_with(made[span])
    for node in fused.old:
        graph.graph.erase_node(node)


def _made(graph: fx.GraphModule, fused: Fused, piece: Piece, number: int) -> fx.Node:
    """One piece of the result: the product with that piece of the weight and of the bias."""
    product, given, parts = fused.product, arguments(fused.product), dict[fx.Node, fx.Node]()
    with graph.graph.inserting_before(product):
        for name, dim in _weights(product):
            whole = given.get(name)
            if whole is not None:
                span = (whole, dim, piece.start, piece.start + piece.length)
                parts[whole] = graph.graph.call_function(aten.slice.Tensor, span)
                parts[whole].meta = _meta(product, number, name, whole, dim, piece.length)
                parts[whole].meta["piece"] = "matrix" if len(whole.meta["sizes"]) > 1 else "vector"
        value = graph.graph.node_copy(product, lambda n: parts.get(n, n))
        value.meta = _meta(product, number, "product", product, -1, piece.length)
    for reshape in fused.reshapes:
        shape: list[Any] = [*reshape.args[1][:-1], piece.length]  # type: ignore[index, misc]
        with graph.graph.inserting_before(reshape):
            value = graph.graph.call_function(aten.reshape.default, (value, shape))
        value.meta = _meta(reshape, number, "reshape", reshape, -1, piece.length)
    return value


def _meta(place: fx.Node, number: int, part: str, like: fx.Node, dim: int, length: int) -> dict[str, Any]:
    """Of a new node that stands at an old one's place, with the sizes of another but for one dim."""
    sizes = list(like.meta["sizes"])
    sizes[dim] = length
    meta = place.meta | dict(sizes=tuple(sizes), dtype=like.meta["dtype"])
    for key in ("alias", "at"):
        if key in meta:
            meta[key] = (meta[key], number, part)
    return meta
