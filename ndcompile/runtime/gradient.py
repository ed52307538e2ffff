"""Changes of a gradient on its way back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def with_gradient_of(x: Tensor, y: Tensor) -> Tensor:
    """`x` itself forward, of the shape of `y`; its gradient goes to `y` alone."""
    return _WithGradientOf.apply(x, y)


class _WithGradientOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient


@torch.compiler.disable
def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """`x` itself forward; its gradient times `factor` backward. It stands at results, outside of what is compiled."""
    return _ScaleGradient.apply(x, factor)


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None
