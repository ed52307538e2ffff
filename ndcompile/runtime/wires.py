"""Activations by copies: gathers and reduce-scatters that leave a GPU's multiprocessors to the computation.

A *wire* is memory of the ranks of a process group that all of them address. It has a name like a group's, under which
other collectives find the group itself. What is sent is put on the wire by the computing stream; a stream of its own
meets the other ranks at a barrier, and takes what they have sent.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from ndcompile.runtime import private
from ndcompile.runtime.lane import Lane
from ndcompile.runtime.peers import Peers

PREFIX = "copies over "
SLOTS = 4
"""Exchanges that may be on their way: two halves have one each, and what comes after need not wait for the slowest."""

PIECES = 32
"""So many copies at most for what one rank sends; of more, a kernel puts together what one copy brings."""

PAGE = 2**21
"""Bytes at whose multiples slots begin."""

_wires: dict[str, Wire] = {}


def wire_over(group: str, device: torch.device) -> str:
    """The name of the wire of a process group, made where there is none. All ranks of the group call it alike."""
    name, found = PREFIX + group, private.group_of(group)
    if name not in _wires or _wires[name].group is not found:
        private.name_group(name, found)
        _wires[name] = Wire(found, device)
    return name


def by_copies(group: str) -> bool:
    """Whether this names a wire."""
    return group.startswith(PREFIX)


def start_all_gather(x: Tensor, dim: int, ranks: int, group: str) -> Tensor:
    """Start `[…, n, …] → […, ranks · n, …]`; without a wire, what comes is `[ranks · first, …]`, in rank order."""
    if by_copies(group):
        found: Tensor = _ops.gather_by_copies.default(x, dim, ranks, group)
        return found
    return private.start_all_gather(x.contiguous(), ranks, group)


def start_reduce_scatter(x: Tensor, dim: int, ranks: int, group: str) -> Tensor:
    """Start the sum over a wire, of which this rank keeps its part: `[…, ranks · n, …] → […, n, …]`."""
    found: Tensor = _ops.scatter_by_copies.default(x, dim, ranks, group)
    return found


def room(kind: str, x: Tensor, ranks: int) -> int:
    """The bytes of a slot in which a rank has what it sends in such an exchange."""
    sent = x.numel() * x.itemsize
    return sent if kind == "all_gather" else sent // ranks * (ranks - 1)


def paged(size: int) -> int:
    """The bytes that a slot takes where so many are needed."""
    return -(-size // PAGE) * PAGE


def record(groups: Iterable[str]) -> None:
    """What is recorded from now on finds all slots of these wires free each time that it is done."""
    for group in groups:
        if by_copies(group):
            _wires[group].record()


class Wire:
    """Slots in turn. A slot is taken again when all ranks have come to the exchange after its own: each comes there
    when it has taken what lay in it.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self._own, self._count = group.rank(), group.size()
        self._device, self._lane = device, Lane(device)
        self._met: deque[torch.cuda.Event | None] = deque(maxlen=SLOTS)
        self._size = self._turn = 0
        self._peers: Peers | None = None
        self._is_recorded = False

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """`[…, n, …] → […, ranks · n, …]`, in rank order along `dim`; to be waited for."""
        part = x.shape[dim]
        whole = x.new_empty(_along(x.shape, dim, part * self._count))
        slots = self._next(room("all_gather", x, self._count))
        for place in (_view(slots[self._own], x.shape, x.dtype), whole.narrow(dim, self._own * part, part)):
            place.copy_(x)
        with self._beside():
            for rank in self._others():
                _take(whole.narrow(dim, rank * part, part), _view(slots[rank], x.shape, x.dtype), dim)
        return self._on_its_way(whole)

    def scatter(self, x: Tensor, dim: int) -> Tensor:
        """`[…, ranks · n, …] → […, n, …]`, this rank's part of the sum; to be waited for."""
        parts = x.chunk(self._count, dim)
        shape, size = parts[0].shape, parts[0].numel() * x.itemsize
        slots = self._next(room("reduce_scatter", x, self._count))
        for rank in self._others():
            _view(slots[self._own][self._area(self._own, rank) * size :], shape, x.dtype).copy_(parts[rank])
        total = parts[self._own].clone(memory_format=torch.contiguous_format)
        with self._beside():
            sent = [_view(slots[rank][self._area(rank, self._own) * size :], shape, x.dtype) for rank in self._others()]
            total = _sum(total, [torch.empty_like(total).copy_(x) for x in sent])
        return self._on_its_way(total)

    def record(self) -> None:
        self._is_recorded = True
        self._free()

    def _free(self) -> None:
        """All ranks have taken what lies in any slot, and none waits for what was recorded."""
        if self._peers is not None:
            with self._beside():
                pass
            self._lane.join_all()
        self._met.clear()

    def _others(self) -> list[int]:
        """From the next rank on, so that not all turn to the same one."""
        return [(self._own + 1 + i) % self._count for i in range(self._count - 1)]

    def _area(self, sender: int, receiver: int) -> int:
        """Where in the sender's slot the receiver's part lies."""
        return (receiver - sender - 1) % self._count

    def _next(self, size: int) -> Sequence[Tensor]:
        """The next slot of each rank, with room for so many bytes; what lay in it has been taken."""
        if size > self._size:
            self._grow(size)
        elif self._is_recorded and not private.is_recording():
            self._free()  # recorded exchanges may have taken place since
        assert self._peers is not None, "there is room"
        self._turn = self._after(self._turn)
        if len(self._met) == SLOTS:
            self._lane.join(self._met[1])
        start = self._turn * self._size
        return [view[start : start + self._size] for view in self._peers.views]

    def _after(self, turn: int) -> int:
        """Which slot's turn is next."""
        return (turn + 1) % SLOTS

    def _grow(self, size: int) -> None:
        """All ranks come here in the same exchange, since they send tensors of one shape."""
        if self._device.type == "cuda":
            if private.is_recording():
                raise RuntimeError("a recorded step sends larger tensors than the steps before it")
            torch.cuda.synchronize(self._device)
        self._size = paged(size)
        self._peers = Peers(SLOTS * self._size, self._device, self.group)
        self._met.clear()

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """On the wire's stream, when all ranks have come here."""
        assert self._peers is not None, "there is room"
        with self._lane():
            self._peers.barrier()
            self._met.append(self._lane.mark())
            yield

    def _on_its_way(self, x: Tensor) -> Tensor:
        if (mark := self._lane.mark()) is not None:
            private.arrives(x, mark)
        return x


