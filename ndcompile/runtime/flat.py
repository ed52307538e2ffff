"""Many tensors in one flat one, so that one collective moves them all."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ndcompile.runtime.mesh import Ranks

ALIGNMENT = 128
"""Bytes at whose multiples whole weights begin, so that kernels may load them in vectors."""


@dataclass(frozen=True)
class Part:
    """A tensor of `shape` of which each rank of an axis holds a part along `dim`, as torch.chunk makes them."""

    shape: tuple[int, ...]
    dim: int

    def step(self, axis: Ranks) -> int:
        return -(-self.shape[self.dim] // axis.size)

    def padded(self, axis: Ranks) -> tuple[int, ...]:
        """The shape of the longest part, to which all are padded."""
        return (*self.shape[: self.dim], self.step(axis), *self.shape[self.dim + 1 :])

    def held(self, axis: Ranks) -> tuple[int, ...]:
        """The shape of this rank's part."""
        return (*self.shape[: self.dim], axis.part(self.shape[self.dim]), *self.shape[self.dim + 1 :])

    def even(self, axis: Ranks) -> bool:
        return self.shape[self.dim] % axis.size == 0


def offsets(lengths: Sequence[int]) -> list[int]:
    """Where each of several stretches begins, and where the last one ends."""
    return [0, *itertools.accumulate(lengths)]


def aligned_offsets(shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> list[int]:
    """Where whole tensors begin in one flat buffer of `dtype`, in elements, and its length."""
    unit = max(1, ALIGNMENT // dtype.itemsize)
    return offsets([-(-math.prod(shape) // unit) * unit for shape in shapes])


def join(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The tensors one after another, cast: `[total]`."""
    flat = tensors[0].new_empty(sum(x.numel() for x in tensors), dtype=dtype)
    for piece, x in zip(flat.split([x.numel() for x in tensors]), tensors, strict=True):
        piece.view(x.shape).copy_(x)
    return flat


def split(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """The inverse of `join`: views of these shapes."""
    lengths = [math.prod(shape) for shape in shapes]
    return [piece.view(tuple(shape)) for piece, shape in zip(flat.split(lengths), shapes, strict=True)]


def join_parts(held: Sequence[Tensor], parts: Sequence[Part], axis: Ranks, dtype: torch.dtype) -> Tensor:
    """This rank's parts, padded, cast: what it gives to an all-gather, `[total]`."""
    shapes = [part.padded(axis) for part in parts]
    flat = held[0].new_empty(sum(math.prod(shape) for shape in shapes), dtype=dtype)
    for piece, x, part in zip(split(flat, shapes), held, parts, strict=True):
        length = x.shape[part.dim]
        piece.narrow(part.dim, 0, length).copy_(x)
        piece.narrow(part.dim, length, piece.shape[part.dim] - length).zero_()
    return flat


def split_gathered(flat: Tensor, parts: Sequence[Part], axis: Ranks, wholes: Sequence[Tensor]) -> None:
    """Copy what an all-gather brought, `[ranks · total]`, into the whole tensors."""
    for block, part, whole in zip(_blocks(flat, parts, axis), parts, wholes, strict=True):
        if part.even(axis):
            _by_rank(whole, part, axis).copy_(block)
        else:
            joined = block.movedim(0, part.dim).flatten(part.dim, part.dim + 1)
            whole.copy_(joined.narrow(part.dim, 0, part.shape[part.dim]))


def join_wholes(wholes: Sequence[Tensor], parts: Sequence[Part], axis: Ranks, dtype: torch.dtype) -> Tensor:
    """Whole tensors, cut for each rank, padded, cast: what goes into a reduce-scatter, `[ranks · total]`."""
    total = sum(math.prod(part.padded(axis)) for part in parts)
    flat = wholes[0].new_empty(axis.size * total, dtype=dtype)
    for block, part, whole in zip(_blocks(flat, parts, axis), parts, wholes, strict=True):
        if not part.even(axis):
            missing = axis.size * part.step(axis) - part.shape[part.dim]
            whole = F.pad(whole, (0, 0) * (whole.dim() - 1 - part.dim) + (0, missing))
        block.copy_(_by_rank(whole, part, axis))
    return flat


def split_scattered(flat: Tensor, parts: Sequence[Part], axis: Ranks) -> list[Tensor]:
    """This rank's parts of what a reduce-scatter left it, `[total]`: views."""
    pieces = split(flat, [part.padded(axis) for part in parts])
    return [x.narrow(p.dim, 0, axis.part(p.shape[p.dim])) for x, p in zip(pieces, parts, strict=True)]


def _blocks(flat: Tensor, parts: Sequence[Part], axis: Ranks) -> list[Tensor]:
    """Views `[ranks, *padded part]` of a flat tensor that holds all parts of rank 0, then all of rank 1, …"""
    shapes = [part.padded(axis) for part in parts]
    columns = flat.view(axis.size, -1).split([math.prod(shape) for shape in shapes], 1)
    return [column.unflatten(1, shape) for column, shape in zip(columns, shapes, strict=True)]


def _by_rank(whole: Tensor, part: Part, axis: Ranks) -> Tensor:
    """`[…, ranks · n, …]` seen as `[ranks, …, n, …]`."""
    return whole.unflatten(part.dim, (axis.size, whole.shape[part.dim] // axis.size)).movedim(part.dim, 0)
