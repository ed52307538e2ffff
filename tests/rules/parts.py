"""An op on the parts of one rank, as emitted code writes it; and the ops that communicate, each rank in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx

from ndcompile import runtime
from ndcompile.rules.registry import arguments, operands, signature
from ndcompile.rules.trial import Outputs, Place
from ndcompile.runtime import loss
from ndcompile.runtime.factory import arange
from ndcompile.runtime.mesh import Ranks

SYMBOLS = {"b": 2, "s": 3}
"""What the symbols of sizes are when a case runs."""

Given = tuple[tuple[Any, ...], dict[str, Any]]
Part = Callable[[Callable[..., Any], Given, Place, fx.Node], Any]


def unchanged(target: Callable[..., Any], given: Given, place: Place, node: fx.Node) -> Any:
    return target(*given[0], **given[1])


def _reshaped(target: Callable[..., Any], given: Given, place: Place, node: fx.Node) -> Tensor:
    reshaped: Tensor = given[0][0].reshape(place.shape)
    return reshaped


def _expanded(target: Callable[..., Any], given: Given, place: Place, node: fx.Node) -> Tensor:
    expanded: Tensor = given[0][0].expand(place.shape)
    return expanded


def _unflattened(target: Callable[..., Any], given: Given, place: Place, node: fx.Node) -> Any:
    named = arguments(node)
    at = named["dim"] % len(named["self"].meta["shape"])
    return target(given[0][0], named["dim"], list(place.shape[at : at + len(named["sizes"])]))


def _filled(target: Callable[..., Any], given: Given, place: Place, node: fx.Node) -> Any:
    return target(list(place.shape), *given[0][1:], **given[1])


def _born(target: Callable[..., Any], given: Given, place: Place, node: fx.Node) -> Tensor:
    named = arguments(node)
    axis = over(place, [a for a, row in enumerate(place.rows) if row.output.kind == "S"])
    return arange(named.get("start", 0), named["end"], named.get("step", 1), axis, dtype=named.get("dtype"))


def _looked_up(target: Callable[..., Any], given: Given, place: Place, node: fx.Node) -> Tensor:
    weight, ids, *rest = given[0]
    return runtime.embedding(ids, weight, *rest, **_algorithm(place, node, 0))


def _loss(target: Callable[..., Any], given: Given, place: Place, node: fx.Node) -> Tensor:
    return runtime.cross_entropy(*given[0], **{**given[1], **_algorithm(place, node, 1)})


def _algorithm(place: Place, node: fx.Node, dim: int) -> dict[str, Any]:
    """The axes over which a masked lookup or a special algorithm works, and the whole size of what they shard."""
    bound, table = signature(node), operands(node)[0]
    axes = [a for a, row in enumerate(place.rows) if row.factor in bound.masked | bound.special]
    return dict(axis=over(place, axes), size=table.meta["shape"][dim].value(SYMBOLS)) if axes else {}


def _random(target: Callable[..., Any], given: Given, place: Place, node: fx.Node) -> Any:
    shape = [int(size.value(SYMBOLS)) for size in node.meta["shape"]]
    axes = {d: [a for a, row in enumerate(place.rows) if row.output.dim == d] for d in range(len(shape))}
    shards = {d: over(place, found) for d, found in axes.items() if found}
    return target(*given[0], **given[1], shards=shards, sizes={d: shape[d] for d in shards})


def _drawn(target: Callable[..., Any], given: Given, place: Place, node: fx.Node) -> Any:
    return _random(target, ((place.shape, *given[0][1:]), given[1]), place, node)


def over(place: Place, axes: Sequence[int]) -> Ranks:
    """The ranks of some of the axes as one, the first major; their group is named for the indices on the others."""
    index, size = 0, 1
    for axis in axes:
        index, size = index * place.ways[axis] + place.index[axis], size * place.ways[axis]
    others = tuple(-1 if axis in axes else i for axis, i in enumerate(place.index))
    return Ranks("axis", size, index, str(others))


PARTS: dict[str, Part] = {
    **dict.fromkeys(
        [f"aten.{name}" for name in "view.default reshape.default _unsafe_view.default".split()]
        + [f"aten.squeeze.{name}" for name in ("default", "dim", "dims")],
        _reshaped,
    ),
    "aten.expand.default": _expanded,
    "aten.unflatten.int": _unflattened,
    **dict.fromkeys(("aten.full.default", "aten.zeros.default", "aten.ones.default"), _filled),
    **dict.fromkeys([f"aten.arange.{name}" for name in ("default", "start", "start_step")], _born),
    "aten.embedding.default": _looked_up,
    "runtime.cross_entropy": _loss,
    "runtime.dropout": _random,
    "runtime.uniform": _drawn,
    "runtime.attention_with_dropout": _random,
}


def together(jobs: Sequence[Callable[[], Outputs]]) -> list[Outputs]:
    """Each rank in a thread of its own; their all-reduces meet."""
    exchange = _Exchange(len(jobs))
    results: list[Any] = [None] * len(jobs)

    def work(rank: int) -> None:
        try:
            results[rank] = jobs[rank]()
        except Exception as error:  # raised again by the caller
            results[rank] = error
            exchange.barrier.abort()

    with mock.patch.object(loss, "all_reduce", exchange.all_reduce):
        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(jobs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


class _Exchange:
    """An all-reduce between threads: all write, wait, read, wait."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, timeout=20)
        self.written: dict[str, dict[int, Tensor]] = {}
        self.lock = threading.Lock()

    def all_reduce(self, x: Tensor, axis: Ranks, op: str = "sum") -> Tensor:
        with self.lock:
            self.written.setdefault(axis.group, {})[axis.index] = x
        self.barrier.wait()
        group = [self.written[axis.group][i] for i in range(axis.size)] if axis.size > 1 else [x]
        reduced = torch.stack(group).sum(0) if op == "sum" else torch.stack(group).amax(0)
        self.barrier.wait()
        return reduced
