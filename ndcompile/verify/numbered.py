"""The graph that the ranks of a run compute, as numbers: tensors of one number are computed alike.

Memory has a number, which stands for the op that wrote it, for what is no tensor among its arguments, and for the
numbers of the tensors among them. A sample's tensors have numbers by their names, and what a collective brings one by
what every rank gave. A cast between floating dtypes has the number of what is cast: the field has one dtype for all.
So if the results of two texts have the same numbers, the graphs behind them are the same, in whatever order and words
they were written; what leads to no result may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ndcompile.runtime import private

Known = dict[tuple[Any, ...], int]
"""Of each application of an op its number."""

Memory = tuple[int, bool]
"""What is in a tensor's memory: its number, and whether that is another in another sample."""

CHOOSING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}
"""Ops by which what is computed depends on values, or on chance."""


class Numbered:
    """The numbers of one run, which begins with tensors by name; of a run with `known` they are the same numbers."""

    def __init__(self, given: Mapping[str, Tensor], known: Known | None = None) -> None:
        self.own: Known = {}
        self._known = known or {}
        self._memory: dict[int | None, Memory] = {}
        self._held: list[Tensor] = []
        """Whose memory has a number: it is not given to another tensor meanwhile."""
        self.depends = False
        """Whether another sample of the same sizes may have another graph."""
        self.casts = False
        """Whether the program names other floating dtypes than float64, so that in these there is another graph."""
        for name, x in given.items():
            self._put(x, (self._number("given", name), True))

    def run(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]) -> Any:
        """What `run(op, args, kwargs)` gives, numbered."""
        taken: dict[int | None, Memory] = {}
        number = self._number(id(op), self._key(args, taken), self._key(kwargs, taken))
        varies = any(memory[1] for memory in taken.values())
        made = run(op, args, kwargs)
        if op is torch.ops.aten._to_copy.default and _is_same(args[0], made):
            self._put(made, self._memory[private.storage_id(args[0])])
            return made
        for i, x in enumerate(made if isinstance(made, (list, tuple)) else (made,)):
            if not isinstance(x, Tensor):
                self.depends |= varies and x is not None
            elif (storage := private.storage_id(x)) not in taken:
                assert storage not in self._memory, f"{op} gives another tensor's memory"
                self._put(x, (self._number(number, i), varies))
        self.depends |= varies and _chooses(op, args)
        if op._schema.is_mutable:
            for name, x in _written(op._schema, args, kwargs):
                self._put(x, (self._number(number, name), varies))
        return made

    def met(self, op: str, options: Any, given: Sequence[Tensor], brought: Sequence[Tensor]) -> None:
        """A collective: what each rank gives and gets."""
        taken: dict[int | None, Memory] = {}
        number = self._number(op, self._key(options, taken), self._key(given, taken))
        varies = any(memory[1] for memory in taken.values())
        for rank, x in enumerate(brought):
            whose = rank if op == "all_to_all_single" else None  # of others each gets a part of the same memory
            self._put(x, (self._number(number, whose), varies))

    def wrote(self, x: Tensor, value: Any) -> None:
        """A tensor was filled with another one, or with a number."""
        taken: dict[int | None, Memory] = {}
        number = self._number("wrote", self._key((x, value), taken))
        self._put(x, (number, any(memory[1] for memory in taken.values())))

    def key(self, value: Any) -> Any:
        """What is the same of equal values: of a tensor its memory's number and how it lies in it."""
        return self._key(value, {})

    def _key(self, value: Any, taken: dict[int | None, Memory]) -> Any:
        """Notes the memory of tensors in `taken`."""
        if isinstance(value, Tensor):
            storage = private.storage_id(value)
            memory = taken[storage] = self._memory.get(storage) or self._constant(value)
            return memory[0], value.storage_offset(), value.shape, value.stride(), value.dtype
        if isinstance(value, (list, tuple)):
            return tuple([self._key(each, taken) for each in value])
        if isinstance(value, dict):
            return tuple([(name, self._key(each, taken)) for name, each in value.items()])
        if isinstance(value, torch.dtype):
            self.casts |= value.is_floating_point and value != torch.float64
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
        found = self._known.get(what)
        return self.own.setdefault(what, len(self._known) + len(self.own)) if found is None else found


def _is_same(x: Tensor, cast: Tensor) -> bool:
    """Whether the memory of both holds the same, where `cast` is one of floating dtypes in the field."""
    whole = x.is_contiguous() and x.numel() * x.itemsize == x.untyped_storage().nbytes()
    return whole and cast.is_contiguous() and x.dtype == cast.dtype == torch.float64


def _chooses(op: Any, args: tuple[Any, ...]) -> bool:
    """A lookup chooses where it is by a mask."""
    if op is torch.ops.aten.index.Tensor:
        return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    return not CHOOSING.isdisjoint(op.tags)


def _written(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[tuple[str, int], Tensor]]:
    """The tensors that an op writes to, each with its place among the arguments."""
    for place, argument in enumerate(schema.arguments):
        if argument.is_write:
            value = args[place] if place < len(args) else kwargs[argument.name]
            for i, x in enumerate([value] if isinstance(value, Tensor) else value):
                yield (argument.name, i), x
