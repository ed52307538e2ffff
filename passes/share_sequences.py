"""Give ops that look along a sequence a form in which ranks share it: convolutions that keep its length, cumsum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import fx

from ndcompile import runtime
from ndcompile.axes import KINDS
from ndcompile.build import Builder
from ndcompile.mesh import MeshSpec
from ndcompile.rules.registry import arguments

aten = torch.ops.aten
CONVOLUTIONS = (aten.conv1d.default, aten.conv1d.padding)


def share_sequences(graph: fx.GraphModule, mesh: MeshSpec) -> fx.GraphModule:
    """A `conv1d` of stride 1 along a sequence, whose result is as long, becomes `runtime.convolve`; so does one that
    makes more and is cut, or of something that is padded with zeros before. `cumsum` becomes `runtime.running_sum`.

    Only on a mesh that shards sequences. What is left is refused later, if each rank would repeat it.
    """
    if not any(KINDS[axis.kind].attends for axis in mesh.axes):
        return graph
    for node in list(graph.graph.nodes):
        if node.target in CONVOLUTIONS:
            _convolution(graph.graph, node)
        elif node.target is aten.cumsum.default:
            _running_sum(graph.graph, node)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _convolution(graph: fx.Graph, node: fx.Node) -> None:
    given = arguments(node)
    x, window = given["input"], given["weight"].meta["sizes"][2]
    if len(x.meta["sizes"]) != 3 or _listed(given["stride"]) != [1]:
        return
    dilation, left = _listed(given["dilation"])[0], _left(given, window)
    x, more = _before(x)
    users = [node] if _is_sequence(x, 2) and node.meta["sizes"][2] == x.meta["sizes"][2] else list(node.users)
    cuts = [0] if users == [node] else [_cut(user, x.meta["sizes"][2]) for user in users]
    total = dilation * (window - 1)
    if not _is_sequence(x, 2) or len(set(cuts)) != 1 or cuts[0] is None or not 0 <= left + more - cuts[0] <= total:
        return
    with graph.inserting_before(node):
        args = (x, given["weight"], given["bias"], left + more - cuts[0], dilation, given["groups"])
        sizes = (*node.meta["sizes"][:2], x.meta["sizes"][2])
        new = Builder(graph, node)(runtime.convolve, *args, sizes=sizes, dtype=node.meta["dtype"])
    for user in users:
        user.replace_all_uses_with(new, delete_user_cb=lambda taker: taker is not new)


def _left(given: dict[str, Any], window: int) -> int:
    """How many zeros the convolution itself puts before its input."""
    padding, dilation = given["padding"], _listed(given["dilation"])[0]
    if isinstance(padding, str):
        return dilation * (window - 1) // 2 if padding == "same" else 0
    return _listed(padding)[0]


def _listed(value: int | Sequence[int]) -> list[int]:
    return [value] if isinstance(value, int) else list(value)


def _before(x: fx.Node) -> tuple[fx.Node, int]:
    """What is padded with zeros at its end dim, and with how many before it."""
    given = arguments(x) if x.target is aten.pad.default else {}
    plain = given and given["mode"] == "constant" and not given["value"] and len(given["pad"]) == 2
    return (given["self"], given["pad"][0]) if plain and min(given["pad"]) >= 0 else (x, 0)


def _cut(user: fx.Node, length: Any) -> int | None:
    """From where on a user takes so many entries of the last dim; None for another user."""
    if user.target is not aten.slice.Tensor or user.meta["sizes"][2] != length:
        return None
    given = arguments(user)
    start = given["start"] or 0
    along = given["dim"] % 3 == 2 and given["step"] == 1
    return start if along and isinstance(start, int) and start >= 0 else None


def _is_sequence(x: fx.Node, dim: int) -> bool:
    """A length that is open, without the batch in it."""
    symbols = {str(symbol) for symbol in sympy.sympify(x.meta["sizes"][dim]).free_symbols}
    return bool(symbols) and "b" not in symbols


def _running_sum(graph: fx.Graph, node: fx.Node) -> None:
    """Whole numbers are summed on every rank: positions, and counts of documents, are small."""
    given = arguments(node)
    x = given["self"]
    dim = given["dim"] % max(len(x.meta["sizes"]), 1)
    floating = x.meta["dtype"].is_floating_point and node.meta["dtype"] == x.meta["dtype"]
    if floating and x.meta["sizes"] and _is_sequence(x, dim):
        with graph.inserting_before(node):
            new = Builder(graph, node)(runtime.running_sum, x, dim, sizes=node.meta["sizes"], dtype=node.meta["dtype"])
        node.replace_all_uses_with(new)
