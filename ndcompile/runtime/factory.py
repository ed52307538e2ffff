"""Tensors that are made of numbers: a range, of which each rank may make its part, and values that are written out."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ndcompile.runtime.mesh import Ranks
from ndcompile.runtime.sequence import positions


def arange(
    start: int | float,
    end: int | float,
    step: int | float = 1,
    axis: Ranks | None = None,
    *,
    balanced: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """This rank's part (head–tail if `balanced`) of `torch.arange(start, end, step)`, without communication."""
    if axis is None or axis.size == 1:
        return torch.arange(start, end, step, device=device, dtype=dtype)
    size = max(0, math.ceil((end - start) / step))
    index = positions(size, axis, balanced=balanced, device=device)
    if all(isinstance(number, int) for number in (start, end, step)):
        return (start + index * step).to(dtype or torch.int64)
    return (start + index.double() * step).to(dtype or torch.get_default_dtype())


def literal(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of values that the program's text holds: numbers, or tuples of them."""
    return torch.tensor(values, dtype=dtype, device=device)
