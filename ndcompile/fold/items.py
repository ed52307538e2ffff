"""A captured graph as its calls of blocks, and the stretches between them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from ndcompile.borders import AGAIN, ENTER, LEAVE

HELD = ("parameter", "buffer")
"""Roles of the placeholders that a model's blocks own."""


class NotFollowed(Exception):
    """A block uses values that its call does not show, so calls of it may not be told apart."""


@dataclass
class Item:
    """A call of a block, or what stands between two calls."""

    key: Any
    block: str
    nodes: list[fx.Node]
    inputs: list[fx.Node]
    outputs: list[fx.Node | None]
    """Of a call its results, of a stretch all of its nodes."""
    body: int | None = None
    again: fx.Node | None = None
    marks: tuple[fx.Node, ...] = ()
    """Where a traced block is entered and left."""


def items_of(graph: fx.GraphModule) -> list[Item]:
    found: list[Item] = []
    inside: Item | None = None
    first: dict[int, Item] = {}
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is ENTER:
            values, path, body = node.args
            inside = first[body] = Item(("body", body), path, [], list(values), [], body, marks=(node,))
            found.append(inside)
        elif node.target is LEAVE:
            assert inside is not None, "a block that is left was entered"
            inside.outputs, inside.marks, inside = list(node.args[0]), (*inside.marks, node), None
        elif inside is not None:
            inside.nodes.append(node)
        elif node.target is AGAIN:
            found.append(_again(node, first[node.args[2]]))
        elif not (node.target is operator.getitem and node.args[0].target is AGAIN):
            if not found or found[-1].body is not None:
                found.append(Item(None, "", [], [], []))
            found[-1].nodes.append(node)
    for item in found:
        if item.body is None:
            item.key, item.inputs, item.outputs = _text(item.nodes), outside(item.nodes), list(item.nodes)
    for item in first.values():
        _follow(item, again=any(i.body == item.body and i is not item for i in found))
    return found


def _again(node: fx.Node, template: Item) -> Item:
    """A later call; what it hands through unchanged is its own input."""
    values, path, body = cast(tuple[list[fx.Node], str, int], node.args)
    inputs = list(values)
    results: list[fx.Node | None] = [None] * len(template.outputs)
    for user in list(node.users):
        number = cast(int, user.args[1])
        passed = template.outputs[number]
        if passed in template.inputs:
            user.replace_all_uses_with(inputs[template.inputs.index(passed)])
            user.graph.erase_node(user)
        else:
            results[number] = user
    return Item(("body", body), path, [r for r in results if r], inputs, results, body, node)


def outside(nodes: list[fx.Node]) -> list[fx.Node]:
    own = set(nodes)
    return list(dict.fromkeys(v for node in nodes for v in node.all_input_nodes if v not in own))


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (int, torch.SymInt))


def _follow(body: Item, again: bool) -> None:
    """A traced block takes tensors from outside as arguments only, and nothing but its results is used later."""
    if not again:
        return
    own = set(body.nodes)
    held = ("parameter", "buffer", "constant")
    free = [v for v in outside(body.nodes) if v not in body.inputs and not _is_size(v)]
    seen = [n for n in body.nodes if n not in body.outputs and any(_leaves(user, own) for user in n.users)]
    if seen or any(v.meta.get("role") not in held for v in free):
        raise NotFollowed(body.block)


def _leaves(user: fx.Node, own: set[fx.Node]) -> bool:
    return user not in own and user.target is not LEAVE


def _text(nodes: list[fx.Node]) -> Any:
    """What a stretch does, free of names."""
    names: dict[fx.Node, Any] = {node: i for i, node in enumerate(nodes)}
    names |= {node: -1 - i for i, node in enumerate(outside(nodes))}
    return tuple((str(n.target), *frozen((n.args, n.kwargs), lambda v: names[v])) for n in nodes)


def frozen(value: Any, name: Callable[[fx.Node], Any]) -> Any:
    """Arguments of a node as something to compare, with `name` of each node in them."""
    if isinstance(value, fx.Node):
        return name(value)
    if isinstance(value, dict):
        return tuple((k, frozen(v, name)) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(frozen(v, name) for v in value)
    return (type(value), value) if isinstance(value, (int, float, bool, str, type(None))) else str(value)


def held_name(node: fx.Node) -> str:
    """The name of the parameter or buffer that a node is."""
    return str(node.meta["name"]) if node.meta.get("role") in HELD else ""
