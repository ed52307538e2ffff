"""A rank's part of a whole tensor, and the tensors that collectives take and give for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ndcompile.runtime import private
from ndcompile.runtime.mesh import Mesh, Ranks

ALIGNMENT = 128
"""Bytes at whose multiples tensors begin in a common buffer, so that kernels may load them in vectors."""


def own_part(x: Tensor, dims: Sequence[Sequence[str]], mesh: Mesh) -> Tensor:
    """This rank's part of a whole tensor of which axes shard each dim, major first: a view."""
    for dim, axes in enumerate(dims):
        for axis in axes:
            ranks, size = mesh[axis], x.shape[dim]
            x = x.narrow(dim, ranks.start(size), ranks.part(size))
    return x


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

    def sent(self, axis: Ranks) -> tuple[int, ...]:
        """The shape of what a rank gives to a reduce-scatter: all padded parts, one after another."""
        first, *others = self.padded(axis)
        return (axis.size * first, *others)

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
    """The whole, of what an all-gather brought; where parts lie one after another, that is it."""
    if part.straight(axis):
        return got
    whole = got.new_empty(part.shape)
    private.copy_each(*_matched(whole, got.view(axis.size, *part.padded(axis)), part, axis))
    return whole


def sent_to_scatter(wholes: Sequence[Tensor], parts: Sequence[Part], axis: Ranks, dtype: torch.dtype) -> list[Tensor]:
    """What goes into a reduce-scatter for each whole: cut for each rank, padded, cast."""
    straight = [part.straight(axis) for part in parts]
    ready = [x.dtype == dtype and simple for x, simple in zip(wholes, straight, strict=True)]
    shapes = [part.sent(axis) for part, is_ready in zip(parts, ready, strict=True) if not is_ready]
    made = iter(buffer(shapes, dtype, wholes[0])[1] if shapes else [])
    sent = [x.contiguous() if is_ready else next(made) for x, is_ready in zip(wholes, ready, strict=True)]
    places, values = [], []
    for to, whole, part, is_ready, simple in zip(sent, wholes, parts, ready, straight, strict=True):
        if is_ready:
            continue
        if not part.even(axis):
            to.zero_()
        block = to.view(axis.size, *part.padded(axis)) if not simple else to
        found = ([whole], [to]) if simple else _matched(whole, block, part, axis)
        values += found[0]
        places += found[1]
    if places:
        private.copy_each(places, values)
    return sent


def part_of_scattered(got: Tensor, part: Part, axis: Ranks) -> Tensor:
    """This rank's part of what a reduce-scatter left it."""
    return got if part.even(axis) else got.narrow(part.dim, 0, axis.part(part.shape[part.dim]))


def buffer(
    shapes: Sequence[Sequence[int]], dtype: torch.dtype, like: Tensor, clean: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """A new flat tensor on the device of `like`, and views of it of these shapes; with `clean`, 0 is in between."""
    lengths, numbers, gaps = _rooms(tuple(map(tuple, shapes)), max(1, ALIGNMENT // dtype.itemsize))
    flat = like.new_empty(sum(lengths), dtype=dtype)
    rooms = flat.split(lengths)
    if clean:
        for gap in gaps:
            rooms[gap].zero_()
    return flat, [
        rooms[n].view(shape) if len(shape) != 1 else rooms[n] for n, shape in zip(numbers, shapes, strict=True)
    ]


@cache
def _rooms(shapes: tuple[tuple[int, ...], ...], unit: int) -> tuple[list[int], list[int], list[int]]:
    """How long what stands in a buffer is, and which of it are the tensors, and which the gaps behind them."""
    lengths: list[int] = []
    numbers, gaps = [], []
    for length in map(math.prod, shapes):
        numbers.append(len(lengths))
        lengths.append(length)
        if rest := -length % unit:
            gaps.append(len(lengths))
            lengths.append(rest)
    return lengths, numbers, gaps


def _matched(whole: Tensor, block: Tensor, part: Part, axis: Ranks) -> tuple[list[Tensor], list[Tensor]]:
    """Views of the whole and of `[ranks, *padded part]` that hold the same."""
    if part.even(axis):
        return [whole.unflatten(part.dim, (axis.size, -1)).movedim(part.dim, 0)], [block]
    lengths = axis.parts(part.shape[part.dim])
    return (
        list(whole.split(lengths, part.dim)),
        [block[rank].narrow(part.dim, 0, length) for rank, length in enumerate(lengths)],
    )
