"""Keys and values in one row of numbers, to be sent together."""

from __future__ import annotations

import torch
from torch import Tensor

Two = tuple[Tensor, Tensor]
ALONG = 64
"""Numbers, so that what follows stays aligned."""


def pack(k: Tensor, v: Tensor, gradient: Tensor | None = None) -> Tensor:
    """One row; in a backward some of the gradient goes along.

    Without it, what is sent would be known in the forward: a compiler that sees both may send it there, and keep what
    came. torch 2.13 does.
    """
    along = [] if gradient is None else [gradient.flatten()[:ALONG].to(k.dtype)]
    return torch.cat([k.flatten(), v.flatten(), *along])


def unpack(row: Tensor, k: Tensor, v: Tensor) -> Two:
    """Views of rows `[…, n]` in the shapes `[…, *k.shape]` and `[…, *v.shape]`."""
    ends = k.numel(), k.numel() + v.numel()
    return row[..., : ends[0]].unflatten(-1, k.shape), row[..., ends[0] : ends[1]].unflatten(-1, v.shape)
