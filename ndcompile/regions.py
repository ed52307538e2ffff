"""No-grad and autocast regions, which tracing leaves as graphs inside the graph."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ndcompile.autocast import Autocast


def inline_regions(graph: fx.GraphModule, autocast: Autocast | None) -> None:
    """Put the bodies of no-grad and autocast regions in line: no-grad as `detach`; each node knows its autocast."""
    for node in graph.graph.nodes:
        node.meta["autocast"] = autocast
    while regions := [n for n in graph.graph.nodes if str(n.target).startswith("wrap_with_")]:
        for node in regions:
            _inline(graph, node)
    graph.graph.lint()


def _inline(graph: fx.GraphModule, node: fx.Node) -> None:
    grad_region = "set_grad" in str(node.target)
    at = next(i for i, a in enumerate(node.args) if isinstance(a, fx.Node) and a.op == "get_attr")
    settings, body_node, inputs = node.args[:at], node.args[at], node.args[at + 1 :]
    assert isinstance(body_node, fx.Node)
    body = getattr(graph, str(body_node.target))
    inside = node.meta["autocast"] if grad_region else _autocast_of(settings)
    stops = grad_region and not settings[0]
    copied: dict[fx.Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), inputs, strict=True))
    with graph.graph.inserting_before(node):
        for inner in body.graph.nodes:
            if inner.op in ("placeholder", "output"):
                continue
            new = graph.graph.node_copy(inner, lambda n: copied[n])
            new.meta |= dict(autocast=inside, no_grad=stops)
            if inner.op == "get_attr":
                setattr(graph, str(inner.target), getattr(body, str(inner.target)))
            value = new.meta.get("val")
            if stops and isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
                cut = graph.graph.call_function(torch.ops.aten.detach.default, (new,))
                cut.meta = dict(new.meta)
                copied[inner] = cut
            else:
                copied[inner] = new
    results = fx.node.map_arg(body.graph.output_node().args[0], lambda n: copied[n])
    for user in list(node.users):
        assert user.target is operator.getitem, "a region's results are taken by getitem"
        user.replace_all_uses_with(results[user.args[1]])
        graph.graph.erase_node(user)
    graph.graph.erase_node(node)
    if not body_node.users:
        graph.graph.erase_node(body_node)


def _autocast_of(settings: Sequence[Any]) -> Autocast | None:
    """From the arguments of an autocast region: device, dtype, enabled."""
    device, dtype, enabled = str(settings[0]), settings[1], settings[2]
    return Autocast(device, dtype or torch.get_autocast_dtype(device)) if enabled else None