def _take(to: Tensor, value: Tensor, dim: int) -> None:
    """Copy what lies in one piece to its place, piece by piece where that is in several."""
    lead = math.prod(to.shape[:dim])
    if lead > PIECES:
        to.copy_(torch.empty_like(value).copy_(value))
        return
    rest = to.shape[dim:]
    for place, piece in zip(to.view(lead, *rest), value.view(lead, *rest), strict=True):
        place.copy_(piece)


def _sum(own: Tensor, others: Sequence[Tensor]) -> Tensor:
    """In float32 at least, rounded once."""
    if len(others) == 1:
        return own.add_(others[0])
    total = own.to(torch.promote_types(own.dtype, torch.float32)) if own.is_floating_point() else own
    for x in others:
        total += x
    return total.to(own.dtype)


def _view(memory: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return memory[: math.prod(shape) * dtype.itemsize].view(dtype).view(*shape)


def _along(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


_library = torch.library.Library("ndcompile", "FRAGMENT")
_library.define("gather_by_copies(Tensor x, int dim, int ranks, str group) -> Tensor")
_library.define("scatter_by_copies(Tensor x, int dim, int ranks, str group) -> Tensor")
_ops = torch.ops.ndcompile


@torch.library.impl(_library, "gather_by_copies", "CompositeExplicitAutograd")
def _gather(x: Tensor, dim: int, ranks: int, group: str) -> Tensor:
    return _wires[group].gather(x, dim)


@torch.library.impl(_library, "scatter_by_copies", "CompositeExplicitAutograd")
def _scatter(x: Tensor, dim: int, ranks: int, group: str) -> Tensor:
    return _wires[group].scatter(x, dim)


@torch.library.register_fake("ndcompile::gather_by_copies", lib=_library)
def _gathered(x: Tensor, dim: int, ranks: int, group: str) -> Tensor:
    return x.new_empty(_along(x.shape, dim, x.shape[dim] * ranks))


@torch.library.register_fake("ndcompile::scatter_by_copies", lib=_library)
def _scattered(x: Tensor, dim: int, ranks: int, group: str) -> Tensor:
    return x.new_empty(_along(x.shape, dim, x.shape[dim] // ranks))


STARTS = {"all_gather": _ops.gather_by_copies.default, "reduce_scatter": _ops.scatter_by_copies.default}
"""The ops that start each kind of exchange."""
