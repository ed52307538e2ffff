"""Write losses and means over tokens as sums divided by global counts, which is what sharded tokens need."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch import fx

from ndcompile import runtime
from ndcompile.build import Builder, lower
from ndcompile.errors import CompileError
from ndcompile.rules.registry import arguments, describe

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2


def lower_losses(graph: fx.GraphModule) -> fx.GraphModule:
    """`cross_entropy` and `nll_loss` become one loss a token, their sum, and the count of tokens that count; `mse_loss`
    and means over a symbolic dim become a sum divided by the number of elements of all ranks together.
    """
    lower(graph, LOWERINGS)
    graph.recompile()
    return graph


def _reduced(build: Builder, values: fx.Node, reduction: int, count: Callable[[], Any]) -> fx.Node:
    """The sum or mean of the values; half precisions are added in float32, over ranks too, as torch does on one."""
    if reduction == NONE:
        return values
    dtype, sizes = values.meta["dtype"], values.meta["sizes"]
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    if wide != dtype:
        values = build(aten.to.dtype, values, wide, sizes=sizes, dtype=wide)
    total = build(aten.sum.default, values, sizes=(), dtype=wide)
    if reduction == MEAN:
        total = build(aten.div.Tensor, total, count(), sizes=(), dtype=wide)
    return total if wide == dtype else build(aten.to.dtype, total, dtype, sizes=(), dtype=dtype)


def _cross_entropy(build: Builder, node: fx.Node) -> fx.Node:
    given = arguments(node)
    logits, target = given["self"], given["target"]
    if given["weight"] is not None or target.meta["dtype"].is_floating_point:
        raise CompileError(
            "cross_entropy with class weights or with probabilities as targets is not compiled",
            node=describe(node),
            source=node.meta["source"],
            tries="integer targets without weight=",
        )
    logits, target = _rows(build, node, logits, target)
    losses = build(
        runtime.cross_entropy, logits, target, None, None, given["ignore_index"], given["label_smoothing"],
        sizes=target.meta["sizes"], dtype=logits.meta["dtype"],
    )  # fmt: skip
    return _of_tokens(build, node, losses, lambda: _that_count(build, target, given["ignore_index"]))


def _negative_log_likelihood(build: Builder, node: fx.Node) -> fx.Node:
    """Of a token `-x[target]`, and 0 where the target is ignored."""
    given = arguments(node)
    weighted, each = given["weight"] is not None, given["reduction"] == NONE
    if weighted or (each and node.meta["sizes"] != given["target"].meta["sizes"]):
        raise CompileError(
            f"nll_loss with {'class weights' if weighted else 'reduction=none'} is not compiled",
            node=describe(node),
            source=node.meta["source"],
            why="" if weighted else "torch takes its result for one number while it traces a model without memory",
            tries="nll_loss without weight=" if weighted else "-x.gather(1, target.unsqueeze(1)).squeeze(1)",
        )
    x, target = _rows(build, node, given["self"], given["target"])
    tokens, dtype, whole = target.meta["sizes"], x.meta["dtype"], target.meta["dtype"]
    counted = _that_count(build, target, given["ignore_index"])
    index = build(aten.where.ScalarOther, counted, target, 0, sizes=tokens, dtype=whole)
    index = build(aten.unsqueeze.default, index, 1, sizes=(*tokens, 1), dtype=whole)
    picked = build(aten.gather.default, x, 1, index, sizes=(*tokens, 1), dtype=dtype)
    picked = build(aten.squeeze.dim, picked, 1, sizes=tokens, dtype=dtype)
    losses = build(aten.neg.default, picked, sizes=tokens, dtype=dtype)
    losses = build(aten.where.ScalarOther, counted, losses, 0.0, sizes=tokens, dtype=dtype)
    return _of_tokens(build, node, losses, lambda: counted)


def _that_count(build: Builder, target: fx.Node, ignored: int) -> fx.Node:
    return build(aten.ne.Scalar, target, ignored, sizes=target.meta["sizes"], dtype=torch.bool)


def _of_tokens(build: Builder, node: fx.Node, losses: fx.Node, counted: Callable[[], fx.Node]) -> fx.Node:
    """The result of a loss that has one for each token, as it asks for: all, their sum, or their mean over those that
    count.
    """
    reduction, tokens = arguments(node)["reduction"], losses.meta["sizes"]
    reduced = _reduced(
        build, losses, reduction, lambda: build(aten.sum.default, counted(), sizes=(), dtype=torch.int64)
    )
    if reduction == NONE and node.meta["sizes"] != tokens:
        sizes, dtype = node.meta["sizes"], node.meta["dtype"]
        reduced = build(aten.reshape.default, reduced, [build.number(n) for n in sizes], sizes=sizes, dtype=dtype)
    return reduced


def _rows(build: Builder, node: fx.Node, logits: fx.Node, target: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Logits as [tokens, classes]: torch has the classes at dim 1 of more dims, at dim 0 of one."""
    sizes, dtype = logits.meta["sizes"], logits.meta["dtype"]
    if len(sizes) > 2 and (sizes[0], *sizes[2:]) != target.meta["sizes"]:
        raise CompileError(
            f"the targets of a loss are of sizes {list(target.meta['sizes'])}, its scores of {list(sizes)}",
            node=describe(node),
            source=node.meta["source"],
            why="a size of an input that the model lets be any is not the fixed one that the scores have",
            tries='dynamic_dims={"the targets\' name": {0: "b"}}, which fixes their other sizes',
        )
    if len(sizes) == 2:
        return logits, target
    if logits.target is target.target is aten.unsqueeze.default and sizes[2:] == (1,):
        return logits.args[0], target.args[0]  # type: ignore[return-value]  # capture made three dims of two
    if len(sizes) == 1:
        return (
            build(aten.unsqueeze.default, logits, 0, sizes=(1, *sizes), dtype=dtype),
            build(aten.unsqueeze.default, target, 0, sizes=(1,), dtype=target.meta["dtype"]),
        )
    order = [0, *range(2, len(sizes)), 1]
    moved = build(aten.permute.default, logits, order, sizes=tuple(sizes[i] for i in order), dtype=dtype)
    tokens = math.prod(moved.meta["sizes"][:-1])
    rows = build(aten.reshape.default, moved, [-1, sizes[1]], sizes=(tokens, sizes[1]), dtype=dtype)
    flat = build(aten.reshape.default, target, [-1], sizes=(tokens,), dtype=target.meta["dtype"])
    return rows, flat


