"""Whether emitted text does what a graph does, op by op: both run on the meta device, at the sizes that they have.

An op that computes is compared by its name, its numbers, and its operands: which other op (or parameter, or input)
made the memory that each lies in, and where in it. So it does not matter how a view was come by, nor in which order
ops stand that do not need each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ndcompile.runtime import private

Done = tuple[Any, ...]


@dataclass
class Log:
    """The ops that compute, in order. `numbers` are those of all different ones: one op on one value is one value."""

    numbers: dict[Done, int]
    done: list[Done] = field(default_factory=list)
    once: set[Done] = field(default_factory=set)
    made_by: dict[int, Any] = field(default_factory=dict)
    kept: list[Tensor] = field(default_factory=list)

    def name(self, tensors: Mapping[str, Tensor]) -> None:
        """What tensors are called that no op made."""
        for name, tensor in tensors.items():
            self.made_by.setdefault(self._memory(tensor), name)

    def run(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do an op, and write it down unless it is a view, or a copy of what another made."""
        results = op(*args, **kwargs)
        if op == torch.ops.aten.clone.default and _fills_its_memory(args[0], results):
            self.made_by[self._memory(results)] = self.made_by.get(self._memory(args[0]), "from nowhere")
            return results
        if all(self._memory(y) in self.made_by for y in _tensors(results)) and not op._schema.is_mutable:
            return results  # a view
        if op == torch.ops.aten.arange.start and args[0] == 0:  # as `arange(n)` is written
            op, args = torch.ops.aten.arange.default, args[1:]
        leaves = pytree.tree_leaves((args, kwargs))
        given = [self._seen(leaf) for leaf in leaves if not _said_by_the_result(leaf)]
        done = (str(op), *given, *(f"→ {list(y.shape)} {y.dtype}" for y in _tensors(results)))
        if op._schema.is_mutable or done not in self.once:  # again on the same values, it gives the same
            self.once.add(done)
            self.done.append(done)
        number = self.numbers.setdefault(done, len(self.numbers))
        for place, y in enumerate(_tensors(results)):
            self.made_by.setdefault(self._memory(y), (number, place))
        return results

    def _memory(self, tensor: Tensor) -> int:
        self.kept.append(tensor)
        found = private.storage_id(tensor)
        assert found is not None, "no DTensor is in emitted text"
        return found

    def _seen(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            whole = isinstance(leaf, float) and leaf.is_integer()
            return str(int(leaf) if whole else leaf)  # of which kind the number is, the result's dtype says
        place = self.made_by.get(self._memory(leaf), "from nowhere")
        return (place, tuple(leaf.shape), leaf.stride(), leaf.storage_offset(), leaf.dtype)


def _fills_its_memory(source: Tensor, copy: Tensor) -> bool:
    """Whether each place of the copy's memory holds what stands at the same place of the source's."""
    whole = all(x.untyped_storage().nbytes() == x.numel() * x.itemsize for x in (source, copy))
    return whole and source.stride() == copy.stride()


def _said_by_the_result(leaf: Any) -> bool:
    """A dtype, or what is left out as well as written."""
    return leaf is None or leaf is False or isinstance(leaf, torch.dtype)


def _tensors(results: Any) -> Iterable[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, Tensor)]


def difference(one: Callable[[], Any], two: Callable[[], Any], named: Mapping[str, Tensor]) -> tuple[int, str]:
    """How many ops both do, and where they begin to differ (empty where they do not)."""
    logs, numbers = [], dict[Done, int]()
    for run in (one, two):
        log = Log(numbers)
        log.name(named)
        with torch.no_grad(), private.dispatched(log.run):
            run()
        logs.append(log.done)
    graph, text = logs
    missing, more = (next(iter(Counter(a) - Counter(b)), None) for a, b in ((graph, text), (text, graph)))
    told = [f"{_shown(op)} is in the {where} alone" for op, where in ((missing, "graph"), (more, "text")) if op]
    return len(graph), "\n".join(told)


def _shown(done: Done) -> str:
    name, *given = done
    return f"{name}({', '.join(str(g[0]) + str(list(g[1])) if isinstance(g, tuple) else g for g in given)})"
