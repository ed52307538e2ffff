"""What batch norm does with its statistics."""

from __future__ import annotations

import torch
from torch import Tensor


def batch_norm(centred: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """`centred` `[b, n, …]` over the root of `variance` `[1, n, 1, …]`, times `weight` `[n]`, plus `bias` `[n]`."""
    scale = torch.rsqrt(variance + eps)
    if weight is not None:
        scale = scale * weight.reshape(scale.shape)
    y = centred * scale
    return y if bias is None else y + bias.reshape(scale.shape)


def moving_average(old: Tensor, new: Tensor, momentum: float) -> Tensor:
    """`old` `[n]`, moved by a part `momentum` towards `new` `[1, n, 1, …]`; no gradient flows."""
    return old.lerp(new.detach().reshape(old.shape).to(old.dtype), momentum)
