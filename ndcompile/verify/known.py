"""True numbers beside the field's: what is made of sizes and constants alone can be looked at where it cannot."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from ndcompile.runtime import private
from ndcompile.verify.domain import is_element
from ndcompile.verify.precise import precise

MOST = 4000
"""So many tensors are held, the latest."""


class Known:
    """The true values of tensors of the field that depend on whole numbers and constants alone.

    A tensor is found by its memory and how it lies in it. It is held with its true value, so that its memory is not
    given to another meanwhile.
    """

    def __init__(self) -> None:
        self._held: OrderedDict[Any, tuple[Tensor, Tensor]] = OrderedDict()
        self._memory: dict[Any, int] = {}

    def keep(self, made: Any, true: Any) -> None:
        """Say what the tensors of a result are in truth."""
        for x, value in zip(pytree.tree_leaves(made), pytree.tree_leaves(true), strict=True):
            if _is_float(x):
                place = _place(x)
                if place not in self._held:
                    self._memory[place[0]] = self._memory.get(place[0], 0) + 1
                self._held[place] = x, precise(value)
        while len(self._held) > MOST:
            self._drop(next(iter(self._held)))

    def concerns(self, args: tuple[Any, ...]) -> bool:
        """Whether an op on these may be of known tensors alone, or change one: the first float lies where one is."""
        for x in args:
            if _is_float(x):
                return private.storage_id(x) in self._memory
        return True

    def follow(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> None:
        """Keep what `op` made of known tensors; forget a known one that it changed by others."""
        true = self.of(op, args, kwargs)
        if true is not None:
            self.keep(made, true)
        elif op._schema.is_mutable and isinstance(args[0], Tensor):
            for place in [p for p in self._held if p[0] == private.storage_id(args[0])]:
                self._drop(place)

    def of(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `op` gives in truth; none unless every float tensor among its operands is known."""
        floats = [x for x in pytree.tree_leaves((args, kwargs)) if _is_float(x)]
        if not floats or not all(_place(x) in self._held for x in floats):
            return None
        args, kwargs = pytree.tree_map_only(Tensor, self._true, (args, kwargs))
        return op(*args, **kwargs)

    def value(self, x: Tensor) -> Tensor | None:
        """What a tensor of the field is in truth, if that is known."""
        held = self._held.get(_place(x))
        return None if held is None else held[1]

    def _true(self, x: Tensor) -> Tensor:
        return self._held[_place(x)][1] if _is_float(x) else x

    def _drop(self, place: Any) -> None:
        del self._held[place]
        self._memory[place[0]] -= 1
        if not self._memory[place[0]]:
            del self._memory[place[0]]


def _place(x: Tensor) -> tuple[Any, ...]:
    return private.storage_id(x), x.storage_offset(), tuple(x.shape), x.stride()


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and is_element(x)
