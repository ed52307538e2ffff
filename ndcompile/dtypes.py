"""Products of unequal dtypes: torch refuses them on every device, but not on meta, where models are traced."""

from __future__ import annotations

import torch
from torch import fx

from ndcompile.errors import CompileError
from ndcompile.rules.registry import describe

ONE_DTYPE = frozenset(
    f"aten.{name}"
    for name in (
        "linear.default matmul.default mm.default bmm.default mv.default dot.default addmm.default baddbmm.default "
        "einsum.default bilinear.default scaled_dot_product_attention.default conv1d.default conv2d.default "
        "conv3d.default conv_transpose1d.default conv_transpose2d.input conv_transpose3d.input"
    ).split()
)
"""Ops whose floating operands have one dtype."""


def one_dtype(graph: fx.GraphModule) -> None:
    """Raise CompileError where an op of `ONE_DTYPE` gets two floating dtypes."""
    for node in graph.graph.nodes:
        if str(node.target) in ONE_DTYPE:
            dtypes = dict.fromkeys(n.meta["dtype"] for n in _multiplied(node) if _is_floating(n))
            if len(dtypes) > 1:
                raise _refused(node, list(dtypes))


def _multiplied(node: fx.Node) -> list[fx.Node]:
    """All operands; of attention not the mask, which is added to scores."""
    attends = "scaled_dot_product_attention" in str(node.target)
    return [n for n in node.args[:3] if isinstance(n, fx.Node)] if attends else node.all_input_nodes


def _is_floating(node: fx.Node) -> bool:
    dtype = node.meta.get("dtype")
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point


def _refused(node: fx.Node, dtypes: list[torch.dtype]) -> CompileError:
    name = str(node.target).split(".")[1]
    return CompileError(
        f"{name} gets {' and '.join(str(d).removeprefix('torch.') for d in dtypes)}",
        node=describe(node), source=node.meta.get("source"),
        why="torch multiplies operands of one dtype only, and Precision(compute=…) casts parameters and inputs alone",
        tries=["a cast in the model, x.to(self.layer.weight.dtype)", "example inputs in the dtype of the parameters"],
    )  # fmt: skip
