"""A rank's part of a whole tensor, and the tensors that collectives take and give for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ndcompile.runtime import private
from ndcompile.runtime.mesh import Ranks

ALIGNMENT = 128
"""Bytes at whose multiples tensors begin in a common buffer, so that kernels may load them in vectors."""


@dataclass(frozen=True)
class Part:
    """A tensor of `shape` of which each rank of an axis holds a part along `dim`, as torch.chunk makes them."""

    shape: tuple[int, ...]
    dim: int

    def padded(self, axis: Ranks) -> tuple[int, ...]:
        """The shape of the longest part, to which all are padded."""
        return self._with(-(-self.shape[self.dim] // axis.size))

    def held(self, axis: Ranks) -> tuple[int, ...]:
        """The shape of this rank's part."""
        return self._with(axis.part(self.shape[self.dim]))

    def even(self, axis: Ranks) -> bool:
        return self.shape[self.dim] % axis.size == 0

    def straight(self, axis: Ranks) -> bool:
        """Whether the ranks' parts, one after another in memory, are the whole."""
        return self.even(axis) and self.dim == 0

    def _with(self, length: int) -> tuple[int, ...]:
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :])


def sent_to_gather(held: Tensor, part: Part, axis: Ranks) -> Tensor:
    """What this rank gives to an all-gather: its part, padded."""
    if part.even(axis):
        return held.contiguous()
    padded = held.new_zeros(part.padded(axis))
    padded.narrow(part.dim, 0, held.shape[part.dim]).copy_(held)
    return padded


def whole_of_gathered(got: Tensor, part: Part, axis: Ranks) -> Tensor:
    """The whole, of what an all-gather brought; where parts lie one after another it is the same memory."""
    if part.straight(axis):
        return got.view(part.shape)
    whole = got.new_empty(part.shape)
    private.copy_each(*_matched(whole, got.view(axis.size, *part.padded(axis)), part, axis))
    return whole


def sent_to_scatter(wholes: Sequence[Tensor], parts: Sequence[Part], axis: Ranks, dtype: torch.dtype) -> list[Tensor]:
    """What goes into a reduce-scatter for each whole: cut for each rank, padded, cast."""
    shapes = [(axis.size, *part.padded(axis)) for part in parts]
    ready = [part.straight(axis) and x.dtype == dtype for x, part in zip(wholes, parts, strict=True)]
    due = [shape for shape, is_ready in zip(shapes, ready, strict=True) if not is_ready]
    made = iter(buffer(due, dtype, wholes[0])[1] if due else [])
    sent: list[Tensor] = []
    pairs: list[tuple[Sequence[Tensor], Sequence[Tensor]]] = []
    for whole, part, is_ready in zip(wholes, parts, ready, strict=True):
        if is_ready:
            sent.append(whole.contiguous())
            continue
        sent.append(block := next(made))
        if not part.even(axis):
            block.zero_()
        pairs.append(_matched(whole, block, part, axis)[::-1])
    if pairs:
        private.copy_each([to for pair in pairs for to in pair[0]], [x for pair in pairs for x in pair[1]])
    return [x.view(-1, *x.shape[2:]) if not r else x for x, r in zip(sent, ready, strict=True)]


def part_of_scattered(got: Tensor, part: Part, axis: Ranks) -> Tensor:
    """This rank's part of what a reduce-scatter left it."""
    return got.view(part.padded(axis)).narrow(part.dim, 0, axis.part(part.shape[part.dim]))


def buffer(shapes: Sequence[Sequence[int]], dtype: torch.dtype, like: Tensor) -> tuple[Tensor, list[Tensor]]:
    """A new flat tensor on the device of `like`, and views of it of these shapes; what is in between is 0."""
    lengths = [math.prod(shape) for shape in shapes]
    unit = max(1, ALIGNMENT // dtype.itemsize)
    rooms = [-(-length // unit) * unit for length in lengths]
    flat, views = like.new_empty(sum(rooms), dtype=dtype), []
    for room, length, shape in zip(flat.split(rooms), lengths, shapes, strict=True):
        views.append(room[:length].view(tuple(shape)))
        if length < len(room):
            room[length:].zero_()
    return flat, views


def _matched(whole: Tensor, block: Tensor, part: Part, axis: Ranks) -> tuple[list[Tensor], list[Tensor]]:
    """Views of the whole and of `[ranks, *padded part]` that hold the same."""
    if part.even(axis):
        return [whole.unflatten(part.dim, (axis.size, -1)).movedim(part.dim, 0)], [block]
    lengths = axis.parts(part.shape[part.dim])
    return (
        list(whole.split(lengths, part.dim)),
        [block[rank].narrow(part.dim, 0, length) for rank, length in enumerate(lengths)],
    )