Cost = Callable[[Builder, fx.Node, Mapping[str, Any]], fx.Node]
"""From the differences, and the loss's arguments."""


def _elementwise(cost: Cost) -> Callable[[Builder, fx.Node], fx.Node]:
    """A loss that is a cost of each difference."""

    def lowered(build: Builder, node: fx.Node) -> fx.Node:
        given = arguments(node)
        sizes, dtype = given["self"].meta["sizes"], node.meta["dtype"]
        error = build(aten.sub.Tensor, given["self"], given["target"], sizes=sizes, dtype=dtype)
        costs = cost(build, error, given)
        return _reduced(build, costs, given["reduction"], lambda: build.size(error, range(len(sizes))))

    return lowered


def _square(build: Builder, error: fx.Node, given: Mapping[str, Any]) -> fx.Node:
    return build(aten.mul.Tensor, error, error, sizes=error.meta["sizes"], dtype=error.meta["dtype"])


def _absolute(build: Builder, error: fx.Node, given: Mapping[str, Any]) -> fx.Node:
    return build(aten.abs.default, error, sizes=error.meta["sizes"], dtype=error.meta["dtype"])


def _huber(build: Builder, error: fx.Node, given: Mapping[str, Any]) -> fx.Node:
    """e² / 2 up to δ, and δ · (|e| − δ / 2) above: m · (|e| − m / 2) with m = min(|e|, δ)."""
    meta: dict[str, Any] = dict(sizes=error.meta["sizes"], dtype=error.meta["dtype"])
    size = _absolute(build, error, given)
    least = build(aten.clamp.default, size, None, given["delta"], **meta)
    rest = build(aten.sub.Tensor, size, build(aten.mul.Tensor, least, 0.5, **meta), **meta)
    return build(aten.mul.Tensor, least, rest, **meta)


def _smooth(build: Builder, error: fx.Node, given: Mapping[str, Any]) -> fx.Node:
    """Huber's cost over β, which goes to |e| as β goes to 0."""
    if given["beta"] == 0:
        return _absolute(build, error, given)
    cost = _huber(build, error, {"delta": given["beta"]})
    return build(aten.div.Tensor, cost, given["beta"], sizes=error.meta["sizes"], dtype=error.meta["dtype"])


def _mean(build: Builder, node: fx.Node) -> fx.Node | None:
    given = arguments(node)
    sizes, dim = given["self"].meta["sizes"], given.get("dim")
    dims = range(len(sizes)) if not dim else [dim] if isinstance(dim, int) else dim
    count = math.prod(sizes[d] for d in dims)
    if isinstance(count, int):
        return None
    dtype = node.meta["dtype"]
    if dim:
        total = build(aten.sum.dim_IntList, given["self"], dim, given["keepdim"], sizes=node.meta["sizes"], dtype=dtype)
    else:
        total = build(aten.sum.default, given["self"], sizes=(), dtype=dtype)
    return build(aten.div.Tensor, total, build.size(given["self"], dims), sizes=node.meta["sizes"], dtype=dtype)


