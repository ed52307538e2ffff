"""Group norm and pools in a prime field, forward and backward; `field_ops` has the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ndcompile.verify.field_ops import _add, _layer_norm, _layer_norm_backward, _mul, _sum

if TYPE_CHECKING:
    from ndcompile.verify.field import Field


def _group_norm(
    d: Field, x: Tensor, weight: Any, bias: Any, samples: int, channels: int, places: int, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`[n, c, …]`: each group of channels is normed as a layer, then each channel has its weight."""
    rows = x.reshape(samples, groups, -1)
    y, mean, rstd = _layer_norm(d, rows, rows.shape[2:], None, None, eps)
    y = y.reshape(x.shape)
    y = y if weight is None else _mul(d, y, _by_channel(weight, x))
    y = y if bias is None else _add(d, y, _by_channel(bias, x))
    return y, mean.squeeze(2), rstd.squeeze(2)


def _group_norm_backward(
    d: Field, gradient: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Any, samples: int, channels: int,
    places: int, groups: int, mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    rows, mean, rstd = x.reshape(samples, groups, -1), mean.unsqueeze(2), rstd.unsqueeze(2)
    inner = gradient if weight is None else _mul(d, gradient, _by_channel(weight, x))
    back, *_ = _layer_norm_backward(
        d, inner.reshape(rows.shape), rows, rows.shape[2:], mean, rstd, None, None, (True, False, False)
    )
    assert back is not None, "it was asked for"
    normed = _mul(d, _add(d, rows, d.mod(-mean)), rstd).reshape(x.shape)
    others = [i for i in range(x.dim()) if i != 1]
    found = (back.reshape(x.shape), _sum(d, _mul(d, gradient, normed), others), _sum(d, gradient, others))
    return tuple(g if wanted else None for g, wanted in zip(found, mask, strict=True))


def _by_channel(x: Tensor, like: Tensor) -> Tensor:
    return x.view(-1, *[1] * (like.dim() - 2))


def _max_pool(dims: int) -> Callable[..., tuple[Tensor, Tensor]]:
    pool = getattr(torch.ops.aten, f"max_pool{dims}d_with_indices")

    def run(d: Field, x: Tensor, *window: Any, **named: Any) -> tuple[Tensor, Tensor]:
        """The largest by the random order, of which the places in a plane come with it."""
        _, index = pool(d.order(x), *window, **named)
        return x.flatten(-dims).gather(-1, index.flatten(-dims)).view(index.shape), index

    return run


def _max_pool_backward(dims: int) -> Callable[..., Tensor]:
    def run(d: Field, gradient: Tensor, x: Tensor, *window: Any) -> Tensor:
        index = window[-1].flatten(-dims)
        found = torch.zeros_like(x).flatten(-dims).scatter_add_(-1, index, gradient.flatten(-dims))
        return d.mod(found.view(x.shape))

    return run


def _average_pool(d: Field, x: Tensor, *window: Any) -> Tensor:
    return _mul(d, torch.ops.aten.avg_pool2d(x, *_summing(window)), _shares(d, x, window))


def _average_pool_backward(d: Field, gradient: Tensor, x: Tensor, *window: Any) -> Tensor:
    each = _mul(d, gradient, _shares(d, x, window))
    return d.mod(torch.ops.aten.avg_pool2d_backward(each, x, *_summing(window)))


DEFAULTS: tuple[Any, ...] = ([], [0, 0], False, True, None)
"""Of an average pool's stride, padding, ceil_mode, count_include_pad and divisor_override."""


def _summing(window: Sequence[Any]) -> tuple[Any, ...]:
    """An average pool's window, for the sum of what it holds: divided by one."""
    whole = (*window, *DEFAULTS[len(window) - 1 :])
    return (*whole[:5], 1)


def _shares(d: Field, x: Tensor, window: Sequence[Any]) -> Tensor:
    """One over what each sum is divided by, which at the border may be less."""
    ones = torch.ones_like(x)
    held, mean = torch.ops.aten.avg_pool2d(ones, *_summing(window)), torch.ops.aten.avg_pool2d(ones, *window)
    return d.inverse((held / mean).round())


LAYERS: dict[str, Callable[..., Any]] = {
    "native_group_norm": _group_norm,
    "native_group_norm_backward": _group_norm_backward,
    "avg_pool2d": _average_pool,
    "avg_pool2d_backward": _average_pool_backward,
    **{f"max_pool{n}d_with_indices": _max_pool(n) for n in (2, 3)},
    **{f"max_pool{n}d_with_indices_backward": _max_pool_backward(n) for n in (2, 3)},
}
