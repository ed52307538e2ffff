"""How weights and their gradients travel between ranks: what a bucket needs of it, and the way by collectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ndcompile.runtime import private
from ndcompile.runtime.parts import buffer, part_of_scattered, sent_to_gather, sent_to_scatter, whole_of_gathered

if TYPE_CHECKING:
    from ndcompile.runtime.way import Way

Dtype = torch.dtype | None


class Carrier(Protocol):
    """What carries one bucket's weights, and their gradients, by the weight's number. It is called on the lane."""

    def gather(self, held: Sequence[Tensor], versions: tuple[int, ...]) -> list[Tensor]:
        """The whole weights in the dtypes of compute, of this rank's parts as they are at `versions`."""

    def scatter(self, gradients: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Of a sharded weight this rank's part of the gradients' sum; the gradients of others as they are."""

    def sum(self, gradients: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """The gradients summed over the axes of `reduce`."""


class Transport(Protocol):
    """Makes the carriers of a program: all of them, then `open`, and then they may carry."""

    def carrier(self, ways: Sequence[Way], dtypes: Sequence[torch.dtype], reduce: Dtype) -> Carrier:
        """Of weights that compute in `dtypes`; their gradients are summed in `reduce` (None: as they are)."""

    def open(self, device: torch.device) -> None:
        """Take the memory that the carriers need. All ranks of the world call it alike."""

    def record(self) -> None:
        """A step begins that is recorded, and will be done again and again. Called on the lane, in its recording."""


class Collectives:
    """torch.distributed's collectives: NCCL's kernels on GPUs."""

    def carrier(self, ways: Sequence[Way], dtypes: Sequence[torch.dtype], reduce: Dtype) -> Carrier:
        return Collected(ways, dtypes, reduce)

    def open(self, device: torch.device) -> None:
        """They take what they need as they go."""

    def record(self) -> None:
        """They are recorded as they are."""


class Collected:
    """Weights are cast, and then gathered axis by axis, those of one axis by one call; gradients the other way."""

    def __init__(self, ways: Sequence[Way], dtypes: Sequence[torch.dtype], reduce: Dtype) -> None:
        self._ways, self._dtypes, self._reduce = ways, dtypes, reduce
        self._moving = [bool(way.stages) for way in ways]
        self._axes = list(dict.fromkeys(axis for way in ways for axis in way.stages))
        """To gather, major first."""
        self._due = {axis: [i for i, way in enumerate(ways) if axis in way.stages] for axis in self._axes}
        self._together = [(axis, due) for axis in self._axes[::-1] for due in _by_dtype(dtypes, self._due[axis])]

    def gather(self, held: Sequence[Tensor], versions: tuple[int, ...]) -> list[Tensor]:
        now = cast(held, self._dtypes, self._moving)
        for axis, due in self._together:
            parts = [self._ways[i].stages[axis] for i in due]
            sent = [sent_to_gather(now[i], part, axis) for i, part in zip(due, parts, strict=True)]
            got = private.wait_each(private.start_all_gather_each(sent, axis.size, axis.group))
            for i, x, part in zip(due, got, parts, strict=True):
                now[i] = whole_of_gathered(x, part, axis)
        return now

    def scatter(self, gradients: Mapping[int, Tensor]) -> dict[int, Tensor]:
        now = dict(gradients)
        for axis in self._axes:
            for due in _by_dtype({i: x.dtype for i, x in now.items()}, [i for i in self._due[axis] if i in now]):
                parts = [self._ways[i].stages[axis] for i in due]
                sent = sent_to_scatter([now[i] for i in due], parts, axis, self._reduce or now[due[0]].dtype)
                got = private.wait_each(private.start_reduce_scatter_each(sent, axis.size, axis.group))
                for i, x, part in zip(due, got, parts, strict=True):
                    now[i] = part_of_scattered(x, part, axis)
        return now

    def sum(self, gradients: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Those of one axis in one buffer."""
        now, ways = dict(gradients), self._ways
        for same in _by_dtype({i: x.dtype for i, x in gradients.items()}, list(gradients)):
            within: list[int] = []
            for axis in dict.fromkeys(axis for i in same for axis in ways[i].reduce):
                due = [i for i in same if axis in ways[i].reduce]
                if due != within:
                    dtype = self._reduce or now[due[0]].dtype
                    flat, made = buffer([now[i].shape for i in due], dtype, now[due[0]], clean=True)
                    private.copy_each(made, [now[i] for i in due])
                    now, within = now | dict(zip(due, made, strict=True)), due
                private.all_reduce_in_place(flat, axis.group)
        return now


def cast(held: Sequence[Tensor], dtypes: Sequence[torch.dtype], moving: Sequence[bool]) -> list[Tensor]:
    """In the dtypes of compute: those that move, which are soon free, in other memory than those that stay."""
    kinds: dict[tuple[torch.dtype, bool], list[int]] = {}
    for i, (x, dtype, moves) in enumerate(zip(held, dtypes, moving, strict=True)):
        if x.dtype != dtype:
            kinds.setdefault((dtype, moves), []).append(i)
    found = list(held)
    for (dtype, _), due in kinds.items():
        _, made = buffer([held[i].shape for i in due], dtype, held[due[0]])
        private.copy_each(made, [held[i] for i in due])
        for i, x in zip(due, made, strict=True):
            found[i] = x
    return found


def _by_dtype(dtypes: Mapping[int, torch.dtype] | Sequence[torch.dtype], which: Sequence[int]) -> list[list[int]]:
    groups: dict[torch.dtype, list[int]] = {}
    for i in which:
        groups.setdefault(dtypes[i], []).append(i)
    return list(groups.values())
