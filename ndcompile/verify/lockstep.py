"""All ranks of a mesh in one process: each runs in a thread of its own, one at a time, and waits at its collectives.

A collective is a function of the list of the ranks' tensors. Ranks that do not come to the same collective are an
error that names both; a result that is used before it was waited for holds garbage.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ndcompile.mesh import MeshSpec
from ndcompile.runtime import Mesh, private
from ndcompile.verify.domain import Domain, base_name, namespace
from ndcompile.verify.numbered import Numbered

T = TypeVar("T")
GARBAGE = 12345
"""What a collective's result holds until it is waited for."""


class RanksDisagree(RuntimeError):
    """The ranks do not call the same collectives in the same order: on real ranks they would hang, or worse."""


class NeverWaitedFor(RuntimeError):
    """A collective was started whose result nobody waited for."""


class _Abort(BaseException):
    """Ends the thread of a rank whose run is over."""


@dataclass
class Request:
    """A collective that a rank has come to."""

    op: str
    group: str
    values: tuple[Tensor, ...]
    options: tuple[Any, ...]
    line: str

    @cached_property
    def kind(self) -> tuple[Any, ...]:
        """What ranks must agree on. How many rows go to whom is each rank's own: `perform` looks at both ends."""
        options = () if self.op == "all_to_all_single" else self.options
        return self.op, self.group, tuple((tuple(x.shape), x.dtype) for x in self.values), options

    def __str__(self) -> str:
        return f"{self.op}({self.group}) of {', '.join(str(list(x.shape)) for x in self.values)}{self.line}"


@dataclass
class _Rank(Generic[T]):
    number: int
    go: SimpleQueue[None] = field(default_factory=SimpleQueue)
    request: Request | None = None
    answer: list[Tensor] | None = None
    result: T | None = None
    error: BaseException | None = None
    done: bool = False
    flying: dict[int | None, Tensor] = field(default_factory=dict)


def mesh_of(spec: MeshSpec, rank: int) -> Mesh:
    """The mesh seen from a rank; a group is named by its axes."""
    names = spec.names
    subsets = [tuple(n for i, n in enumerate(names) if chosen >> i & 1) for chosen in range(1, 1 << len(names))]
    return Mesh(spec, rank, {axes: ",".join(axes) for axes in subsets})


def run_ranks(
    spec: MeshSpec, domain: Domain, function: Callable[[int], T], numbered: Numbered | None = None
) -> list[T]:
    """`function(rank)` on every rank of the mesh, in this arithmetic: what each returns, in rank order.

    Raises what a rank raises, and `RanksDisagree`.
    """
    return _Lockstep(spec, domain, function, numbered).run()


def run_one(domain: Domain, function: Callable[[], T]) -> T:
    """`function()` on one device, in this arithmetic."""
    with torch.autograd.set_multithreading_enabled(False), private.dispatched(domain.run):
        return function()


