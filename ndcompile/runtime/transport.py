"""How weights and their gradients travel between ranks: what a bucket needs of it, and the way by collectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ndcompile.runtime import private
from ndcompile.runtime.mesh import Ranks
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

    def gather(self, held: Sequence[Tensor], versions: tuple[int, ...]) -> list[Tensor]:
        now = cast(held, self._dtypes, [bool(way.stages) for way in self._ways])
        for axis in self._axes()[::-1]:
            for due in _by_dtype(now, [i for i, way in enumerate(self._ways) if axis in way.stages]):
                parts = [self._ways[i].stages[axis] for i in due]
                sent = [sent_to_gather(now[i], part, axis) for i, part in zip(due, parts, strict=True)]
                got = private.wait_each(private.start_all_gather_each(sent, axis.size, axis.group))
                for i, x, part in zip(due, got, parts, strict=True):
                    now[i] = whole_of_gathered(x, part, axis)
        return now

    def scatter(self, gradients: Mapping[int, Tensor]) -> dict[int, Tensor]:
        now = dict(gradients)
        for axis in self._axes():
            for due in _by_dtype(now, [i for i in now if axis in self._ways[i].stages]):
                parts = [self._ways[i].stages[axis] for i in due]
                sent = sent_to_scatter([now[i] for i in due], parts, axis, self._reduce or now[due[0]].dtype)
                got = private.wait_each(private.start_reduce_scatter_each(sent, axis.size, axis.group))
                for i, x, part in zip(due, got, parts, strict=True):
                    now[i] = part_of_scattered(x, part, axis)
        return now

    def sum(self, gradients: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Those of one axis in one buffer."""
        now, ways = dict(gradients), self._ways
        for same in _by_dtype(gradients, list(gradients)):
            within: list[int] = []
            for axis in dict.fromkeys(axis for i in same for axis in ways[i].reduce):
                due = [i for i in same if axis in ways[i].reduce]
                if due != within:
                    flat, made = buffer([now[i].shape for i in due], self._reduce or now[due[0]].dtype, now[due[0]])
                    private.copy_each(made, [now[i] for i in due])
                    now, within = now | dict(zip(due, made, strict=True)), due
                private.all_reduce_in_place(flat, axis.group)
        return now

    def _axes(self) -> list[Ranks]:
        """The axes to gather, major first."""
        return list(dict.fromkeys(axis for way in self._ways for axis in way.stages))


def cast(held: Sequence[Tensor], dtypes: Sequence[torch.dtype], moving: Sequence[bool]) -> list[Tensor]:
    """In the dtypes of compute: those that move, which are soon free, in other memory than those that stay."""
    found = list(held)
    for kind in set(zip(dtypes, moving, strict=True)):
        due = [i for i, now in enumerate(zip(dtypes, moving, strict=True)) if now == kind and held[i].dtype != kind[0]]
        if due:
            _, made = buffer([held[i].shape for i in due], kind[0], held[due[0]])
            private.copy_each(made, [held[i] for i in due])
            for i, x in zip(due, made, strict=True):
                found[i] = x
    return found


def _by_dtype(tensors: Mapping[int, Tensor] | Sequence[Tensor], which: Sequence[int]) -> list[list[int]]:
    groups: dict[torch.dtype, list[int]] = {}
    for i in which:
        groups.setdefault(tensors[i].dtype, []).append(i)
    return list(groups.values())
