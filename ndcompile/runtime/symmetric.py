"""Weights and gradients travel by copies between the memories of ranks of one host, and by no kernel on GPUs.

A *team* is the ranks of one gather or reduction: all that differ along its axes only, each at its *place*. What a rank
shows of its weights lies on a *shelf*, what it is sent of gradients in a *slot*.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ndcompile.runtime import private
from ndcompile.runtime.agreement import everyones
from ndcompile.runtime.mesh import Mesh, Ranks
from ndcompile.runtime.parts import ALIGNMENT
from ndcompile.runtime.peers import Peers
from ndcompile.runtime.transport import Carrier, Dtype, cast
from ndcompile.runtime.way import Way

Cut = Callable[[int, Tensor, int], Tensor]
"""Of the weight of this number, a tensor: what the place has of it, a view."""


class Symmetric:
    """The memory of one program on each rank: two slots, and the shelves of all buckets.

    Reductions take the slots in turn, and each has a barrier between pushing and reading. So whoever pushes to a slot
    has passed the barrier of the reduction before, to which all came after they had read that slot.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._slot = self._shelves = self._turn = 0
        self._peers: Peers | None = None

    def carrier(self, ways: Sequence[Way], dtypes: Sequence[torch.dtype], reduce: Dtype) -> Carrier:
        return Copies(self, ways, dtypes, reduce)

    def reserve(self, shelf: int, slot: int) -> int:
        """Ask for room for weights, and for slots as large as this. Gives where the shelf stands among all shelves."""
        place, self._shelves, self._slot = self._shelves, self._shelves + shelf, max(self._slot, slot)
        return place

    def open(self, device: torch.device) -> None:
        self._slot = max(everyones(self._slot))  # where tensors are sharded unevenly, ranks ask for different room
        size = 2 * self._slot + max(everyones(self._shelves))
        self._peers = Peers(size, device) if size else None

    def barrier(self) -> None:
        assert self._peers is not None, "memory was taken"
        self._peers.barrier()

    def shelves(self, rank: int) -> Tensor:
        assert self._peers is not None, "memory was taken"
        return self._peers.views[rank][2 * self._slot :]

    def next_slot(self) -> list[Tensor]:
        """The slot whose turn it is, of each rank."""
        assert self._peers is not None, "memory was taken"
        self._turn = 1 - self._turn
        return [view[self._turn * self._slot :][: self._slot] for view in self._peers.views]


