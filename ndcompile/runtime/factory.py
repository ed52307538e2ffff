"""Tensors that are made of numbers: a range, of which each rank may make its part, and values that are written out."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ndcompile.runtime.mesh import Ranks


def arange(
    start: int | float,
    end: int | float,
    step: int | float = 1,
    axis: Ranks | None = None,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """This rank's part of `torch.arange(start, end, step)`, without communication."""
    if axis is None or axis.size == 1:
        return torch.arange(start, end, step, device=device, dtype=dtype)
    size = max(0, math.ceil((end - start) / step))
    first, length = axis.start(size), axis.part(size)
    if all(isinstance(number, int) for number in (start, end, step)):
        index = torch.arange(first, first + length, device=device)
        return (start + index * step).to(dtype or torch.int64)
    index = torch.arange(first, first + length, device=device, dtype=torch.float64)
    return (start + index * step).to(dtype or torch.get_default_dtype())


def literal(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of values that the program's text holds: numbers, or tuples of them."""
    return torch.tensor(values, dtype=dtype, device=device)
