"""How many elements lie in each bin, on every device."""

from __future__ import annotations

import torch
from torch import Tensor


def histogram(x: Tensor, bins: int, low: float, high: float) -> Tensor:
    """The number of elements of `x` in each of `bins` equal parts of [low, high], `[bins]`, in the dtype of `x`.

    An element equal to `high` is in the last bin, one outside is in none. `torch.histc` takes no integers on CPU, and
    on CUDA no floats where algorithms must be deterministic.
    """
    return torch.histc(x if x.is_cuda else x.double(), bins, low, high).to(x.dtype)
