"""Concrete calls as trials: the node that propagation would see, whole, and on parts as emitted code runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from ndcompile import runtime
from ndcompile.rules.registry import operands, signature
from ndcompile.rules.trial import FLOATING, Arithmetic, Outputs, Trial, one_by_one
from ndcompile.size import Size
from tests.rules.parts import PARTS, SYMBOLS, together, unchanged

Number = int | Size
Values = dict[fx.Node, Tensor]


@dataclass(frozen=True)
class Spec:
    """A tensor argument: its sizes (numbers or monomials), what it holds, whether it carries a gradient."""

    sizes: tuple[Number, ...]
    make: Callable[[tuple[int, ...]], Tensor]
    grad: bool = True

    @property
    def shape(self) -> tuple[Size, ...]:
        return tuple(size if isinstance(size, Size) else Size(size) for size in self.sizes)

    def tensor(self, arithmetic: Arithmetic = FLOATING) -> Tensor:
        made = self.make(tuple(map(value, self.sizes)))
        drawn = arithmetic.exact and (made.is_floating_point() or made.is_complex())
        return arithmetic.draw(made) if drawn else made

    def __repr__(self) -> str:
        return str(list(self.sizes)).replace(" ", "")


def value(size: Number) -> int:
    return size.value(SYMBOLS) if isinstance(size, Size) else size


def f(*sizes: Number, grad: bool = True) -> Spec:
    return Spec(sizes, lambda shape: torch.randn(shape, dtype=torch.float64), grad)


def positive(*sizes: Number, grad: bool = True) -> Spec:
    return Spec(sizes, lambda shape: torch.rand(shape, dtype=torch.float64) + 0.5, grad)


def below_one(*sizes: Number) -> Spec:
    return Spec(sizes, lambda shape: 1.8 * torch.rand(shape, dtype=torch.float64) - 0.9)


def above_one(*sizes: Number) -> Spec:
    return Spec(sizes, lambda shape: torch.rand(shape, dtype=torch.float64) + 1.1)


def complexes(*sizes: Number) -> Spec:
    return Spec(sizes, lambda shape: torch.randn(shape, dtype=torch.complex128))


def ints(*sizes: Number, low: int = 0, high: int) -> Spec:
    return Spec(sizes, lambda shape: torch.randint(low, high, shape), False)


def bools(*sizes: Number) -> Spec:
    return Spec(sizes, lambda shape: torch.rand(shape) < 0.6, False)


@dataclass(frozen=True)
class Case:
    """One call: an op by the name of its rule, and its arguments, tensors as specs.

    `output` says the output's sizes where they have symbols; a call that `fails` must do so on parts too.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    output: tuple[Number, ...] | None = None
    fails: bool = False

    def __repr__(self) -> str:
        named = [f"{name}={value}" for name, value in self.kwargs.items()]
        return f"{self.op}({', '.join([*map(str, self.args), *named])}){' fails' * self.fails}"

    @property
    def empty(self) -> bool:
        """Whether a tensor has no elements."""
        listed = [spec for arg in self.args for spec in (arg if isinstance(arg, list) else [arg])]
        return any(value(size) == 0 for spec in listed if isinstance(spec, Spec) for size in spec.sizes)

    @property
    def target(self) -> Callable[..., Any]:
        space, name, *overload = self.op.split(".")
        if space == "runtime":
            made: Callable[..., Any] = getattr(runtime, name)
            return made
        found: Callable[..., Any] = getattr(getattr(getattr(torch.ops, space), name), overload[0])
        return found

    def trial(self, arithmetic: Arithmetic = FLOATING, stopped: int | None = None) -> Trial:
        """The call on random numbers, with the rule that the registry finds for its node.

        Of the operands that carry a gradient it is stopped at one.
        """
        node, inputs = self._node()
        tensors = tuple(spec.tensor(arithmetic) for spec in inputs.values())
        node.meta["shape"] = self._shape(node, inputs, tensors, arithmetic)
        order = [list(inputs).index(operand) for operand in operands(node)]
        flows = [
            spec.grad and (x.is_floating_point() or x.is_complex()) for x, spec in self._ordered(node, inputs, tensors)
        ]
        flowing = [i for i, flow in enumerate(flows) if flow]
        if stopped is not None and flowing:
            flows[flowing[stopped % len(flowing)]] = False
        run = PARTS.get(self.op, unchanged)

        def given(replaced: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            held = list(tensors)
            for at, tensor in zip(order, replaced, strict=True):
                held[at] = tensor
            return _with(node, dict(zip(inputs, held, strict=True)))

        def whole(replaced: Sequence[Tensor]) -> Outputs:
            args, kwargs = given(replaced)
            return _outputs(self.target(*args, **kwargs))

        return Trial(
            signature(node),
            tuple(tensors[i] for i in order),
            tuple(flows),
            whole,
            lambda replaced, place: _outputs(run(self.target, given(replaced), place, node)),
            together if self.op == "runtime.cross_entropy" else one_by_one,
            arithmetic,
            self.fails,
        )

    def _node(self) -> tuple[fx.Node, dict[fx.Node, Spec]]:
        graph, inputs = fx.Graph(), dict[fx.Node, Spec]()

        def place(given: Any) -> Any:
            if isinstance(given, Spec):
                node = graph.placeholder(f"x{len(inputs)}")
                node.meta["shape"] = given.shape
                inputs[node] = given
                return node
            return [place(v) for v in given] if isinstance(given, list) else given

        args = tuple(place(a) for a in self.args)
        kwargs = {k: place(v) for k, v in self.kwargs.items()}
        return graph.call_function(self.target, args, kwargs), inputs

    def _ordered(
        self, node: fx.Node, inputs: dict[fx.Node, Spec], tensors: Sequence[Tensor]
    ) -> list[tuple[Tensor, Spec]]:
        by_node = dict(zip(inputs, zip(tensors, inputs.values(), strict=True), strict=True))
        return [by_node[operand] for operand in operands(node)]

    def _shape(
        self, node: fx.Node, inputs: dict[fx.Node, Spec], tensors: Sequence[Tensor], arithmetic: Arithmetic
    ) -> tuple[Size, ...]:
        """The output's sizes, as symbols where the case has them. A call that fails tells them without memory."""
        if self.output is not None:
            return Spec(self.output, torch.empty).shape
        held = [x.to("meta") for x in tensors] if self.fails else tensors
        args, kwargs = _with(node, dict(zip(inputs, held, strict=True)))
        with FLOATING.within() if self.fails else arithmetic.within():
            shape = _outputs(self.target(*args, **kwargs))[0].shape
        known = {value(s): s for spec in inputs.values() for s in spec.shape if s.symbols}
        return tuple(known.get(n, Size(n)) for n in shape)


def case(op: str, *args: Any, **kwargs: Any) -> Case:
    return Case(op, args, kwargs)


def _with(node: fx.Node, values: Values) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def look(given: Any) -> Any:
        if isinstance(given, fx.Node):
            return values[given]
        return [look(v) for v in given] if isinstance(given, (list, tuple)) else given

    return tuple(look(a) for a in node.args), {k: look(v) for k, v in node.kwargs.items()}


def _outputs(result: Any) -> Outputs:
    return (result,) if isinstance(result, Tensor) else tuple(result)