class Team:
    """The ranks of the world by their places along some axes, the first axis major."""

    def __init__(self, mesh: Mesh, axes: Sequence[Ranks]) -> None:
        self.axes = tuple(axes)
        self.ranks = mesh.team(*(axis.name for axis in axes))
        self.own = self.ranks.index(mesh.rank)

    def __len__(self) -> int:
        return len(self.ranks)

    def round(self) -> Iterator[int]:
        """All places, from the next one on to the own, so that the ranks do not all turn to the same one."""
        return ((self.own + 1 + i) % len(self) for i in range(len(self)))

    def part(self, whole: Tensor, way: Way, place: int) -> Tensor:
        """What a place has of a whole weight."""
        sizes = [axis.size for axis in self.axes]
        for number, (axis, stage) in enumerate(way.stages.items()):
            there = replace(axis, index=place // math.prod(sizes[number + 1 :]) % axis.size)
            size = whole.shape[stage.dim]
            whole = whole.narrow(stage.dim, there.start(size), there.part(size))
        return whole

    def longest(self, way: Way) -> int:
        """The elements of the largest part of a weight, which is the first place's."""
        return self.part(torch.empty(way.shape, device="meta"), way, 0).numel()

    def share(self, length: int) -> int:
        """The elements of the largest share of so many."""
        return -(-length // len(self))

    def chunk(self, flat: Tensor, place: int) -> Tensor:
        """A place's share of the elements."""
        there = Ranks("", len(self), place, "")
        return flat.narrow(0, there.start(len(flat)), there.part(len(flat)))


class Layout:
    """Where tensors of these dtypes and lengths lie in a stretch of bytes, those of one dtype one after another."""

    def __init__(self, kinds: Mapping[int, tuple[torch.dtype, int]]) -> None:
        self.kinds = kinds
        self.places: dict[int, int] = {}
        self.runs: dict[torch.dtype, tuple[int, int]] = {}
        self.size = 0
        for dtype in dict.fromkeys(dtype for dtype, _ in kinds.values()):
            start = self.size
            for i, (_, length) in ((i, kind) for i, kind in kinds.items() if kind[0] == dtype):
                self.places[i] = self.size
                self.size += -(-length * dtype.itemsize // ALIGNMENT) * ALIGNMENT
            self.runs[dtype] = start, self.size

    def view(self, memory: Tensor, i: int, shape: Sequence[int]) -> Tensor:
        """The tensor of this number, of a shape that fits its length."""
        dtype, place = self.kinds[i][0], self.places[i]
        return memory[place : place + math.prod(shape) * dtype.itemsize].view(dtype).view(*shape)

    def run(self, memory: Tensor, dtype: torch.dtype) -> Tensor:
        """All of a dtype, with what stands between them."""
        start, stop = self.runs[dtype]
        return memory[start:stop].view(dtype)


class Copies:
    """Every rank has its cast parts of a bucket on its shelf, and copies those of the others from theirs.

    In a reduction it pushes to every place in the team what that place is to sum, in the gradient's own dtype where it
    fits into the sum's: the sum is the same, and fewer bytes travel.
    """

    def __init__(self, memory: Symmetric, ways: Sequence[Way], dtypes: Sequence[torch.dtype], reduce: Dtype) -> None:
        self._memory, self._ways, self._dtypes, self._reduce = memory, ways, dtypes, reduce
        self._gathers = [(Team(memory.mesh, axes), which) for axes, which in _alike([tuple(w.stages) for w in ways])]
        self._sums = [(Team(memory.mesh, axes), which) for axes, which in _alike([w.reduce for w in ways])]
        self._shelf = Layout({i: (dtypes[i], team.longest(ways[i])) for team, which in self._gathers for i in which})
        self._place = memory.reserve(self._shelf.size, self._room())
        self._shown: tuple[int, ...] | None = None

    def gather(self, held: Sequence[Tensor], versions: tuple[int, ...]) -> list[Tensor]:
        now = self._cast_others(held)
        if self._gathers and self._shown != versions:
            self._show(held)
            self._shown = versions
        for team, which in self._gathers:
            for i in which:
                now[i] = held[i].new_empty(self._ways[i].shape, dtype=self._dtypes[i])
            for place in team.round():
                shelf = self._shelf_of(team.ranks[place])
                for i in which:
                    part = self._part(team, i, now[i], place)
                    copy(part, self._shelf.view(shelf, i, part.shape))
        return now

    def scatter(self, gradients: Mapping[int, Tensor]) -> dict[int, Tensor]:
        now = dict(gradients)
        for team, which in self._gathers:
            due = {i: now[i] for i in which if i in now}
            if due:
                lengths = {i: team.longest(self._ways[i]) for i in due}
                now |= self._push(team, due, partial(self._part, team), lengths).sums(self._reduce)
        return now

    def sum(self, gradients: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Every place sums its share of the elements, and copies those of the others when all have theirs."""
        now = dict(gradients)
        for team, which in self._sums:
            due = {i: now[i].contiguous().view(-1) for i in which if i in now}
            if due:
                lengths = {i: team.share(len(x)) for i, x in due.items()}
                push = self._push(team, due, partial(_share, team), lengths)
                now |= {i: x.view(now[i].shape) for i, x in self._everyones(push, due).items()}
        return now

    def _cast_others(self, held: Sequence[Tensor]) -> list[Tensor]:
        """The weights that do not move in the dtypes of compute, the others as they are held."""
        found = list(held)
        stay = [i for i, way in enumerate(self._ways) if not way.stages]
        made = cast([held[i] for i in stay], [self._dtypes[i] for i in stay], [False] * len(stay))
        for i, x in zip(stay, made, strict=True):
            found[i] = x
        return found

    def _show(self, held: Sequence[Tensor]) -> None:
        """Put this rank's parts where the others find them, when all have taken what lay there."""
        own, which = self._shelf_of(self._memory.mesh.rank), list(self._shelf.places)
        self._memory.barrier()
        private.copy_each([self._shelf.view(own, i, held[i].shape) for i in which], [held[i] for i in which])
        self._memory.barrier()

    def _part(self, team: Team, i: int, whole: Tensor, place: int) -> Tensor:
        return team.part(whole, self._ways[i], place)

    def _shelf_of(self, rank: int) -> Tensor:
        return self._memory.shelves(rank)[self._place :]

    def _push(self, team: Team, wholes: Mapping[int, Tensor], cut: Cut, lengths: Mapping[int, int]) -> Pushed:
        """Give every place its part of each tensor, and get what the others have of one's own."""
        layout = Layout({i: (self._wire(x.dtype), lengths[i]) for i, x in wholes.items()})
        slots = self._memory.next_slot()
        for place in team.round():
            slot = slots[team.ranks[place]][team.own * layout.size :]
            for i, x in wholes.items():
                part = cut(i, x, place)
                copy(layout.view(slot, i, part.shape), part)
        self._memory.barrier()
        own = {i: cut(i, x, team.own).shape for i, x in wholes.items()}
        return Pushed(team, [slots[rank] for rank in team.ranks], layout, own)

    def _everyones(self, push: Pushed, wholes: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """The whole sums of flat tensors, of which every place has its share."""
        team, sums = push.team, push.sums(self._reduce)
        layout = Layout({i: (x.dtype, team.share(len(wholes[i]))) for i, x in sums.items()})
        shown = [slot[len(team) * push.layout.size :] for slot in push.slots]
        for i, x in sums.items():
            copy(layout.view(shown[team.own], i, x.shape), x)
        self._memory.barrier()
        found = {i: x.new_empty(len(wholes[i])) for i, x in sums.items()}
        for place in team.round():
            for i, x in found.items():
                share = team.chunk(x, place)
                copy(share, layout.view(shown[place], i, share.shape))
        return found

    def _wire(self, dtype: torch.dtype) -> torch.dtype:
        """In which dtype a gradient of this one is sent."""
        fits = self._reduce is None or torch.promote_types(dtype, self._reduce) == self._reduce
        return dtype if fits else self._reduce or dtype

    def _room(self) -> int:
        """The bytes of the largest slot that the bucket needs."""
        most = 0
        for team, which in self._gathers:
            kinds = {i: (self._wire(self._dtypes[i]), team.longest(self._ways[i])) for i in which}
            most = max(most, len(team) * Layout(kinds).size)
        for team, which in self._sums:
            shares = {i: team.share(math.prod(self._ways[i].held)) for i in which}
            scattered = {i: bool(self._ways[i].stages) for i in which}
            sums = {i: self._reduce or self._dtypes[i] for i in which}
            sent = {i: self._wire(sums[i] if scattered[i] else self._dtypes[i]) for i in which}
            pushed, shown = (Layout({i: (kind[i], shares[i]) for i in which}) for kind in (sent, sums))
            most = max(most, len(team) * pushed.size + shown.size)
        return most


@dataclass(frozen=True)
class Pushed:
    """What a team's ranks have of each other in their slots: for each place one `layout` after another."""

    team: Team
    slots: list[Tensor]
    layout: Layout
    shapes: Mapping[int, torch.Size]

    def sums(self, dtype: Dtype) -> dict[int, Tensor]:
        """What was pushed to this rank, summed in float32 at least and in the order of places, then in `dtype`."""
        pushed = [self.slots[self.team.own][place * self.layout.size :] for place in range(len(self.team))]
        found = {}
        for wire, (start, _) in self.layout.runs.items():
            first, *others = (self.layout.run(memory, wire) for memory in pushed)
            total = first.to(torch.promote_types(dtype or wire, torch.float32), copy=True)
            for x in others:
                total += x
            total = private.cast(total, dtype or wire)
            for i in (i for i, kind in self.layout.kinds.items() if kind[0] == wire):
                at = (self.layout.places[i] - start) // wire.itemsize
                found[i] = total[at : at + self.shapes[i].numel()].view(self.shapes[i])
        return found


def copy(to: Tensor, value: Tensor) -> None:
    """Between ranks, or within one; on GPUs a copy engine does it where both are contiguous and of one dtype."""
    to.copy_(value)


def _share(team: Team, _: int, flat: Tensor, place: int) -> Tensor:
    return team.chunk(flat, place)


def _alike(axes: Sequence[tuple[Ranks, ...]]) -> list[tuple[tuple[Ranks, ...], list[int]]]:
    """The weights by the axes that they have here, without those that have none."""
    groups: dict[tuple[Ranks, ...], list[int]] = {}
    for i, own in enumerate(axes):
        if own:
            groups.setdefault(own, []).append(i)
    return list(groups.items())
