"""What looks along a sequence that ranks share: windows need what stands beside a chunk, running sums what came before.

A rank's chunks are neighbours of chunks of other ranks. What they need of each other is small, and gathered by all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ndcompile.runtime.collectives import all_gather
from ndcompile.runtime.mesh import Ranks
from ndcompile.runtime.sequence import held


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    left: int = 0,
    dilation: int = 1,
    groups: int = 1,
    *,
    axis: Ranks | None = None,
    balanced: bool = True,
) -> Tensor:
    """A convolution of stride 1 that keeps the length: `[n, c, s], [o, c/groups, k] → [n, o, s]`.

    `left` zeros stand before the whole sequence, as many as are missing behind it. Over an axis, x is this rank's part
    of the sequence, head–tail or in one part (`balanced=False`), and so is the result.
    """
    right = dilation * (weight.shape[2] - 1) - left
    if axis is None or axis.size == 1:
        return F.conv1d(F.pad(x, (left, right)), weight, bias, dilation=dilation, groups=groups)
    chunks = bordered(x, 2, axis, left, right, balanced)
    return torch.cat([F.conv1d(chunk, weight, bias, dilation=dilation, groups=groups) for chunk in chunks], 2)


def running_sum(x: Tensor, dim: int, *, axis: Ranks | None = None, balanced: bool = True) -> Tensor:
    """`cumsum` along a dim, of which each rank has its part; the sums of all chunks are gathered."""
    if axis is None or axis.size == 1:
        return x.cumsum(dim)
    own = _chunks(x, dim, balanced)
    totals = _everyones([chunk.sum(dim, keepdim=True) for chunk in own], dim, axis, balanced)
    found = []
    for number, chunk in zip(_numbers(axis, balanced), own, strict=True):
        before = torch.cat([totals[0].narrow(dim, 0, 0), *totals[:number]], dim).sum(dim, keepdim=True)
        found.append(before + chunk.cumsum(dim))
    return torch.cat(found, dim)


def bordered(x: Tensor, dim: int, axis: Ranks, before: int, after: int, balanced: bool) -> list[Tensor]:
    """This rank's chunks, each with as many entries `before` and `after` as stand there in the whole, or zeros."""
    own = _chunks(x, dim, balanced)
    step = own[0].shape[dim]
    last, first = min(before, step), min(after, step)
    ends = [_joined([c.narrow(dim, step - last, last), c.narrow(dim, 0, first)], dim) for c in own]
    everyones = _everyones(ends, dim, axis, balanced)
    tails = [end.narrow(dim, 0, last) for end in everyones]
    heads = [end.narrow(dim, last, first) for end in everyones]
    found = []
    for number, chunk in zip(_numbers(axis, balanced), own, strict=True):
        earlier = _joined([_zeros(x, dim, before), *tails[:number]], dim)
        later = _joined([*heads[number + 1 :], _zeros(x, dim, after)], dim)
        nearest = earlier.narrow(dim, earlier.shape[dim] - before, before)
        found.append(_joined([tails[0].narrow(dim, 0, 0), nearest, chunk, later.narrow(dim, 0, after)], dim))
    return found


def _everyones(own: Sequence[Tensor], dim: int, axis: Ranks, balanced: bool) -> list[Tensor]:
    """A tensor for each chunk of the whole, in order; all ranks use some, and so come to the sum of their gradient."""
    size = own[0].shape[dim]
    gathered = all_gather(_joined(own, dim), axis, dim)
    order = held(axis.size) if balanced else list(range(axis.size))
    return [gathered.narrow(dim, order.index(chunk) * size, size) for chunk in range(len(order))]


def _chunks(x: Tensor, dim: int, balanced: bool) -> list[Tensor]:
    return list(x.chunk(2, dim)) if balanced else [x]


def _numbers(axis: Ranks, balanced: bool) -> list[int]:
    """Which chunks of the whole this rank has."""
    return held(axis.size)[2 * axis.index :][:2] if balanced else [axis.index]


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return torch.cat(list(parts), dim)


def _zeros(x: Tensor, dim: int, length: int) -> Tensor:
    return x.new_zeros((*x.shape[:dim], length, *x.shape[dim + 1 :]))
