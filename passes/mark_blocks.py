"""Cut the graph into segments: each call of a repeated block, and what the root does between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from ndcompile.fold import Place, frozen, pins_in


def mark_blocks(
    graph: fx.GraphModule, lists: frozenset[str] = frozenset(), pinned: Mapping[str, str] | None = None
) -> fx.GraphModule:
    """Set `block` (the module path of the block, or ""), `segment` (its number in order of execution), and `kind`.

    `lists` are the paths of the model's `ModuleList`s. Segments whose text is equal up to names, and of which the same
    values are used later, share a kind; nodes at the same place of equal segments share `alias`, and so every choice
    that is made for one of them; `pinned` names that the user pins (with the pin's text) tell blocks apart too. A run's
    second round is numbered for all rounds that it stands for.
    """
    segments = _segments(graph, lists)
    seen = _seen(segments)
    kinds: dict[Any, int] = {}
    for number, block, place, nodes in _numbered(segments):
        repeats = bool(block) or (place is not None and place.run is not None)
        same = (bool(block), _text(block, nodes), seen[nodes[0]], pins_in(pinned or {}, block))
        text = same if repeats else ("root", number)
        kind = kinds.setdefault(text, len(kinds))
        for at, node in enumerate(nodes):
            node.meta |= dict(block=block, segment=number, kind=kind, alias=(kind, at))
            if repeats and place is not None:
                node.meta["at"] = (place.position, "op", at)
        if repeats:
            _add_ports(graph, nodes)
    for node in graph.graph.find_nodes(op="placeholder"):
        node.meta["alias"] = _owner(node, lists) or node.name
    graph.recompile()
    return graph


def _seen(segments: list[tuple[str, Place | None, list[fx.Node]]]) -> dict[fx.Node, frozenset[int]]:
    """By its first node, which of a segment's values are used outside of it: in a run those of either round."""
    found: dict[Any, set[int]] = {}
    keys = {}
    for _, place, nodes in segments:
        own = set(nodes)
        key = nodes[0] if place is None or place.run is None else (place.run, place.position)
        keys[nodes[0]] = key
        found.setdefault(key, set()).update(at for at, node in enumerate(nodes) if set(node.users) - own)
    return {first: frozenset(found[key]) for first, key in keys.items()}


def _numbered(
    segments: list[tuple[str, Place | None, list[fx.Node]]],
) -> Iterator[tuple[int, str, Place | None, list[fx.Node]]]:
    number, skip = 0, 0
    for i, (block, place, nodes) in enumerate(segments):
        yield number, block, place, nodes
        number += 1
        after = segments[i + 1][1] if i + 1 < len(segments) else None
        if place is not None and place.run is not None and place.round == 1:
            skip += place.repeat - 1
            if after is None or after.run != place.run:
                number, skip = number + skip, 0


def is_port(node: fx.Node) -> bool:
    """A block's own name for a value that it takes from outside."""
    return bool(node.meta.get("port"))


def _add_ports(graph: fx.GraphModule, nodes: list[fx.Node]) -> None:
    """Give a block one node for each value that it takes from others, so that equal blocks take them in one layout."""
    own, first = set(nodes), nodes[0]
    taken = dict.fromkeys(v for node in nodes for v in node.all_input_nodes if _travels(v) and v not in own)
    for number, value in enumerate(v for v in taken if "sizes" in v.meta):
        with graph.graph.inserting_before(first):
            port = graph.graph.call_function(torch.ops.aten.alias.default, (value,))
        port.meta = {k: value.meta[k] for k in ("sizes", "dtype")} | dict(module=first.meta["block"], source=None)
        port.meta |= {k: first.meta.get(k) for k in ("block", "segment", "kind", "place")} | dict(port=True)
        port.meta["alias"] = (first.meta["kind"], "port", number)
        for node in nodes:
            node.replace_input_with(value, port)


def _travels(value: fx.Node) -> bool:
    """Another segment's value, or an input of the model: the first block takes that where later ones take a value."""
    return value.op == "call_function" or value.meta.get("role") == "input"


def _block_of(path: str, lists: frozenset[str]) -> str:
    parts = path.split(".")
    for i in range(len(parts)):
        if ".".join(parts[:i]) in lists and parts[i].isdigit():
            return ".".join(parts[: i + 1])
    return ""


def _segments(graph: fx.GraphModule, lists: frozenset[str]) -> list[tuple[str, Place | None, list[fx.Node]]]:
    found: list[tuple[str, Place | None, list[fx.Node]]] = []
    for node in graph.graph.nodes:
        if node.op != "call_function" or "sizes" not in node.meta:
            continue
        place = node.meta.get("place")
        block = _block_of(node.meta["module"], lists) if place is None else place.block
        if not found or found[-1][:2] != (block, place):
            found.append((block, place, []))
        found[-1][2].append(node)
    return found


def _text(block: str, nodes: list[fx.Node]) -> Any:
    """What a segment does, free of names: equal texts are equal computations."""
    names: dict[fx.Node, Any] = {node: ("node", i) for i, node in enumerate(nodes)}
    outside: dict[fx.Node, int] = {}

    def name(node: fx.Node) -> Any:
        if node in names:
            return names[node]
        if node.meta.get("role") in ("parameter", "buffer") and node.meta["name"].startswith(block + "."):
            return ("own", node.meta["name"][len(block) :], node.meta["sizes"], node.meta["grad"])
        if "size" in node.meta:
            return ("size", str(node.meta["size"]))
        return ("input", outside.setdefault(node, len(outside)), node.meta.get("sizes"), node.meta.get("dtype"))

    return tuple(
        (str(node.target), frozen(node.args, name), frozen(node.kwargs, name), node.meta["sizes"], node.meta["dtype"])
        for node in nodes
    )


def _owner(node: fx.Node, lists: frozenset[str]) -> Any:
    """A parameter's alias: the kind of the block that owns and alone uses it, and its name there."""
    block = _block_of(node.meta.get("name", ""), lists)
    kinds = {user.meta.get("kind") for user in node.users}
    blocks = {user.meta.get("block") for user in node.users}
    if not block or blocks != {block} or len(kinds) != 1:
        return None
    return (kinds.pop(), node.meta["name"][len(block) :])
