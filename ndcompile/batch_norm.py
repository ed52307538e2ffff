"""Batch norm in training, written out: the mean and the variance of the global batch, and the running ones in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ndcompile import runtime
from ndcompile.build import Builder
from ndcompile.rules.registry import arguments

aten = torch.ops.aten
HALF = (torch.bfloat16, torch.float16)


def lower_batch_norms(graph: fx.GraphModule) -> None:
    """Each `batch_norm` that takes its statistics from the batch becomes sums, divided by the global count.

    The mean comes first and the variance is that of the differences from it, not the mean of squares less the square
    of the mean: that would lose all digits where the mean is large. Half precisions are widened to float32, as torch
    does. A batch norm that uses its running statistics stays whole.
    """
    for node in graph.graph.find_nodes(op="call_function", target=aten.batch_norm.default):
        if arguments(node)["training"]:
            with graph.graph.inserting_before(node):
                new = _lowered(Builder(graph.graph, node), arguments(node))
            new.meta["val"] = node.meta["val"]  # the memory that views of it share
            node.replace_all_uses_with(new)
            graph.graph.erase_node(node)


def _lowered(build: Builder, given: dict[str, Any]) -> fx.Node:
    x: fx.Node = given["input"]
    sizes, dtype = x.meta["sizes"], x.meta["dtype"]
    wide = torch.float32 if dtype in HALF else dtype
    dims = [d for d in range(len(sizes)) if d != 1]
    one = tuple(1 if d in dims else size for d, size in enumerate(sizes))
    count = build.size(x, dims)
    x = build.cast(x, wide)
    total = build(aten.sum.dim_IntList, x, dims, True, sizes=one, dtype=wide)
    mean = build(aten.div.Tensor, total, count, sizes=one, dtype=wide, called="mean")
    centred = build(aten.sub.Tensor, x, mean, sizes=sizes, dtype=wide, called="centred")
    squares = build(aten.mul.Tensor, centred, centred, sizes=sizes, dtype=wide)
    squares = build(aten.sum.dim_IntList, squares, dims, True, sizes=one, dtype=wide)
    variance = build(aten.div.Tensor, squares, count, sizes=one, dtype=wide, called="variance")
    if given["running_mean"] is not None:
        _update(build, given["running_mean"], mean, given["momentum"])
        others = build.size(given["input"], dims, less=1)
        unbiased = build(aten.div.Tensor, squares, others, sizes=one, dtype=wide, called="unbiased")
        _update(build, given["running_var"], unbiased, given["momentum"])
    scaled = (centred, variance, given["weight"], given["bias"], given["eps"])
    return build.cast(build(runtime.batch_norm, *scaled, sizes=sizes, dtype=wide), dtype)


def _update(build: Builder, running: fx.Node, new: fx.Node, momentum: float) -> None:
    """`running` `[n]` moves towards `new` `[1, n, 1, …]`."""
    sizes, dtype, name = (running.meta[key] for key in ("sizes", "dtype", "name"))
    args, called = (running, new, momentum), name.rpartition(".")[2]
    moved = build(runtime.moving_average, *args, sizes=sizes, dtype=dtype, called=called)
    build(aten.copy_.default, running, moved, sizes=sizes, dtype=dtype)
