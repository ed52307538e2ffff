"""Weights and gradients travel by copies between the memories of one host's ranks: on GPUs copy engines do most of it.

A *team* is the ranks of one gather or reduction: all that differ along its axes only, each at its *place*. What a rank
shows of its weights lies on a *shelf*, what it is sent of gradients in a *slot*.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ndcompile.runtime import private
from ndcompile.runtime.agreement import everyones
from ndcompile.runtime.mesh import Mesh, Ranks
from ndcompile.runtime.parts import ALIGNMENT
from ndcompile.runtime.peers import Peers
from ndcompile.runtime.transport import Carrier, Dtype, cast
from ndcompile.runtime.way import Way


class Symmetric:
    """The memory of one program on each rank: two slots, and the shelves of all buckets.

    Reductions take the slots in turn, and each has a barrier between pushing and reading. So whoever pushes to a slot
    has passed the barrier of the reduction before, to which all came after they had read that slot.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._slot = self._shelves = self._turn = 0
        self._peers: Peers | None = None
        self._carriers: list[Copies] = []

    def carrier(self, ways: Sequence[Way], dtypes: Sequence[torch.dtype], reduce: Dtype) -> Carrier:
        self._carriers.append(Copies(self, ways, dtypes, reduce))
        return self._carriers[-1]

    def reserve(self, shelf: int, slot: int) -> int:
        """Ask for room for weights, and for slots as large as this. Gives where the shelf stands among all shelves."""
        place, self._shelves, self._slot = self._shelves, self._shelves + shelf, max(self._slot, slot)
        return place

    @property
    def size(self) -> int:
        """Bytes that a rank takes. Where tensors are sharded unevenly, rank 0 asks for the most, and all take that."""
        return 2 * self._slot + self._shelves

    def open(self, device: torch.device) -> None:
        self._slot, self._shelves = map(max, zip(*everyones((self._slot, self._shelves)), strict=True))
        self._peers = Peers(self.size, device) if self.size else None

    def barrier(self) -> None:
        assert self._peers is not None, "memory was taken"
        self._peers.barrier()

    def shelves(self, rank: int) -> Tensor:
        assert self._peers is not None, "memory was taken"
        return self._peers.views[rank][2 * self._slot :]

    def record(self) -> None:
        """Each time, weights are shown anew, and slots are taken when all ranks have done with what lay there: which
        slot is whose turn is recorded too."""
        for copies in self._carriers:
            copies.forget()
        if self._peers is not None:
            self._peers.barrier()

    def next_turn(self) -> int:
        """Which slot is next."""
        self._turn = 1 - self._turn
        return self._turn

    def slot(self, turn: int, rank: int) -> Tensor:
        assert self._peers is not None, "memory was taken"
        return self._peers.views[rank][turn * self._slot :][: self._slot]


@dataclass(frozen=True)
class Window:
    """A part of a tensor, of this shape: cut along dims, one after the other, from a start and so long."""

    shape: tuple[int, ...]
    cuts: tuple[tuple[int, int, int], ...] = ()

    def along(self, dim: int, ranks: Ranks) -> Window:
        """The part of it that one of several ranks has along a dim."""
        size = self.shape[dim]
        start, length = ranks.start(size), ranks.part(size)
        return Window((*self.shape[:dim], length, *self.shape[dim + 1 :]), (*self.cuts, (dim, start, length)))

    def of(self, x: Tensor) -> Tensor:
        for dim, start, length in self.cuts:
            x = x.narrow(dim, start, length)
        return x

    @property
    def length(self) -> int:
        return math.prod(self.shape)


Move = tuple[int, Window, Tensor]
"""A tensor's number, the part of it that a place has, and memory for that part at some rank."""


