"""Write every draw as what is computed from uniform numbers, which then are the one kind of draw there is."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import fx

from ndcompile.build import Builder, lower
from ndcompile.passes.drop_noops import is_impure
from ndcompile.rules.registry import arguments

aten = torch.ops.aten


def lower_draws(graph: fx.GraphModule) -> fx.GraphModule:
    """`bernoulli` compares uniform numbers with its probability, `exponential` takes their logarithm, `randn` is by Box
    and Muller of two of them. What lent a draw its size alone is erased.
    """
    lower(graph, LOWERINGS)
    graph.graph.eliminate_dead_code(is_impure)
    graph.recompile()
    return graph


def _wide(node: fx.Node) -> torch.dtype:
    """What is computed in: float32 for what holds fewer digits."""
    dtype: torch.dtype = node.meta["dtype"]
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


def _uniform(build: Builder, sizes: tuple[Any, ...], dtype: torch.dtype) -> fx.Node:
    """From 0 to below 1. Tokens of all sequences in one dim are drawn as those of each: an axis may shard sequences."""
    apart = tuple(factor for size in sizes for factor in _factors(size))
    node = build(aten.rand.default, [build.number(size) for size in apart], sizes=apart, dtype=dtype)
    node.kwargs = dict(dtype=dtype, device=torch.device("meta"))
    if apart == sizes:
        return node
    return build(aten.reshape.default, node, [build.number(size) for size in sizes], sizes=sizes, dtype=dtype)


def _factors(size: Any) -> list[Any]:
    """`b·s·k` as b, s and k: the numbers are the same, since an element's place in the whole is."""
    symbols = sorted(sympy.sympify(size).free_symbols, key=str)
    rest = sympy.sympify(size) / sympy.prod(symbols)
    if len(symbols) < 2 or not rest.is_Integer:
        return [size]
    return [*symbols, int(rest)] if rest != 1 else symbols


def _plain(build: Builder, node: fx.Node) -> fx.Node:
    return _uniform(build, node.meta["sizes"], node.meta["dtype"])


def _between(build: Builder, node: fx.Node) -> fx.Node:
    given, wide = arguments(node), _wide(node)
    x = _uniform(build, node.meta["sizes"], wide)
    return build.cast(_scaled(build, x, given["to"] - given["from"], given["from"]), node.meta["dtype"])


def _scaled(build: Builder, x: fx.Node, factor: Any, more: Any) -> fx.Node:
    """`x · factor + more`, of numbers or of tensors that broadcast to `x`, in its dtype."""
    factor, more = (build.cast(v, x.meta["dtype"]) if isinstance(v, fx.Node) else v for v in (factor, more))
    about = dict(sizes=x.meta["sizes"], dtype=x.meta["dtype"])
    if factor != 1:
        x = build(aten.mul.Tensor, x, factor, **about)
    return x if more == 0 else build(aten.add.Tensor, x, more, **about)


def _happens(build: Builder, node: fx.Node) -> fx.Node:
    """With a probability of one number, or one for each element."""
    given, sizes, wide = arguments(node), node.meta["sizes"], _wide(node)
    p = given.get("p", given["self"])
    if isinstance(p, fx.Node):
        wide = torch.promote_types(wide, p.meta["dtype"])
        below = build(aten.lt.Tensor, _uniform(build, sizes, wide), build.cast(p, wide), sizes=sizes, dtype=torch.bool)
    else:
        below = build(aten.lt.Scalar, _uniform(build, sizes, wide), p, sizes=sizes, dtype=torch.bool)
    return build.cast(below, node.meta["dtype"])


def _exponential(build: Builder, node: fx.Node) -> fx.Node:
    """`-log(1 - u) / lambd`. It is never 0, as torch's is not, since its logarithm may be taken."""
    sizes, wide, dtype = node.meta["sizes"], _wide(node), node.meta["dtype"]
    about = dict(sizes=sizes, dtype=wide)
    least = max(torch.finfo(wide).eps / 4, torch.finfo(dtype).smallest_normal)
    x = build(aten.neg.default, _log_of_rest(build, sizes, wide), **about)
    x = build(aten.clamp_min.default, x, least, **about)
    return build.cast(_scaled(build, x, 1 / arguments(node)["lambd"], 0), dtype)


def _log_of_rest(build: Builder, sizes: tuple[Any, ...], dtype: torch.dtype) -> fx.Node:
    """`log(1 - u)`, which is finite, as `u` is below 1."""
    negative = build(aten.neg.default, _uniform(build, sizes, dtype), sizes=sizes, dtype=dtype)
    return build(aten.log1p.default, negative, sizes=sizes, dtype=dtype)


def _normal(build: Builder, node: fx.Node) -> fx.Node:
    """`sqrt(-2 log(1 - u)) · cos(2π v)`, by Box and Muller, of two uniform numbers."""
    given, sizes, wide = arguments(node), node.meta["sizes"], _wide(node)
    about = dict(sizes=sizes, dtype=wide)
    length = build(aten.sqrt.default, _scaled(build, _log_of_rest(build, sizes, wide), -2.0, 0), **about)
    angle = build(aten.cos.default, _scaled(build, _uniform(build, sizes, wide), 2 * math.pi, 0), **about)
    x = build(aten.mul.Tensor, length, angle, **about)
    std, mean = (_without_gradient(build, given.get(name, default)) for name, default in (("std", 1), ("mean", 0)))
    return build.cast(_scaled(build, x, std, mean), node.meta["dtype"])


def _without_gradient(build: Builder, x: Any) -> Any:
    """What `torch.normal` takes has a gradient of zeros there."""
    if not isinstance(x, fx.Node):
        return x
    return build(aten.detach.default, x, sizes=x.meta["sizes"], dtype=x.meta["dtype"])


LOWERINGS: dict[Any, Callable[[Builder, fx.Node], fx.Node]] = {
    aten.rand.default: _plain,
    aten.rand_like.default: _plain,
    aten.uniform.default: _between,
    aten.bernoulli.default: _happens,
    aten.bernoulli.p: _happens,
    aten.bernoulli.Tensor: _happens,
    aten.exponential.default: _exponential,
    **dict.fromkeys((aten.randn.default, aten.randn_like.default, aten.normal_functional.default), _normal),
    **dict.fromkeys((aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor), _normal),
}
