"""Numbers in the widest dtype of their kind."""

from __future__ import annotations

import torch
from torch import Tensor


def precise(x: Tensor) -> Tensor:
    """As float64, or complex128."""
    return x.to(torch.complex128 if x.is_complex() else torch.float64)