class Team:
    """The ranks of one gather or reduction by their places, and what each place has of each tensor.

    The first place's part of a tensor is the largest.
    """

    def __init__(self, mesh: Mesh, axes: Sequence[Ranks]) -> None:
        self.sizes = [axis.size for axis in axes]
        self.ranks = mesh.team(*(axis.name for axis in axes))
        self.own = self.ranks.index(mesh.rank)
        self.windows: dict[int, list[Window]] = {}

    @classmethod
    def gathering(cls, mesh: Mesh, axes: Sequence[Ranks], ways: Mapping[int, Way]) -> Team:
        """Each place has its part of a weight."""
        team = cls(mesh, axes)
        team.windows = {i: [team._part(way, place) for place in range(len(team))] for i, way in ways.items()}
        return team

    @classmethod
    def summing(cls, mesh: Mesh, axes: Sequence[Ranks], ways: Mapping[int, Way]) -> Team:
        """Each place has its share of the elements of what a rank holds of a weight; each of two has all of them."""
        team = cls(mesh, axes)
        count = 1 if team.is_pair else len(team)
        shares = [Ranks("", count, place % count, "") for place in range(len(team))]
        team.windows = {i: [Window((math.prod(w.held),)).along(0, s) for s in shares] for i, w in ways.items()}
        return team

    @property
    def is_pair(self) -> bool:
        """Two places that send each other everything need no second exchange, and send no more bytes than in shares."""
        return len(self) == 2

    def __len__(self) -> int:
        return len(self.ranks)

    def round(self) -> list[int]:
        """All places, from the next one on to the own, so that the ranks do not all turn to the same one."""
        return [(self.own + 1 + i) % len(self) for i in range(len(self))]

    def area(self, sender: int, receiver: int) -> int:
        """Which of the areas of a receiver's slot is the sender's."""
        return (sender - receiver - 1) % len(self)

    def layout(self, dtypes: Mapping[int, torch.dtype]) -> Layout:
        """Room for any place's part of these tensors."""
        return Layout({i: (dtype, self.windows[i][0].length) for i, dtype in dtypes.items()})

    def _part(self, way: Way, place: int) -> Window:
        window = Window(way.shape)
        for number, (axis, stage) in enumerate(way.stages.items()):
            index = place // math.prod(self.sizes[number + 1 :]) % axis.size
            window = window.along(stage.dim, replace(axis, index=index))
        return window


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
        gathers, sums = _alike(ways, lambda way: tuple(way.stages)), _alike(ways, lambda way: way.reduce)
        self._gathers = [Team.gathering(memory.mesh, axes, own) for axes, own in gathers.items()]
        self._sums = [Team.summing(memory.mesh, axes, own) for axes, own in sums.items()]
        lengths = {i: windows[0].length for team in self._gathers for i, windows in team.windows.items()}
        self._shelf = Layout({i: (dtypes[i], length) for i, length in lengths.items()})
        self._place = memory.reserve(self._shelf.size, self._room())
        self._shown: tuple[int, ...] | None = None
        self._exchanges: dict[object, Exchange] = {}

    def gather(self, held: Sequence[Tensor], versions: tuple[int, ...]) -> list[Tensor]:
        now = self._cast_others(held)
        if self._gathers and self._shown != versions:
            self._show(held)
            self._shown = versions
        for i in self._shelf.places:
            now[i] = held[i].new_empty(self._ways[i].shape, dtype=self._dtypes[i])
        for i, window, source in self._sources:
            copy(window.of(now[i]), source)
        return now

    def scatter(self, gradients: Mapping[int, Tensor]) -> dict[int, Tensor]:
        now = dict(gradients)
        for team in self._gathers:
            due = {i: now[i] for i in team.windows if i in now}
            if due:
                now |= self._exchange(team, due).sums(due)
        return now

    def sum(self, gradients: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Every place sums its share of the elements, and copies those of the others when all have theirs."""
        now = dict(gradients)
        for team in self._sums:
            due = {i: now[i].contiguous().view(-1) for i in team.windows if i in now}
            if due:
                exchange = self._exchange(team, due)
                sums = exchange.sums(due)
                if not team.is_pair:
                    exchange.show(sums)
                    self._memory.barrier()
                    sums = exchange.everyones(sums, due)
                now |= {i: x.view(now[i].shape) for i, x in sums.items()}
        return now

    def _cast_others(self, held: Sequence[Tensor]) -> list[Tensor]:
        """The weights that do not move in the dtypes of compute, the others as they are held."""
        found = list(held)
        stay = [i for i, way in enumerate(self._ways) if not way.stages]
        made = cast([held[i] for i in stay], [self._dtypes[i] for i in stay], [False] * len(stay))
        for i, x in zip(stay, made, strict=True):
            found[i] = x
        return found

    def forget(self) -> None:
        """What is on the shelf is of parameters as they were."""
        self._shown = None

    def _show(self, held: Sequence[Tensor]) -> None:
        """Put this rank's parts where the others find them, when all have taken what lay there."""
        own, which = self._shelf_of(self._memory.mesh.rank), list(self._shelf.places)
        self._memory.barrier()
        private.copy_each([self._shelf.view(own, i, held[i].shape) for i in which], [held[i] for i in which])
        self._memory.barrier()

    def _shelf_of(self, rank: int) -> Tensor:
        return self._memory.shelves(rank)[self._place :]

    @cached_property
    def _sources(self) -> list[Move]:
        """Where each part of a weight comes from."""
        return [
            move
            for team in self._gathers
            for move in _moves(
                team, team.windows, self._shelf, {place: self._shelf_of(team.ranks[place]) for place in team.round()}
            )
        ]

    def _exchange(self, team: Team, wholes: Mapping[int, Tensor]) -> Exchange:
        """Push every place its part of each tensor; what the others pushed is there."""
        turn, dtypes = self._memory.next_turn(), {i: x.dtype for i, x in wholes.items()}
        key = team, turn, tuple(dtypes.items())
        if key not in self._exchanges:
            slots = [self._memory.slot(turn, rank) for rank in team.ranks]
            sent = {i: self._wire(dtype) for i, dtype in dtypes.items()}
            self._exchanges[key] = Exchange(team, slots, sent, self._reduce)
        exchange = self._exchanges[key]
        for i, window, target in exchange.pushes:
            copy(target, window.of(wholes[i]))
        self._memory.barrier()
        return exchange

    def _wire(self, dtype: torch.dtype) -> torch.dtype:
        """In which dtype a gradient of this one is sent."""
        fits = self._reduce is None or torch.promote_types(dtype, self._reduce) == self._reduce
        return dtype if fits else self._reduce or dtype

    def _room(self) -> int:
        """The bytes of the largest slot that the bucket needs."""
        most = 0
        for team in self._gathers:
            sent = {i: self._wire(self._dtypes[i]) for i in team.windows}
            most = max(most, (len(team) - 1) * team.layout(sent).size)
        for team in self._sums:
            sums = {i: self._reduce or self._dtypes[i] for i in team.windows}
            sent = {i: self._wire(sums[i] if self._ways[i].stages else self._dtypes[i]) for i in team.windows}
            shown = 0 if team.is_pair else team.layout(sums).size
            most = max(most, (len(team) - 1) * team.layout(sent).size + shown)
        return most


class Exchange:
    """One reduction in one slot. That holds what each other place pushed, one `layout` after another; then own sums."""

    def __init__(self, team: Team, slots: Sequence[Tensor], sent: Mapping[int, torch.dtype], reduce: Dtype) -> None:
        """With each place's slot, and the dtypes in which tensors are sent."""
        self._team, self._slots, self._sent, self._reduce = team, slots, sent, reduce
        self._layout, own, (*others, _) = team.layout(sent), team.own, team.round()
        places = {place: slots[place][team.area(own, place) * self._layout.size :] for place in others}
        self.pushes = _moves(team, sent, self._layout, places)
        pushed = [slots[own][team.area(place, own) * self._layout.size :] for place in others]
        self._pushed = {dtype: [self._layout.run(memory, dtype) for memory in pushed] for dtype in self._layout.runs}

    def sums(self, wholes: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Of this rank's part of its own tensors and what was pushed: in float32 at least, then rounded once."""
        found: dict[int, Tensor] = {}
        for wire, pushed in self._pushed.items():
            dtype = self._reduce or wire
            parts = {
                i: private.cast(self._team.windows[i][self._team.own].of(wholes[i]), wire)
                for i, sent in self._sent.items()
                if sent == wire
            }
            total = torch.empty_like(pushed[0], dtype=torch.promote_types(dtype, torch.float32))
            private.copy_each([self._within(total, i, x.shape) for i, x in parts.items()], list(parts.values()))
            for x in pushed:
                total += x
            total = private.cast(total, dtype)
            found |= {i: self._within(total, i, x.shape) for i, x in parts.items()}
        return found

    def _within(self, run: Tensor, i: int, shape: Sequence[int]) -> Tensor:
        """The tensor of this number in a run of all those of its dtype."""
        wire = self._sent[i]
        start = (self._layout.places[i] - self._layout.runs[wire][0]) // wire.itemsize
        return run[start : start + math.prod(shape)].view(*shape)

    def show(self, sums: Mapping[int, Tensor]) -> None:
        """Put own sums where the others find them."""
        for i, _, place in self._shares[-len(sums) :]:  # the own place is the last
            copy(place, sums[i])

    def everyones(self, sums: Mapping[int, Tensor], like: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """The whole sums, of the shapes of `like`."""
        found = {i: x.new_empty(like[i].shape) for i, x in sums.items()}
        for i, window, share in self._shares:
            copy(window.of(found[i]), share)
        return found

    @cached_property
    def _shares(self) -> list[Move]:
        sums = self._team.layout({i: self._reduce or dtype for i, dtype in self._sent.items()})
        after = (len(self._team) - 1) * self._layout.size
        return _moves(self._team, self._sent, sums, {p: self._slots[p][after:] for p in self._team.round()})


def _moves(team: Team, numbers: Iterable[int], layout: Layout, memories: Mapping[int, Tensor]) -> list[Move]:
    """For each of some places the parts that it has of tensors, and where they lie in the memory for that place."""
    return [
        (i, team.windows[i][place], layout.view(memory, i, team.windows[i][place].shape))
        for place, memory in memories.items()
        for i in numbers
    ]


def copy(to: Tensor, value: Tensor) -> None:
    """Between ranks, or within one; on GPUs a copy engine does it where both are contiguous and of one dtype."""
    to.copy_(value)


def _alike(ways: Sequence[Way], axes: Callable[[Way], tuple[Ranks, ...]]) -> dict[tuple[Ranks, ...], dict[int, Way]]:
    """The weights by their axes, without those that have none."""
    groups: dict[tuple[Ranks, ...], dict[int, Way]] = {}
    for i, way in enumerate(ways):
        if axes(way):
            groups.setdefault(axes(way), {})[i] = way
    return groups
