"""What autocast does, as explicit casts: the lists of torch's documentation, for ops that capture keeps whole."""

from __future__ import annotations

import torch
from torch import Tensor, fx

LOWER = frozenset("linear matmul mm bmm addmm baddbmm einsum conv1d conv2d conv3d scaled_dot_product_attention".split())
"""Run in the autocast dtype."""

FLOAT32 = frozenset(
    "softmax log_softmax cross_entropy_loss nll_loss nll_loss_nd mse_loss l1_loss layer_norm group_norm sum prod cumsum "
    "exp expm1 log log1p log2 log10 pow rsqrt reciprocal norm cosh sinh tan softplus binary_cross_entropy_with_logits "
    "rms_norm".split()
)
"""Run in float32. On CPU torch autocasts fewer of these to float32; emitted code is the same on every device."""

WIDEST = frozenset("cat stack addcdiv addcmul index_put where".split())
"""Run in the widest dtype of their operands."""


def casts(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> None:
    """Put the casts before `node` that autocast to `dtype` would do."""
    name = str(node.target).split(".")[1] if str(node.target).startswith("aten.") else ""
    wanted = dtype if name in LOWER else torch.float32 if name in FLOAT32 else None
    if wanted is None:
        return

    def cast(argument: fx.Node) -> fx.Node:
        value = argument.meta.get("val")
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dtype in (wanted, torch.float64):
            return argument
        with graph.inserting_before(node):
            new = graph.call_function(torch.ops.aten.to.dtype, (argument, wanted))
        new.meta = {k: v for k, v in node.meta.items() if k in ("nn_module_stack", "stack_trace")}
        new.meta["val"] = value.to(wanted)
        return new

    node.args = fx.node.map_arg(node.args, cast)
    node.kwargs = fx.node.map_arg(node.kwargs, cast)
