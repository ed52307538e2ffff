"""Concrete calls as trials: the node that propagation would see, and the op on parts as emitted code runs it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx

from ndcompile import runtime
from ndcompile.rules.registry import arguments, operands, signature
from ndcompile.rules.trial import Outputs, Place, Trial, one_by_one
from ndcompile.runtime import loss
from ndcompile.runtime.factory import arange
from ndcompile.runtime.mesh import Ranks
from ndcompile.size import Size

WAYS = ((2,), (3,), (2, 2), (2, 3))
SYMBOLS = {"b": 2, "s": 3}
"""What the symbols of sizes are when a case runs."""


@dataclass(frozen=True)
class Spec:
    """A tensor argument: its sizes (numbers or monomials), what it holds, whether it carries a gradient."""

    sizes: tuple[int | Size, ...]
    make: Callable[[tuple[int, ...]], Tensor]
    grad: bool = True

    @property
    def shape(self) -> tuple[Size, ...]:
        return tuple(size if isinstance(size, Size) else Size(size) for size in self.sizes)

    def tensor(self) -> Tensor:
        return self.make(tuple(size.value(SYMBOLS) for size in self.shape))


def f(*sizes: int | Size, grad: bool = True) -> Spec:
    return Spec(sizes, lambda shape: torch.randn(shape, dtype=torch.float64), grad)


def positive(*sizes: int | Size) -> Spec:
    return Spec(sizes, lambda shape: torch.rand(shape, dtype=torch.float64) + 0.5)


def complexes(*sizes: int | Size) -> Spec:
    return Spec(sizes, lambda shape: torch.randn(shape, dtype=torch.complex128))


def ints(*sizes: int | Size, low: int = 0, high: int) -> Spec:
    return Spec(sizes, lambda shape: torch.randint(low, high, shape), False)


def bools(*sizes: int | Size) -> Spec:
    return Spec(sizes, lambda shape: torch.rand(shape) < 0.6, False)


@dataclass(frozen=True)
class Case:
    """One call: an op by the name of its rule, and its arguments, tensors as specs."""

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.op}({', '.join(map(_shown, self.args))})"

    @property
    def target(self) -> Callable[..., Any]:
        space, name, *overload = self.op.split(".")
        if space == "runtime":
            made: Callable[..., Any] = getattr(runtime, name)
            return made
        found: Callable[..., Any] = getattr(getattr(getattr(torch.ops, space), name), overload[0])
        return found

    def trial(self) -> Trial:
        """The call on random numbers, with the rule that the registry finds for its node."""
        node, inputs = self._node()
        values = tuple(spec.tensor() for spec in inputs.values())
        whole = _outputs(self._call(node, inputs, values))
        node.meta["shape"] = self._shape(whole[0])
        order = [list(inputs).index(operand) for operand in operands(node)]
        run = PARTS.get(self.op, _unchanged)
        flows = tuple(
            (values[i].is_floating_point() or values[i].is_complex()) and list(inputs.values())[i].grad for i in order
        )

        def call(tensors: Sequence[Tensor], function: Callable[[Any, fx.Node], Any]) -> Outputs:
            given = list(values)
            for at, tensor in zip(order, tensors, strict=True):
                given[at] = tensor
            twin = _with(node, dict(zip(inputs, given, strict=True)))
            return _outputs(function(twin, node))

        return Trial(
            signature(node),
            tuple(values[i] for i in order),
            flows,
            lambda tensors: call(tensors, lambda given, node: self.target(*given[0], **given[1])),
            lambda tensors, place: call(tensors, lambda given, node: run(self.target, given, place, node)),
            together if self.op == "runtime.cross_entropy" else one_by_one,
        )

    def _node(self) -> tuple[fx.Node, dict[fx.Node, Spec]]:
        graph, inputs = fx.Graph(), dict[fx.Node, Spec]()

        def place(value: Any) -> Any:
            if isinstance(value, Spec):
                node = graph.placeholder(f"x{len(inputs)}")
                node.meta["shape"] = value.shape
                inputs[node] = value
                return node
            return [place(v) for v in value] if isinstance(value, list) else value

        args = tuple(place(a) for a in self.args)
        kwargs = {k: place(v) for k, v in self.kwargs.items()}
        return graph.call_function(self.target, args, kwargs), inputs

    def _call(self, node: fx.Node, inputs: dict[fx.Node, Spec], values: Sequence[Tensor]) -> Any:
        args, kwargs = _with(node, dict(zip(inputs, values, strict=True)))
        return self.target(*args, **kwargs)

    def _shape(self, output: Tensor) -> tuple[Size, ...]:
        """The output's sizes: those given as symbols where the case has them."""
        known = {s.value(SYMBOLS): s for spec in self.args if isinstance(spec, Spec) for s in spec.shape if s.symbols}
        return tuple(known.get(n, Size(n)) for n in output.shape)


def case(op: str, *args: Any, **kwargs: Any) -> Case:
    return Case(op, args, kwargs)


def _shown(value: Any) -> str:
    if isinstance(value, Spec):
        return str(list(value.sizes)).replace(" ", "")
    return f"[{', '.join(map(_shown, value))}]" if isinstance(value, list) else str(value)


def _with(node: fx.Node, values: dict[fx.Node, Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def look(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return values[value]
        return [look(v) for v in value] if isinstance(value, (list, tuple)) else value

    return tuple(look(a) for a in node.args), {k: look(v) for k, v in node.kwargs.items()}


def _outputs(result: Any) -> Outputs:
    return (result,) if isinstance(result, Tensor) else tuple(result)


# ---- the op on parts, as emitted code writes it ----------------------------------------------------------------------

Given = tuple[tuple[Any, ...], dict[str, Any]]
Part = Callable[[Callable[..., Any], Given, Place, fx.Node], Any]


def _unchanged(target: Callable[..., Any], given: Given, place: Place, node: fx.Node) -> Any:
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
    "runtime.attention_with_dropout": _random,
}


# ---- ops that communicate --------------------------------------------------------------------------------------------


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


def every_row_holds(given: Case) -> None:
    """Each row of the op's rule on one axis and on two; and again with the last gradient stopped."""
    torch.manual_seed(0)
    trial = given.trial()
    for ways in WAYS:
        assert trial.check(*ways) > 0
    flowing = [i for i, flow in enumerate(trial.flows) if flow]
    if len(flowing) > 1:
        flows = tuple(flow and i != flowing[-1] for i, flow in enumerate(trial.flows))
        Trial(trial.signature, trial.operands, flows, trial.whole, trial.part, trial.run_all).check(2)


def each(cases: Sequence[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("given", cases, ids=str)
