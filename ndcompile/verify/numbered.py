"""The graph that the ranks of a run compute, as numbers: tensors of one number are computed alike.

Memory has a number, which stands for the op that wrote it, for what is no tensor among its arguments, and for the
numbers of the tensors among them. A sample's tensors have numbers by their names, and what a collective brings one by
what every rank gave. A cast between floating dtypes has the number of what is cast: the field has one dtype for all.
So if the results of two texts have the same numbers, the graphs behind them are the same, in whatever order and words
they were written; what leads to no result may differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ndcompile.runtime import private
from ndcompile.verify.domain import Domain

LARGEST = 1 << 16
"""Elements of what is kept at most: of more, a copy takes as long as most ops."""


@dataclass
class Known:
    """Of each application of an op its number, and by that what it gave, where that can be given again."""

    numbers: dict[tuple[Any, ...], int] = field(default_factory=dict)
    values: dict[int, Any] = field(default_factory=dict)


Memory = tuple[int, bool]
"""What is in a tensor's memory: its number, and whether that is another in another sample."""

CHOOSING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}
"""Ops by which what is computed depends on values, or on chance."""


class Graph(NamedTuple):
    """What the ranks of a run computed."""

    known: Known
    ends: Any
    """The keys of what the run ended with; None if it did not end."""
    depends: bool
    """Whether another sample of the same sizes may have another graph."""
    casts: bool
    """Whether floating dtypes other than float64 are named, so that in these there is another graph."""


class SharedMemory(Exception):
    """An op gave memory that an earlier one had made, which no schema says: numbers would be wrong."""


class Numbered:
    """The numbers of one run, which begins with tensors by name; those of a run with `known` are the same numbers, and
    what is known is not computed again.
    """

    def __init__(self, domain: Domain, given: Mapping[str, Tensor], known: Known | None = None) -> None:
        self.own = Known()
        self._domain, self._known, self._keeps = domain, known or Known(), known is None
        self._memory: dict[int | None, Memory] = {}
        self._held: list[Tensor] = []
        """Whose memory has a number: it is not given to another tensor meanwhile."""
        self._ends: Any = None
        self._depends = self._casts = False
        for name, x in given.items():
            self._put(x, (self._number("given", name), True))

    @property
    def graph(self) -> Graph:
        return Graph(self.own, self._ends, self._depends, self._casts)

    def end(self, values: Any) -> None:
        """The run has ended, and these are its results."""
        self._ends = self._key(values, {})

    def run(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the op gives in the domain, numbered."""
        taken: dict[int | None, bool] = {}
        number = self._number(id(op), self._key(args, taken), self._key(kwargs, taken) if kwargs else ())
        varies, (mutates, chooses) = True in taken.values(), _facts(op)
        made = self._made(number, op, args, kwargs, mutates)
        if op is private.CAST and _is_same(args[0], made):
            self._put(made, self._memory[private.storage_id(args[0])])
            return made
        for i, x in enumerate(made if isinstance(made, (list, tuple)) else (made,)):
            if not isinstance(x, Tensor):
                self._depends |= varies and x is not None
            elif (storage := private.storage_id(x)) not in taken:
                if storage in self._memory:
                    raise SharedMemory(f"{op} in {self._domain.name}")
                self._put(x, (self._number(number, i), varies))
        if varies and chooses:
            self._depends |= op is not torch.ops.aten.index.Tensor or _by_mask(args[1])
        if mutates:
            for name, x in _written(op._schema, args, kwargs):
                self._put(x, (self._number(number, name), varies))
        return made

    def _made(self, number: int, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mutates: bool) -> Any:
        if number in self._known.values and not self._domain.follows(args):
            return _copied(self._known.values[number])
        made = self._domain.run(op, args, kwargs)
        each = made if isinstance(made, (list, tuple)) else (made,)
        if self._keeps and not mutates and not self._domain.follows(args) and all(map(self._is_new, each)):
            self.own.values[number] = _copied(made)
        return made

    def _is_new(self, x: Any) -> bool:
        """Whether a result is one that a copy may stand for."""
        if not isinstance(x, Tensor):
            return x is None
        return x.is_contiguous() and x.numel() <= LARGEST and private.storage_id(x) not in self._memory

    def met(self, op: str, options: Any, given: Sequence[Tensor], brought: Sequence[Tensor]) -> None:
        """A collective: what each rank gives and gets."""
        taken: dict[int | None, bool] = {}
        number = self._number(op, self._key(options, taken), self._key(given, taken))
        varies = True in taken.values()
        for rank, x in enumerate(brought):
            whose = rank if op == "all_to_all_single" else None  # of others each gets a part of the same memory
            self._put(x, (self._number(number, whose), varies))

    def wrote(self, x: Tensor, value: Any) -> None:
        """A tensor was filled with another one, or with a number."""
        taken: dict[int | None, bool] = {}
        number = self._number("wrote", self._key((x, value), taken))
        self._put(x, (number, True in taken.values()))

    def _key(self, value: Any, taken: dict[int | None, bool]) -> Any:
        """What is the same of equal values: of a tensor its memory's number and how it lies in it.

        Notes in `taken` the memory of tensors, and whether that varies.
        """
        if isinstance(value, Tensor):
            storage = private.storage_id(value)
            number, taken[storage] = self._memory.get(storage) or self._constant(value)
            return number, value.storage_offset(), value.shape, value.stride(), value.dtype
        if isinstance(value, (list, tuple)):
            return tuple([self._key(each, taken) for each in value])
        if isinstance(value, dict):
            return tuple([(name, self._key(each, taken)) for name, each in value.items()])
        if isinstance(value, torch.dtype):
            self._casts |= value.is_floating_point and value != torch.float64
        return repr(value)

    def _constant(self, x: Tensor) -> Memory:
        """Of a tensor that no op made, and so the text alone."""
        held = torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())
        memory = self._number("constant", held.cpu().numpy().tobytes()), False
        self._put(x, memory)
        return memory

    def _put(self, x: Tensor, memory: Memory) -> None:
        self._memory[private.storage_id(x)] = memory
        self._held.append(x)

    def _number(self, *what: Any) -> int:
        known, own = self._known.numbers, self.own.numbers
        found = known.get(what)
        return own.setdefault(what, len(known) + len(own)) if found is None else found


def _copied(made: Any) -> Any:
    if isinstance(made, (list, tuple)):
        return tuple(map(_copied, made))
    return made.clone() if isinstance(made, Tensor) else made


def _is_same(x: Tensor, cast: Tensor) -> bool:
    """Whether the memory of both holds the same, where `cast` is one of floating dtypes in the field."""
    whole = x.is_contiguous() and x.numel() * x.itemsize == x.untyped_storage().nbytes()
    return whole and cast.is_contiguous() and x.dtype == cast.dtype == torch.float64


@cache
def _facts(op: Any) -> tuple[bool, bool]:
    """Whether an op writes to what it is given, and whether it may choose."""
    return op._schema.is_mutable, not CHOOSING.isdisjoint(op.tags)


def _by_mask(indices: Sequence[Tensor | None]) -> bool:
    """A lookup chooses where it is by a mask."""
    return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in indices)


def _written(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[tuple[str, int], Tensor]]:
    """The tensors that an op writes to, each with its place among the arguments."""
    for place, argument in enumerate(schema.arguments):
        if argument.is_write:
            value = args[place] if place < len(args) else kwargs[argument.name]
            for i, x in enumerate([value] if isinstance(value, Tensor) else value):
                yield (argument.name, i), x