class _Lockstep(Generic[T]):
    def __init__(self, spec: MeshSpec, domain: Domain, function: Callable[[int], T], numbered: Numbered | None) -> None:
        self.spec, self.domain, self.function, self.numbered = spec, domain, function, numbered
        self.ranks: list[_Rank[T]] = [_Rank(r) for r in range(spec.world_size)]
        self.ready = deque(self.ranks)
        self.back: SimpleQueue[BaseException | None] = SimpleQueue()
        self.over = False
        self.members: dict[tuple[str, int], list[int]] = {}

    def run(self) -> list[T]:
        threads = [threading.Thread(target=self._live, args=(rank,), daemon=True) for rank in self.ranks]
        for thread in threads:
            thread.start()
        try:
            self._next()
            if (error := self.back.get()) is not None:
                raise error
            if waiting := [rank for rank in self.ranks if not rank.done]:
                self._disagree(waiting[0])
        finally:
            self.over = True
            for rank, thread in zip(self.ranks, threads, strict=True):
                rank.go.put(None)
                thread.join()
        return [rank.result for rank in self.ranks]  # type: ignore[misc]

    # ---- the threads of the ranks -----------------------------------------------------------------------------------

    def _live(self, rank: _Rank[T]) -> None:
        rank.go.get()
        try:
            if not self.over:
                own = private.dispatched(partial(self._op, rank))
                with torch.autograd.set_multithreading_enabled(False), own:  # a GPU's ranks share one such thread
                    rank.result = self.function(rank.number)
                if rank.flying:
                    raise NeverWaitedFor(f"rank {rank.number} started {len(rank.flying)} collectives too many")
        except BaseException as error:  # whatever ends the rank is raised where the run was begun
            rank.error = error
        rank.done = True
        self._pass_on(rank)

    def _op(self, rank: _Rank[T], op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.over:  # where the run was begun something was raised: a limit of time, or an interrupt
            raise _Abort
        if namespace(op) == "_c10d_functional":
            return self._collective(rank, base_name(op), args)
        if self.numbered is not None:
            return self.numbered.run(op, args, kwargs)
        return self.domain.run(op, args, kwargs)

    def _collective(self, rank: _Rank[T], op: str, args: tuple[Any, ...]) -> Tensor | list[Tensor]:
        if op == "wait_tensor":
            return self._wait(rank, args[0])
        value, *options, group = args
        several = isinstance(value, (list, tuple))
        values = tuple(value) if several else (value,)
        rank.request = Request(single(op), group, values, tuple(map(_plain, options)), _line())
        self._pass_on(rank)
        rank.go.get()
        if self.over:
            raise _Abort
        assert rank.answer is not None, "the scheduler answers a request before it lets the rank go on"
        if op.endswith("_") and self.numbered is not None:
            for value in values:
                self.numbered.wrote(value, GARBAGE)
        started = [
            value.fill_(GARBAGE) if op.endswith("_") else torch.full_like(answer, GARBAGE)
            for value, answer in zip(values, rank.answer, strict=True)
        ]
        rank.flying |= {private.storage_id(x): answer for x, answer in zip(started, rank.answer, strict=True)}
        return started if several else started[0]

    def _wait(self, rank: _Rank[T], started: Tensor) -> Tensor:
        finished = rank.flying.pop(private.storage_id(started), None)
        if finished is not None and self.numbered is not None:
            self.numbered.wrote(started, finished)
        return started if finished is None else started.copy_(finished)

    # ---- whose turn it is: said by the rank whose turn ends, which saves every second change of threads -------------

    def _pass_on(self, rank: _Rank[T]) -> None:
        """After a rank's turn, which ended at a collective, or for good."""
        if self.over:
            return
        try:
            if rank.error is not None:
                raise rank.error
            if not rank.done:
                self.ready.extend(self._meet(rank))
        except BaseException as error:  # whatever ends the run is raised where it was begun
            self.back.put(error)
        else:
            self._next()

    def _next(self) -> None:
        if self.ready:
            self.ready.popleft().go.put(None)
        else:
            self.back.put(None)

    def _meet(self, rank: _Rank[T]) -> list[_Rank[T]]:
        """If all ranks of this one's group have come to a collective on it: do it, and let them go on."""
        assert rank.request is not None, "a rank stops at a collective"
        group = [self.ranks[r] for r in self._members(rank.request.group, rank.number)]
        requests = [other.request for other in group if other.request and other.request.group == rank.request.group]
        if len(requests) < len(group):
            return []
        if any(r.kind != requests[0].kind for r in requests):
            self._disagree(rank)
        answers = perform(self.domain, requests)
        if self.numbered is not None:
            options = [r.options for r in requests]
            for i in range(len(answers[0])):
                given, brought = [r.values[i] for r in requests], [answer[i] for answer in answers]
                self.numbered.met(rank.request.op, options, given, brought)
        for other, answer in zip(group, answers, strict=True):
            other.request, other.answer = None, answer
        return group

    def _members(self, group: str, rank: int) -> list[int]:
        key = (group, rank)
        if key not in self.members:
            for members in self.spec.groups(*group.split(",")):
                for member in members:
                    self.members[group, member] = members
        return self.members[key]

    def _disagree(self, rank: _Rank[T]) -> None:
        request = rank.request
        assert request is not None
        others = [self.ranks[r] for r in self._members(request.group, rank.number)]
        odd = next((o for o in others if o.request is None or o.request.kind != request.kind), None)
        if odd is None:
            raise RanksDisagree(f"rank {rank.number} waits in {request}, which is never done")
        there = "has ended" if odd.request is None else f"is in {odd.request}"
        raise RanksDisagree(f"rank {rank.number} is in {request}, but rank {odd.number} {there}")


def single(op: str) -> str:
    """The collective that an op does: it may do several as one, or in the memory that it is given."""
    return op.removesuffix("_").removesuffix("_coalesced")


def perform(domain: Domain, requests: Sequence[Request]) -> list[list[Tensor]]:
    """A collective: from what each rank gives to what each gets, in the group's order."""
    each = zip(*(r.values for r in requests), strict=True)
    return [list(got) for got in zip(*(_perform(domain, requests, values) for values in each), strict=True)]


def _perform(domain: Domain, requests: Sequence[Request], values: Sequence[Tensor]) -> list[Tensor]:
    first, ranks = requests[0], len(requests)
    if first.op == "all_reduce":
        whole = domain.reduce(first.options[0], values)
        return [whole] * ranks
    if first.op == "all_gather_into_tensor":
        whole = torch.cat(list(values))
        return [whole] * ranks
    if first.op == "reduce_scatter_tensor":
        return list(domain.reduce(first.options[0], values).chunk(ranks))
    if first.op == "all_to_all_single":
        sent = [value.split(list(r.options[1])) for value, r in zip(values, requests, strict=True)]
        for i, request in enumerate(requests):
            coming, wanted = [len(parts[i]) for parts in sent], list(request.options[0])
            if coming != wanted:
                raise RanksDisagree(f"rank {i} of {request} waits for {wanted} rows, but {coming} are sent to it")
        return [torch.cat([parts[i] for parts in sent]) for i in range(ranks)]
    raise NotImplementedError(f"the collective {first.op}")


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _line() -> str:
    """Where in the emitted text this is, if it is in a forward."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.startswith("<ndcompile"):
            return f" at line {frame.f_lineno} of the emitted text"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
