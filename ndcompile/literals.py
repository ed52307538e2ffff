"""Tensors that a model makes of plain values, or holds beside its buffers, are written into the program."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from ndcompile import runtime
from ndcompile.errors import CompileError

LARGEST = 64
"""The most elements that are written as text: what is larger belongs in a buffer."""


def write_literals(graph: fx.GraphModule) -> None:
    """Each use of a placeholder with `role` constant takes a tensor that the program makes of the values.

    A rank then needs nothing but the program's text, and equal blocks have equal values.
    """
    for node in graph.graph.find_nodes(op="placeholder"):
        if node.meta.get("role") != "constant":
            continue
        for user in list(node.users):
            with graph.graph.inserting_before(user):
                user.replace_input_with(node, _literal(graph.graph, node, user))
        graph.graph.erase_node(node)
    graph.recompile()


def _literal(graph: fx.Graph, node: fx.Node, user: fx.Node) -> fx.Node:
    value: Tensor = node.meta["value"]
    if value.is_meta or value.numel() > LARGEST:
        raise CompileError(
            f"the model holds '{node.meta['name']}' {list(value.shape)}, which is neither parameter nor buffer",
            why="it is on the meta device, so its values are not known"
            if value.is_meta
            else "it is too large for text",
            tries="register_buffer(name, tensor, persistent=False)",
        )
    place: dict[str, Any] = dict(dtype=value.dtype, device=torch.device("meta"))  # follow_device says where
    made = graph.call_function(runtime.literal, (_listed(value.tolist()),), place)
    made.meta = {k: user.meta[k] for k in ("nn_module_stack", "stack_trace") if k in user.meta}
    made.meta["val"] = node.meta["val"]
    return made


def _listed(values: Any) -> Any:
    return tuple(_listed(value) for value in values) if isinstance(values, list) else values
