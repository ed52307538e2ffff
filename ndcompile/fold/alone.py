"""Items that no other one can stand for."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx, nn

from ndcompile.blocks import block_of
from ndcompile.fold.items import Item, held_name


def alone(graph: fx.GraphModule, items: list[Item], model: nn.Module) -> Iterator[Item]:
    """Items that no other one can stand for: they update a buffer, or their block's parameters are used elsewhere."""
    traced = {item.body: item for item in items if item.marks}
    updating = {body for body, item in traced.items() if any(_updates(n, set(item.nodes)) for n in item.nodes)}
    shared = _used_elsewhere(graph, items)
    for item in items:
        if item.body is None:
            found = any(_updates(node, set(item.nodes)) for node in item.nodes)
        else:
            found = item.body in updating or item.block in shared
            found |= not _buffers_alike(model, traced[item.body].block, item.block)
        if found:
            yield item


def _used_elsewhere(graph: fx.GraphModule, items: list[Item]) -> set[str]:
    """The blocks one of whose parameters or buffers something reads that is not in a call of the block."""
    block = {node: item.block for item in items for node in item.nodes}
    blocks = {item.block for item in items}
    named = [(node, block_of(held_name(node), blocks)) for node in graph.graph.find_nodes(op="placeholder")]
    return {path for node, path in named if path and any(block.get(user) != path for user in node.users)}


def _updates(node: fx.Node, own: set[fx.Node]) -> bool:
    """Whether a node changes what is not its block's own: a buffer, or a tensor from outside."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or "batch_norm" in str(node.target):
        return "batch_norm" in str(node.target)
    changed = node.args[0] if schema.is_mutable else None
    while isinstance(changed, fx.Node) and changed in own:
        aliases = changed.target._schema.arguments[:1] if hasattr(changed.target, "_schema") else []
        changed = changed.args[0] if any(a.alias_info for a in aliases) else None
    return changed is not None


def _buffers_alike(model: nn.Module, one: str, two: str) -> bool:
    """Equal values, since passes read the masks that a model keeps in buffers."""
    if one == two:
        return True
    first, second = (dict(model.get_submodule(path).named_buffers()) for path in (one, two))
    pairs = [(first[name], second[name]) for name in first if name in second]
    return all(a is b or a.is_meta or b.is_meta or (a.shape == b.shape and bool(torch.equal(a, b))) for a, b in pairs)
