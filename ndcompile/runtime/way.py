"""How a parameter comes to compute, and its gradient back: by whole buckets, on a lane."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from ndcompile.runtime.lane import Lane
from ndcompile.runtime.mesh import Mesh, Ranks
from ndcompile.runtime.parts import Part
from ndcompile.runtime.transport import Carrier


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
    """Weights on their way, since the moment it was made, of parameters as they were at `versions`."""

    def __init__(self, lane: Lane, carrier: Carrier, held: Sequence[Tensor], versions: tuple[int, ...]) -> None:
        self.versions = versions
        self._lane = lane
        with lane():
            self._weights = carrier.gather(held, versions)
        self._mark = lane.mark()

    def land(self) -> list[Tensor]:
        """The whole weights; one that neither moves nor is cast is the parameter's own memory."""
        self._lane.join(self._mark)
        return self._weights


def reduced(
    carrier: Carrier, ways: Sequence[Way], gradients: Mapping[int, Tensor], deferred: Mapping[int, Tensor], defer: bool
) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """The gradients after their reductions, by the weight's number, and what is now deferred.

    What was deferred is taken along. With `defer`, nothing is summed over the axes of `reduce`: it is deferred.
    """
    now = carrier.scatter(gradients)
    waiting = {i: deferred[i] + now.pop(i) if i in deferred else now.pop(i) for i in list(now) if ways[i].reduce}
    if defer:
        return now, {**deferred, **waiting}
    left = {i: x for i, x in deferred.items() if i not in waiting}
    return now | carrier.sum(waiting), left
