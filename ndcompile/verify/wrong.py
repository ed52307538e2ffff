"""Conversions done wrongly, each in one way: what mutants of an emitted text call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ndcompile import runtime
from ndcompile.runtime import Ranks, private, shard
from ndcompile.runtime.halves import Started


def next_rank(axis: Ranks) -> Ranks:
    """The axis as the next rank sees it: offsets are another rank's."""
    return replace(axis, index=(axis.index + 1) % axis.size)


def first_rank(axis: Ranks) -> Ranks:
    """The axis as its first rank sees it: every offset is zero."""
    return replace(axis, index=0)


def gather_own(x: Tensor, axis: Ranks, dim: int, *, size: int | None = None, dtype: Any = None) -> Tensor:
    """Own shard in every place."""
    whole = torch.cat([x] * axis.size, dim)
    return whole if size is None else whole.narrow(dim, 0, size)


def turned(x: Tensor, axis: Ranks, dim: int) -> Tensor:
    """A whole dim with the ranks' parts in another order."""
    parts = list(x.split(-(-x.shape[dim] // axis.size), dim))
    return torch.cat([*parts[1:], parts[0]], dim)


def shard_of_sum_of_one(x: Tensor, axis: Ranks, dim: int, *, size: int | None = None, dtype: Any = None) -> Tensor:
    """A reduce-scatter that does not reduce."""
    return shard(x, axis, dim=dim, size=size)


def unwaited(x: Tensor, axis: Ranks) -> Tensor:
    """A sum over ranks that is used before it has come."""
    return _Changed.apply(x, lambda y: private.start_all_reduce(y.contiguous(), "sum", axis.group), lambda g: g)


def late(x: Tensor, axis: Ranks) -> Tensor:
    """A sum over ranks that is read before it has come, and waited for after that."""

    def forward(y: Tensor) -> Tensor:
        started = private.start_all_reduce(y.contiguous(), "sum", axis.group)
        read = started.clone()
        private.wait(started)
        return read

    return _Changed.apply(x, forward, lambda g: g)


def unwaited_half(conversion: Callable[..., Tensor], x: Tensor, axis: Ranks, **options: Any) -> Any:
    """What one half started and read before it had come."""
    begun = runtime.start(conversion, x, axis, **options)
    return replace(begun, raw=begun.raw.clone()) if isinstance(begun, Started) else begun


def first_half_twice(results: tuple[int | None, ...], /, **cut: int) -> Callable[..., Any]:
    """A block that computes the first half of its batch twice."""

    def decorated(steps: Callable[..., Any]) -> Callable[..., Any]:
        dims = [cut.get(name) for name in inspect.signature(steps).parameters]
        compute = runtime.in_halves(results, **cut)(steps)

        def wrong(*values: Any) -> Any:
            twice = [
                v if d is None else torch.cat([v.chunk(2, d)[0]] * 2, d) for v, d in zip(values, dims, strict=True)
            ]
            return compute(*twice)

        return wrong

    return decorated


def other_order(weights: dict[str, Any], here: bool) -> dict[str, Any]:
    """A bucket's weights, or those of each of several, from the last to the first, on the ranks where this is so."""
    if not here:
        return weights
    if any(isinstance(bucket, dict) for bucket in weights.values()):
        return {name: other_order(bucket, here) for name, bucket in weights.items()}
    return dict(reversed(weights.items()))


def unchanged_back(conversion: Callable[..., Tensor], x: Tensor, axis: Ranks, *args: Any, **options: Any) -> Tensor:
    """A conversion whose gradient passes as it is, or zero where its shape does not fit."""

    def forward(y: Tensor) -> Tensor:
        return conversion(y, axis, *args, **options)

    def backward(gradient: Tensor) -> Tensor:
        return gradient if gradient.shape == x.shape else torch.zeros_like(x)

    return _Changed.apply(x, forward, backward)


def double_back(x: Tensor, axis: Ranks) -> Tensor:
    """A gradient that is summed over the axis once more."""
    return _Changed.apply(x, lambda y: y.view_as(y), lambda g: _summed(g, axis))


def low(x: Tensor) -> Tensor:
    """Rounded to half precision and back."""
    return x.to(torch.bfloat16).to(x.dtype)


def _summed(x: Tensor, axis: Ranks) -> Tensor:
    return private.wait(private.start_all_reduce(x.contiguous(), "sum", axis.group))


class _Changed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Callable[..., Tensor], backward: Callable[..., Tensor]) -> Tensor:
        ctx.run = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.run(gradient), None, None


def recomputed(function: Callable[..., Any] | None = None, *, save: tuple[str, ...] = ()) -> Callable[..., Any]:
    """What backward recomputes, it recomputes from other values than forward had."""
    if function is None:
        return partial(recomputed, save=save)

    def compute(w: Any, *values: Tensor) -> Any:
        others = [2 * x if x.is_floating_point() else x for x in values]  # in forward too: the same ops both times
        return function(w, *(others if private.in_backward() else values))

    return runtime.recomputed(compute, save=save)
