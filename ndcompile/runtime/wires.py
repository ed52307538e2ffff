"""Activations by copies: gathers and reduce-scatters that leave a GPU's multiprocessors to the computation.

A *wire* is memory of the ranks of a process group that all of them address. It has a name like a group's, under which
other collectives find the group itself. What is sent is put on the wire by the computing stream; a stream of its own
meets the other ranks at a barrier, and takes what they have sent.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
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

KEPT = 1000
"""Of so many places in slots the views are kept."""

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
    """Start the sum of which this rank keeps its part: `[…, ranks · n, …] → […, n, …]`; without a wire, along dim 0."""
    if by_copies(group):
        found: Tensor = _ops.scatter_by_copies.default(x, dim, ranks, group)
        return found
    return private.start_reduce_scatter(x, ranks, group)


def room(kind: str, shape: Sequence[int], dtype: torch.dtype, ranks: int) -> int:
    """The bytes of a slot in which a rank has what it sends in such an exchange of a tensor of this shape."""
    sent = math.prod(shape) * dtype.itemsize
    return sent if kind == "all_gather" else sent // ranks * (ranks - 1)


def paged(size: int) -> int:
    """The bytes that a slot takes where so many are needed."""
    return -(-size // PAGE) * PAGE


def record(wires: Iterable[str]) -> None:
    """What is recorded from now on finds all slots of these wires free each time that it is done."""
    for name in wires:
        _wires[name].record()


class Wire:
    """Slots in turn. A slot is taken again when all ranks have come to the exchange after its own: each comes there
    when it has taken what lay in it.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self._own, self._count = group.rank(), group.size()
        self._others = [(self._own + 1 + i) % self._count for i in range(self._count - 1)]
        self._spots = {
            "gathered": {rank: (rank, 0) for rank in range(self._count)},
            "sent": {rank: (self._own, self._area(self._own, rank)) for rank in self._others},
            "came": {rank: (rank, self._area(rank, self._own)) for rank in self._others},
        }
        self._device, self._lane = device, Lane(device)
        self._met: deque[torch.cuda.Event | None] = deque(maxlen=SLOTS)
        self._size = self._turn = 0
        self._peers: Peers | None = None
        self._places: dict[object, dict[int, Tensor]] = {}
        self._is_recorded = False

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """`[…, n, …] → […, ranks · n, …]`, in rank order along `dim`; to be waited for."""
        return self._on_its_way(self._gathered(x, dim)[0])

    def gather_and_multiply(
        self, x: Tensor, dim: int, factors: Sequence[Tensor], biases: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """The whole `[…, ranks · n, …, k]`, and its products with factors `[k, m]`: own rows while others come."""
        whole, marks = self._gathered(x, dim)
        products = [x.new_empty((*whole.shape[:-1], factor.shape[1])) for factor in factors]
        rows, places = self._rows(whole, dim), [self._rows(product, dim) for product in products]
        for rank in (self._own, *self._others):
            self._lane.join(marks.get(rank))
            for place, factor, bias in zip(places, factors, biases, strict=True):
                _multiply(place[rank], rows[rank], factor, bias)
        return [whole, *products]

    def scatter(self, x: Tensor, dim: int) -> Tensor:
        """`[…, ranks · n, …] → […, n, …]`, this rank's part of the sum; to be waited for."""
        parts = self._parts(x.contiguous(), dim)

        def put(to: Tensor, rank: int) -> None:
            to.copy_(parts[rank])

        return self._scattered(put, parts[0].shape, x, x.shape, dim)

    def multiply_and_scatter(
        self, rows: Sequence[Tensor], factors: Sequence[Tensor], bias: Tensor | None, shape: Sequence[int], dim: int
    ) -> Tensor:
        """The same of the sum of products `[N, k] @ [k, m]`, which is of this shape: the others' rows come first."""
        parts = [self._rows(x.reshape(*shape[:-1], x.shape[-1]).contiguous(), dim) for x in rows]

        def put(to: Tensor, rank: int) -> None:
            for number, (part, factor) in enumerate(zip(parts, factors, strict=True)):
                _multiply(to, part[rank], factor, to if number else bias)

        return self._scattered(put, (*parts[0][0].shape[:-1], shape[-1]), rows[0], shape, dim)

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

    def _parts(self, whole: Tensor, dim: int) -> tuple[Tensor, ...]:
        """What each rank has of a contiguous whole along `dim`: `[pieces, length]`."""
        length = whole.shape[dim] // self._count * math.prod(whole.shape[dim + 1 :])
        return whole.view(math.prod(whole.shape[:dim]), self._count, length).unbind(1)

    def _rows(self, whole: Tensor, dim: int) -> tuple[Tensor, ...]:
        """The same as matrices: `[n, k]`, or `[pieces, n, k]` where that is in several."""
        pieces, n = math.prod(whole.shape[:dim]), whole.shape[dim] // self._count * math.prod(whole.shape[dim + 1 : -1])
        if pieces == 1:
            return whole.view(self._count, n, whole.shape[-1]).unbind(0)
        return whole.view(pieces, self._count, n, whole.shape[-1]).unbind(1)

    def _gathered(self, x: Tensor, dim: int) -> tuple[Tensor, dict[int, torch.cuda.Event | None]]:
        """The whole, of which own parts are there, and by rank when theirs are."""
        self._next(room("all_gather", x.shape, x.dtype, self._count))
        whole = x.new_empty(_along(x.shape, dim, x.shape[dim] * self._count))
        parts = self._parts(whole, dim)
        sent = self._spaces("gathered", parts[0].shape, x.dtype)
        x = x.reshape(parts[0].shape)
        for place in (sent[self._own], parts[self._own]):
            place.copy_(x)
        marks = {}
        with self._beside():
            for rank in self._others:
                _take(parts[rank], sent[rank])
                marks[rank] = self._lane.mark()
        return whole, marks

    def _scattered(
        self, put: Callable[[Tensor, int], None], part: Sequence[int], like: Tensor, shape: Sequence[int], dim: int
    ) -> Tensor:
        """The sum of what all ranks `put` for this one, of which own parts are put while those of others travel.

        Each puts a tensor of the shape `part`; the whole would be of this `shape`.
        """
        self._next(room("reduce_scatter", shape, like.dtype, self._count))
        sent = self._spaces("sent", part, like.dtype)
        came = self._spaces("came", part, like.dtype)
        for rank in self._others:
            put(sent[rank], rank)
        with self._beside():
            taken = [like.new_empty(part).copy_(came[rank]) for rank in self._others]
        put(total := like.new_empty(part), self._own)
        with self._lane():
            total = _sum(total, taken)
        return self._on_its_way(total.view(_along(shape, dim, shape[dim] // self._count)))

    def _area(self, sender: int, receiver: int) -> int:
        """Which of the areas of a sender's slot is the receiver's."""
        return (receiver - sender - 1) % self._count

    def _spaces(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> dict[int, Tensor]:
        """For ranks the place of this shape in some rank's slot, after so many others: made once, and kept."""
        key = name, self._turn, tuple(shape), dtype
        if key not in self._places:
            assert self._peers is not None, "there is room"
            if len(self._places) > KEPT:
                self._places.clear()
            size, start = math.prod(shape) * dtype.itemsize, self._turn * self._size
            self._places[key] = {
                rank: self._peers.views[owner][start + after * size :][:size].view(dtype).view(*shape)
                for rank, (owner, after) in self._spots[name].items()
            }
        return self._places[key]

    def _next(self, size: int) -> None:
        """Turn to the next slot, with room for so many bytes; what lay in it has been taken."""
        if size > self._size:
            self._grow(size)
        elif self._is_recorded and not private.is_recording():
            self._free()  # recorded exchanges may have taken place since
        self._turn = self._after(self._turn)
        if len(self._met) == SLOTS:
            self._lane.join(self._met[1])

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
        self._places.clear()
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


def _take(to: Tensor, value: Tensor) -> None:
    """Copy what lies in one piece to its place, piece by piece where that is in several: `[pieces, length]`."""
    if to.shape[0] > PIECES:
        to.copy_(torch.empty_like(value).copy_(value))
        return
    for place, piece in zip(to.unbind(), value.unbind(), strict=True):
        place.copy_(piece)


def _sum(own: Tensor, others: Sequence[Tensor]) -> Tensor:
    """In float32 at least, rounded once."""
    if len(others) == 1:
        return own.add_(others[0])
    total = own.to(torch.promote_types(own.dtype, torch.float32)) if own.is_floating_point() else own
    for x in others:
        total += x
    return total.to(own.dtype)


def _multiply(to: Tensor, rows: Tensor, factor: Tensor, more: Tensor | None) -> None:
    """`to = rows @ factor (+ more)`, of several matrices by one batched product."""
    if rows.dim() == 2:
        torch.mm(rows, factor, out=to) if more is None else torch.addmm(more, rows, factor, out=to)
        return
    factor = factor.expand(rows.shape[0], -1, -1)
    torch.bmm(rows, factor, out=to) if more is None else torch.baddbmm(more, rows, factor, out=to)


def _along(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


_library = torch.library.Library("ndcompile", "FRAGMENT")
_library.define("gather_by_copies(Tensor x, int dim, int ranks, str group) -> Tensor")
_library.define("scatter_by_copies(Tensor x, int dim, int ranks, str group) -> Tensor")
_library.define(
    "gather_and_multiply(Tensor x, int dim, int ranks, str group, Tensor[] factors, Tensor?[] biases) -> Tensor[]"
)
_library.define(
    "multiply_and_scatter(Tensor[] rows, Tensor[] factors, Tensor? bias, int[] shape, int dim, int ranks, str group)"
    " -> Tensor"
)
_ops = torch.ops.ndcompile


@torch.library.impl(_library, "gather_by_copies", "CompositeExplicitAutograd")
def _gather(x: Tensor, dim: int, ranks: int, group: str) -> Tensor:
    return _wires[group].gather(x, dim)


@torch.library.impl(_library, "scatter_by_copies", "CompositeExplicitAutograd")
def _scatter(x: Tensor, dim: int, ranks: int, group: str) -> Tensor:
    return _wires[group].scatter(x, dim)


@torch.library.impl(_library, "gather_and_multiply", "CompositeExplicitAutograd")
def _gather_and_multiply(
    x: Tensor, dim: int, ranks: int, group: str, factors: list[Tensor], biases: list[Tensor | None]
) -> list[Tensor]:
    return _wires[group].gather_and_multiply(x, dim, factors, biases)


@torch.library.impl(_library, "multiply_and_scatter", "CompositeExplicitAutograd")
def _multiply_and_scatter(
    rows: list[Tensor], factors: list[Tensor], bias: Tensor | None, shape: list[int], dim: int, ranks: int, group: str
) -> Tensor:
    return _wires[group].multiply_and_scatter(rows, factors, bias, shape, dim)


@torch.library.register_fake("ndcompile::gather_by_copies", lib=_library)
def _gathered(x: Tensor, dim: int, ranks: int, group: str) -> Tensor:
    return x.new_empty(_along(x.shape, dim, x.shape[dim] * ranks))


@torch.library.register_fake("ndcompile::scatter_by_copies", lib=_library)
def _scattered(x: Tensor, dim: int, ranks: int, group: str) -> Tensor:
    return x.new_empty(_along(x.shape, dim, x.shape[dim] // ranks))


@torch.library.register_fake("ndcompile::gather_and_multiply", lib=_library)
def _gathered_and_multiplied(
    x: Tensor, dim: int, ranks: int, group: str, factors: list[Tensor], biases: list[Tensor | None]
) -> list[Tensor]:
    whole = _gathered(x, dim, ranks, group)
    return [whole, *(whole.new_empty((*whole.shape[:-1], factor.shape[1])) for factor in factors)]


@torch.library.register_fake("ndcompile::multiply_and_scatter", lib=_library)
def _multiplied_and_scattered(
    rows: list[Tensor], factors: list[Tensor], bias: Tensor | None, shape: list[int], dim: int, ranks: int, group: str
) -> Tensor:
    return rows[0].new_empty(_along(shape, dim, shape[dim] // ranks))


GATHER_AND_MULTIPLY, MULTIPLY_AND_SCATTER = _ops.gather_and_multiply.default, _ops.multiply_and_scatter.default
STARTS = {"all_gather": _ops.gather_by_copies.default, "reduce_scatter": _ops.scatter_by_copies.default}
"""The ops that start each kind of exchange."""
