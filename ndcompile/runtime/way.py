"""How a parameter comes to compute, and its gradient back: by whole buckets, on a lane."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ndcompile.runtime import private
from ndcompile.runtime.lane import Lane
from ndcompile.runtime.mesh import Mesh, Ranks
from ndcompile.runtime.parts import Part, buffer, part_of_scattered, sent_to_gather, sent_to_scatter, whole_of_gathered


class Weight(NamedTuple):
    """How the parameter `name` comes to compute, one line a weight of an emitted block.

    `gather` maps an axis to the dim that it shards (several on one dim: major first): S → R, the gradient is
    reduce-scattered. On the axes in `reduce` it is I → R: nothing forward, the gradient is all-reduced.
    """

    name: str
    gather: Mapping[str, int]
    reduce: tuple[str, ...]


def weight(name: str, gather: Mapping[str, int] | None = None, reduce: Sequence[str] = ()) -> Weight:
    """`Weight` from the way emitted code writes it."""
    return Weight(name, dict(gather or {}), tuple(reduce))


class Way(NamedTuple):
    """A weight's way in numbers: its whole shape, one `Part` for each axis to gather (major first), the axes to sum."""

    shape: tuple[int, ...]
    held: tuple[int, ...]
    dims: Mapping[str, int]
    stages: Mapping[Ranks, Part]
    reduce: tuple[Ranks, ...]

    @classmethod
    def of(cls, mesh: Mesh, weight: Weight, shape: tuple[int, ...]) -> Way:
        stages: dict[Ranks, Part] = {}
        held = shape
        for name, dim in weight.gather.items():
            axis = mesh.for_weights(name)
            if axis.size > 1:
                stages[axis] = Part(held, dim % len(shape))
                held = stages[axis].held(axis)
        sums = tuple(mesh.for_weights(name) for name in weight.reduce if mesh[name].size > 1)
        return cls(shape, held, weight.gather, stages, sums)


class Gather:
    """Weights on their way, since the moment it was made, of parameters as they were at `versions`.

    They are cast, and then gathered axis by axis, those of one axis by one call.
    """

    def __init__(
        self, lane: Lane, ways: Sequence[Way], held: Sequence[Tensor], dtypes: Sequence[torch.dtype],
        versions: tuple[int, ...],
    ) -> None:  # fmt: skip
        self.versions = versions
        self._lane = lane
        with lane():
            self._weights = _gathered(ways, _cast(held, dtypes, [bool(way.stages) for way in ways]))
        self._mark = lane.mark()

    def land(self) -> list[Tensor]:
        """The whole weights; one that neither moves nor is cast is the parameter's own memory."""
        self._lane.join(self._mark)
        return self._weights


def _cast(held: Sequence[Tensor], dtypes: Sequence[torch.dtype], moving: Sequence[bool]) -> list[Tensor]:
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


def _gathered(ways: Sequence[Way], held: Sequence[Tensor]) -> list[Tensor]:
    now = list(held)
    for axis in _axes(ways)[::-1]:
        for due in _by_dtype(now, [i for i, way in enumerate(ways) if axis in way.stages]):
            parts = [ways[i].stages[axis] for i in due]
            sent = [sent_to_gather(now[i], part, axis) for i, part in zip(due, parts, strict=True)]
            got = private.wait_each(private.start_all_gather_each(sent, axis.size, axis.group))
            for i, x, part in zip(due, got, parts, strict=True):
                now[i] = whole_of_gathered(x, part, axis)
    return now


def reduced(
    ways: Sequence[Way], gradients: Mapping[int, Tensor], dtype: torch.dtype | None, deferred: Mapping[int, Tensor],
    defer: bool,
) -> tuple[dict[int, Tensor], dict[int, Tensor]]:  # fmt: skip
    """The gradients after their collectives, by the weight's number, and what is now deferred.

    What was deferred is taken along. With `defer`, nothing is summed over the axes of `reduce`: it is deferred.
    """
    now = _scattered(ways, gradients, dtype)
    waiting = {i: deferred[i] + now.pop(i) if i in deferred else now.pop(i) for i in list(now) if ways[i].reduce}
    if defer:
        return now, {**deferred, **waiting}
    left = {i: x for i, x in deferred.items() if i not in waiting}
    return now | summed(ways, waiting, dtype), left


def _scattered(ways: Sequence[Way], gradients: Mapping[int, Tensor], dtype: torch.dtype | None) -> dict[int, Tensor]:
    now = dict(gradients)
    for axis in _axes(ways):
        for due in _by_dtype(now, [i for i in now if axis in ways[i].stages]):
            parts = [ways[i].stages[axis] for i in due]
            sent = sent_to_scatter([now[i] for i in due], parts, axis, dtype or now[due[0]].dtype)
            got = private.wait_each(private.start_reduce_scatter_each(sent, axis.size, axis.group))
            for i, x, part in zip(due, got, parts, strict=True):
                now[i] = part_of_scattered(x, part, axis)
    return now


def summed(ways: Sequence[Way], gradients: Mapping[int, Tensor], dtype: torch.dtype | None) -> dict[int, Tensor]:
    """The gradients summed over the axes of `reduce`, those of one axis in one buffer."""
    now = dict(gradients)
    for same in _by_dtype(gradients, list(gradients)):
        within: list[int] = []
        for axis in dict.fromkeys(axis for i in same for axis in ways[i].reduce):
            due = [i for i in same if axis in ways[i].reduce]
            if due != within:
                flat, made = buffer([now[i].shape for i in due], dtype or now[due[0]].dtype, now[due[0]])
                private.copy_each(made, [now[i] for i in due])
                now, within = now | dict(zip(due, made, strict=True)), due
            private.all_reduce_in_place(flat, axis.group)
    return now


def _axes(ways: Sequence[Way]) -> list[Ranks]:
    """The axes to gather, major first."""
    return list(dict.fromkeys(axis for way in ways for axis in way.stages))


def _by_dtype(tensors: Mapping[int, Tensor] | Sequence[Tensor], which: Sequence[int]) -> list[list[int]]:
    groups: dict[torch.dtype, list[int]] = {}
    for i in which:
        groups.setdefault(tensors[i].dtype, []).append(i)
    return list(groups.values())
