"""The reference graph as a module on one device: the right answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from ndcompile.rules.registry import results, updates
from ndcompile.runtime.manifest import Manifest
from ndcompile.runtime.random import draw_key


class Reference(nn.Module):
    """Runs a reference graph with a model's parameters and buffers; called as the model is, on the global batch.

    It differs from the model in what the compiler's statement of equality assumes: dropout by hashing, and float64
    where that was asked for.
    """

    def __init__(self, graph: fx.GraphModule, manifest: Manifest, model: nn.Module) -> None:
        super().__init__()
        self.model, self._graph, self._manifest = model, [graph], manifest

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tensors = self._manifest.tensors(args, kwargs)
        with torch.autocast(tensors[0].device.type, enabled=False):
            found = run(self._graph[0], self.model, dict(zip(self._manifest.inputs, tensors, strict=True)))
        count = len(found) - len(self._manifest.updates)
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        with torch.no_grad():
            for name, value in zip(self._manifest.updates, found[count:], strict=True):
                buffers[name].copy_(value)
        return pytree.tree_unflatten(found[:count], self._manifest.output_spec)


def run(graph: fx.GraphModule, model: nn.Module, inputs: dict[str, Tensor]) -> list[Any]:
    """Execute the graph's nodes one by one on real tensors."""
    held = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    device = next(iter(inputs.values())).device
    held |= {name: held[name].clone() for name in updates(graph)}  # backward may need what is written over
    return walk(graph, lambda node: _placeholder(node, held, inputs, device))


def walk(
    graph: fx.GraphModule,
    placeholder: Callable[[fx.Node], Any],
    seen: Callable[[fx.Node, Any], None] = lambda node, value: None,
) -> list[Any]:
    """The results of the graph's nodes, executed one by one; `seen` is told every value."""
    values: dict[fx.Node, Any] = {}
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            values[node] = placeholder(node)
        elif node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
            values[node] = node.target(*args, **kwargs)
        if node in values:
            seen(node, values[node])
    return [values[v] if isinstance(v, fx.Node) else v for v in results(graph)]


def _placeholder(node: fx.Node, held: dict[str, Tensor], inputs: dict[str, Tensor], device: Any) -> Any:
    role = node.meta["role"]
    if role in ("parameter", "buffer"):
        value = held[node.meta["name"]]
        return value if value.dtype == node.meta["dtype"] else value.to(node.meta["dtype"])
    if role == "constant":
        return node.meta["value"].to(device)
    if role == "key":
        return draw_key(device)
    return inputs[node.meta["name"]]
