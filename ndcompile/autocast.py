"""What autocast does, as explicit casts: the lists of torch's documentation, for ops that capture keeps whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import fx


class Autocast(NamedTuple):
    """An autocast that is on: the lists of which device it follows, and its dtype."""

    device: str
    dtype: torch.dtype


@dataclass(frozen=True)
class Lists:
    """What a device's autocast does to an op by name: run it in the autocast dtype, in float32, or in the widest dtype
    of its operands; every other op promotes as it does without autocast.
    """

    lower: frozenset[str]
    float32: frozenset[str]
    widest: frozenset[str]


LOWER = frozenset(
    "linear matmul mm bmm addmm baddbmm einsum conv1d conv2d conv3d prelu scaled_dot_product_attention".split()
)
LOSSES = frozenset(
    "cross_entropy_loss nll_loss nll_loss_nd mse_loss l1_loss smooth_l1_loss huber_loss kl_div "
    "binary_cross_entropy_with_logits prod".split()
)
CUDA_FLOAT32 = frozenset(
    "softmax log_softmax layer_norm group_norm rms_norm sum cumsum cumprod exp expm1 log log1p log2 log10 pow rsqrt "
    "reciprocal logsumexp acos asin cosh sinh tan softplus linalg_vector_norm cosine_similarity".split()
)
LISTS = {
    "cpu": Lists(LOWER, LOSSES, frozenset("cat stack".split())),
    "cuda": Lists(
        LOWER | frozenset({"mv"}),
        LOSSES | CUDA_FLOAT32,
        frozenset("cat stack addcdiv addcmul dot bilinear index_put scatter_add tensordot".split()),
    ),
}


def casts(
    graph: fx.Graph, node: fx.Node, autocast: Autocast, dtype_of: Callable[[fx.Node], torch.dtype | None]
) -> None:
    """Put the casts before `node` that autocast would do; `dtype_of` a node is None where it is no floating tensor."""
    wanted = _wanted(node, autocast, dtype_of)
    if wanted is None:
        return

    def cast(argument: fx.Node) -> fx.Node:
        if dtype_of(argument) in (None, wanted, torch.float64):
            return argument
        with graph.inserting_before(node):
            new = graph.call_function(torch.ops.aten.to.dtype, (argument, wanted))
        new.meta = {k: v for k, v in node.meta.items() if k in ("nn_module_stack", "stack_trace")}
        new.meta["val"] = argument.meta["val"]
        return new

    node.args = fx.node.map_arg(node.args, cast)
    node.kwargs = fx.node.map_arg(node.kwargs, cast)


def _wanted(node: fx.Node, autocast: Autocast, dtype_of: Callable[[fx.Node], torch.dtype | None]) -> torch.dtype | None:
    name = str(node.target).split(".")[1] if str(node.target).startswith("aten.") else ""
    lists = LISTS[autocast.device]
    if name in lists.lower:
        return autocast.dtype
    if name in lists.float32:
        return torch.float32
    if name in lists.widest:
        given = [dtype for operand in node.all_input_nodes if (dtype := dtype_of(operand)) is not None]
        return torch.float32 if torch.float32 in given else autocast.dtype
    return None