def _ones(build: Builder, node: fx.Node) -> fx.Node:
    """`new_zeros`, `empty_like` and the like: the tensor that they are called on lends only its size, device, dtype."""
    given, meta = arguments(node), node.meta
    kwargs = dict(dtype=meta["dtype"], device=torch.device("meta"))  # follow_device says where
    size = given["size"] if "size" in given else [build.size(given["self"], [d]) for d in range(len(meta["sizes"]))]
    if "fill_value" in given:
        new = build(aten.full.default, size, given["fill_value"], sizes=meta["sizes"], dtype=meta["dtype"])
    else:
        target = aten.ones.default if "ones" in str(node.target) else aten.zeros.default
        new = build(target, size, sizes=meta["sizes"], dtype=meta["dtype"])
    new.kwargs = kwargs
    return new


def _histc(build: Builder, node: fx.Node) -> fx.Node | None:
    """On each device `histc` takes other dtypes, so which one the model asked for on meta must not matter."""
    given, meta = arguments(node), node.meta
    if given["min"] == given["max"]:
        return None  # the bounds are the elements' own, of all ranks together: there is no rule for it
    counted = (given["self"], given["bins"], given["min"], given["max"])
    return build(runtime.histogram, *counted, sizes=meta["sizes"], dtype=meta["dtype"])


def _repeat(build: Builder, node: fx.Node) -> fx.Node:
    """Copies along a dim are a dim of their own before it, which an expansion makes and a reshape joins with it."""
    x, target = arguments(node)["self"], node.meta["sizes"]
    source = (1,) * (len(target) - len(x.meta["sizes"])) + x.meta["sizes"]
    apart = tuple(n for size in source for n in (1, size))
    times = [sympy.cancel(sympy.sympify(n) / size) for n, size in zip(target, source, strict=True)]
    copies = tuple(n for many, size in zip(times, source, strict=True) for n in (_number(many), size))
    for op, sizes in ((aten.reshape.default, apart), (aten.expand.default, copies), (aten.reshape.default, target)):
        x = build(op, x, [build.number(n) for n in sizes], sizes=sizes, dtype=node.meta["dtype"])
    return x


def _repeat_each(build: Builder, node: fx.Node) -> fx.Node | None:
    """An `output_size` that is stated is what the other arguments say."""
    given = arguments(node)
    if given["output_size"] is None:
        return None
    repeated = (given["self"], given["repeats"], given["dim"])
    return build(aten.repeat_interleave.self_int, *repeated, sizes=node.meta["sizes"], dtype=node.meta["dtype"])


def _number(size: sympy.Expr) -> int | sympy.Expr:
    return int(size) if size.is_Integer else size


def _scalar(build: Builder, node: fx.Node) -> fx.Node:
    """One number as a tensor."""
    return build.full((), arguments(node)["s"], node.meta["dtype"])


def _channel_dropout(build: Builder, node: fx.Node) -> fx.Node:
    """`dropout2d` and its kind: dropout of one number a sample and channel, times the input."""
    given, sizes, dtype = arguments(node), node.meta["sizes"], node.meta["dtype"]
    if not given["train"] or given["p"] == 0:
        return given["input"]
    kept = (*sizes[:2], *[1] * (len(sizes) - 2))
    ones = build.full(kept, 1.0, dtype)
    mask = build(aten.dropout.default, ones, given["p"], True, sizes=kept, dtype=dtype)
    return build(aten.mul.Tensor, given["input"], mask, sizes=sizes, dtype=dtype)


LOWERINGS: dict[Any, Callable[[Builder, fx.Node], fx.Node | None]] = {
    aten.cross_entropy_loss.default: _cross_entropy,
    aten.nll_loss_nd.default: _negative_log_likelihood,
    aten.mse_loss.default: _elementwise(_square),
    aten.l1_loss.default: _elementwise(_absolute),
    aten.smooth_l1_loss.default: _elementwise(_smooth),
    aten.huber_loss.default: _elementwise(_huber),
    aten.scalar_tensor.default: _scalar,
    aten.feature_dropout.default: _channel_dropout,
    aten.mean.dim: _mean,
    aten.mean.default: _mean,
    aten.new_ones.default: _ones,
    aten.new_zeros.default: _ones,
    aten.new_full.default: _ones,
    aten.ones_like.default: _ones,
    aten.zeros_like.default: _ones,
    aten.full_like.default: _ones,
    aten.empty.memory_format: _ones,
    aten.new_empty.default: _ones,
    aten.empty_like.default: _ones,
    aten.histc.default: _histc,
    aten.repeat.default: _repeat,
    aten.repeat_interleave.self_int: _repeat_each,
}
