"""Make tensors on the device of the inputs, whatever device the model was traced on."""

from __future__ import annotations

import torch
from torch import fx


def follow_device(graph: fx.GraphModule) -> fx.GraphModule:
    """`arange(…, device=meta)` becomes `arange(…, device=ids.device)`. Afterwards `no_fixed_device` holds."""
    inputs = [n for n in graph.graph.find_nodes(op="placeholder") if n.meta["role"] == "input"]
    fixed = [n for n in graph.graph.nodes if isinstance(n.kwargs.get("device"), torch.device)]
    if fixed:
        first = next(n for n in graph.graph.nodes if n.op != "placeholder")
        with graph.graph.inserting_before(first):
            device = graph.graph.call_function(getattr, (inputs[0], "device"))
        device.meta = dict(module="", source=None)
        for node in fixed:
            node.kwargs = {**node.kwargs, "device": device}
    graph.recompile()
    return graph
