"""Cross entropy of logits whose classes may be sharded: never gathered, and no communication backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ndcompile.runtime import private
from ndcompile.runtime.collectives import all_reduce
from ndcompile.runtime.mesh import Ranks

CROSS_ENTROPY_COLLECTIVES = (("all_reduce", "max", 1), ("all_reduce", "sum", 2))
"""What `cross_entropy` sends forward where the classes are sharded: kind, op, values a token."""

SMOOTHED_CROSS_ENTROPY_COLLECTIVES = (("all_reduce", "max", 1), ("all_reduce", "sum", 3))
"""The same with label smoothing, which needs the sum of all logits too."""


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    axis: Ranks | None = None,
    size: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """The loss of each token, `[N]`, from logits `[N, classes]` and target classes `[N]`; 0 where it is `ignore_index`.

    With `axis`, logits are this rank's part of `size` classes (default: equal parts), S(1) → I on that axis; targets
    count in all classes. A target that is no class raises an error on CPU; on CUDA it fails when the kernel runs.
    """
    axis = Ranks("", 1, 0, "") if axis is None else axis
    columns = logits.shape[1]
    size = columns * axis.size if size is None else size
    if columns == 0:  # an uneven number of classes may leave this rank none, and a maximum needs one
        logits = F.pad(logits, (0, 1), value=-torch.inf)
    return _CrossEntropy.apply(
        logits, target, axis.group, axis.size, axis.index, columns, size, ignore_index, label_smoothing
    )


class _CrossEntropy(torch.autograd.Function):
    """Saves the logits, their maximum and the logarithm of the sum of exponentials relative to it."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        group: str,
        ranks: int,
        index: int,
        columns: int,
        size: int,
        ignore_index: int,
        smoothing: float,
    ) -> Tensor:
        axis = Ranks(group, ranks, index, group)
        x = _wide(logits)
        largest = all_reduce(x.amax(1), axis, "max")
        shifted = x - largest.unsqueeze(1)
        here, mine = _local(target, axis.start(size), columns, size, logits.shape[1], ignore_index)
        picked = shifted.gather(1, here.unsqueeze(1)).squeeze(1).masked_fill(~mine, 0)
        sums = [shifted.exp().sum(1), picked] + ([shifted[:, :columns].sum(1)] if smoothing else [])
        total, picked, *every = all_reduce(torch.stack(sums), axis).unbind(0)
        log_total = total.log()
        loss = log_total - picked
        if smoothing:
            loss = (1 - smoothing) * loss + smoothing * (log_total - every[0] / size)
        ctx.save_for_backward(logits, target, largest, log_total)
        ctx.place = (axis.start(size), columns, size, ignore_index, smoothing)
        return private.cast(loss.masked_fill(target == ignore_index, 0), logits.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        logits, target, largest, log_total = ctx.saved_tensors
        start, columns, size, ignore_index, smoothing = ctx.place
        x = _wide(logits)
        slope = (x - largest.unsqueeze(1) - log_total.unsqueeze(1)).exp()
        if smoothing:
            slope = slope - smoothing / size
        here, mine = _local(target, start, columns, size, logits.shape[1], ignore_index)
        column = torch.arange(x.shape[1], device=x.device)
        meant = (column == here.unsqueeze(1)) & mine.unsqueeze(1)
        slope.add_(meant, alpha=smoothing - 1)  # compiled, all of this has no memory of its own
        gradient = private.cast(gradient, x.dtype).masked_fill(target == ignore_index, 0)
        slope = slope * gradient.unsqueeze(1)
        return private.cast(slope, logits.dtype), *(None,) * 8


def _wide(x: Tensor) -> Tensor:
    """Half precisions are computed in float32, as torch does."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _local(target: Tensor, start: int, columns: int, size: int, held: int, ignore_index: int) -> tuple[Tensor, Tensor]:
    """This rank's column of each target (0 where it has none, out of range where no rank has), and where it has one."""
    counted = target != ignore_index
    mine = counted & (target >= start) & (target < start + columns)
    known = ~counted | ((target >= 0) & (target < size))
    return torch.where(mine, target - start, torch.where(known, 0, held)), mine
