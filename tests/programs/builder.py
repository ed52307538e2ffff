"""Writes a forward line by line: each line is run on meta tensors at three sizes, which gives every value its dims."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.programs.sketch import SIZES, Body, Input, Statement

T = TypeVar("T")

POINTS = ((5, 7), (11, 7), (5, 13))
"""Batch and sequence where each line is run: primes that divide no other size, so that sizes show what they are."""

WIDTHS = (2, 3, 4, 6, 8, 9, 12, 16)
LARGEST = 6000
"""Elements of a value at the first of `POINTS`."""

FAILURES = (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError, NameError)
"""What is raised where a line does not fit its operands, or names a size that its body does not know."""


class Rejected(Exception):
    """What was drawn cannot be written here."""


@dataclass(frozen=True)
class Dim:
    """The size of a dim at each of `POINTS`."""

    sizes: tuple[int, ...]

    @property
    def number(self) -> int | None:
        """The size, if it is the same everywhere."""
        return self.sizes[0] if len(set(self.sizes)) == 1 else None

    @property
    def text(self) -> str | None:
        """As Python, in `b` and `s`; none if it is no multiple of products of them."""
        first, batch, length = self.sizes
        factors, rest = list[str](), first
        for name, more, (small, large) in (("b", batch, (5, 11)), ("s", length, (7, 13))):
            while rest % small == 0 and more * small == first * large and name not in factors:
                factors.append(name)
                rest //= small
        if not factors:
            return str(first) if self.number is not None else None
        found = " * ".join([*([str(rest)] if rest > 1 else []), *factors])
        return found if self == Dim(tuple(eval(found, {"b": b, "s": s}) for b, s in POINTS)) else None


@dataclass(frozen=True)
class Value:
    """A tensor by its name."""

    name: str
    dims: tuple[Dim, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return self.name

    @property
    def rank(self) -> int:
        return len(self.dims)

    @property
    def last(self) -> int | None:
        return self.dims[-1].number if self.dims else None

    @property
    def elements(self) -> int:
        return math.prod(d.sizes[0] for d in self.dims)

    @property
    def floating(self) -> bool:
        return self.dtype.is_floating_point


class Builder:
    """One body in the making; `random` makes every choice."""

    def __init__(
        self, name: str, random: Random, arguments: Sequence[tuple[str, Callable[[int, int], Tensor]]]
    ) -> None:
        self.name, self.random = name, random
        self.arguments = [argument for argument, _ in arguments]
        self.module = nn.Module()
        self.setup: list[str] = []
        self.statements: list[Statement] = []
        self.values: dict[str, Value] = {}
        self.parts: list[Body] = []
        self._count = 0
        plain = {"torch": torch, "F": F, "math": math, "nn": nn, "self": self.module}
        self.places: list[dict[str, Any]] = [
            {**plain, **{argument: make(b, s) for argument, make in arguments}} for b, s in POINTS
        ]
        for argument in self.arguments:
            self._note(argument)

    @classmethod
    def of_inputs(cls, random: Random, inputs: Sequence[Input]) -> Builder:
        def maker(given: Input) -> Callable[[int, int], Tensor]:
            return lambda b, s: given.tensor({"b": b, "s": s}).to("meta")

        return cls("Model", random, [(given.name, maker(given)) for given in inputs])

    # ---- choices -------------------------------------------------------------------------------------------------

    def pick(self, options: Sequence[T]) -> T:
        if not options:
            raise Rejected
        return options[self.random.randint(0, len(options) - 1)]

    def chance(self, percent: int) -> bool:
        return self.random.randint(1, 100) > 100 - percent

    def width(self) -> int:
        return self.pick(WIDTHS)

    def value(self, fits: Callable[[Value], bool] = lambda v: True, floating: bool = True) -> Value:
        """A value that fits; the later ones more often."""
        found = [v for v in self.values.values() if v.floating is floating and fits(v)]
        if not found:
            raise Rejected
        return max(self.pick(found), self.pick(found), key=found.index)

    def dim(self, value: Value, fits: Callable[[Dim], bool] = lambda d: True) -> int:
        """A dim of a value by its number, from the front or from the back; seldom one with the batch."""
        found = [n for n, d in enumerate(value.dims) if fits(d)]
        others = [n for n in found if value.dims[n].sizes[0] == value.dims[n].sizes[1]]
        number = self.pick(found if self.chance(10) else others)
        return number - value.rank if self.chance(50) else number

    @property
    def count(self) -> int:
        """The number of the next value."""
        return self._count

    def mark(self) -> tuple[int, int, int]:
        """How far it is written."""
        return len(self.setup), len(self.statements), len(self.parts)

    def back_to(self, mark: tuple[int, int, int]) -> None:
        """Take back what was written since, but for changes in place."""
        self.setup, self.parts = self.setup[: mark[0]], self.parts[: mark[2]]
        gone = {name for statement in self.statements[mark[1] :] for name in statement.targets}
        self.statements = self.statements[: mark[1]]
        kept = {name for statement in self.statements for name in statement.targets} | set(self.arguments)
        for name in gone - kept:
            self.values.pop(name, None)

    # ---- lines ---------------------------------------------------------------------------------------------------

    def let(self, expression: str) -> Value:
        """A new value."""
        name = f"v{self._count}"
        self.write(f"{name} = {expression}", name)
        return self.values[name]

    def lets(self, expression: str, count: int) -> list[Value]:
        """Several values of one call."""
        names = [f"v{self._count + i}" for i in range(count)]
        self.write(f"{', '.join(names)} = {expression}", *names)
        return [self.values[name] for name in names]

    def write(self, text: str, *targets: str) -> None:
        """Lines that make or change the targets."""
        before = [{name: place[name] for name in targets if name in place} for place in self.places]
        try:
            with torch.device("meta"):
                for place in self.places:
                    exec(text, place)
            for name in targets:
                self._note(name)
        except FAILURES as error:
            for place, held in zip(self.places, before, strict=True):
                place.update(held)
            raise Rejected from error
        self.statements.append(Statement(targets, text))
        self._count = max([self._count, *(int(name[1:]) + 1 for name in targets if re.fullmatch(r"v\d+", name))])

    def _note(self, name: str) -> None:
        found = [place[name] for place in self.places]
        if not all(isinstance(x, Tensor) for x in found):
            raise TypeError(f"{name} is no tensor")
        if found[0].numel() > LARGEST or found[0].dim() > 6 or any(x.dim() != found[0].dim() for x in found):
            self.values.pop(name, None)
            raise ValueError("too large")
        sizes = zip(*(x.shape for x in found), strict=True)
        self.values[name] = Value(name, tuple(Dim(tuple(d)) for d in sizes), found[0].dtype)

    def member(self, constructor: str, *more: str, prefix: str = "m") -> str:
        """A new member; `more` are further lines, in which `{}` is its name."""
        name = f"{prefix}{len(self.setup)}"
        lines = [f"self.{name} = {constructor}", *(line.format(name) for line in more)]
        self._set_up(lines)
        return f"self.{name}"

    def buffer(self, constructor: str) -> str:
        name = f"c{len(self.setup)}"
        self._set_up([f'self.register_buffer("{name}", {constructor})'])
        return f"self.{name}"

    def _set_up(self, lines: list[str]) -> None:
        try:
            with torch.device("meta"):
                for line in lines:
                    exec(line, self.places[0])
        except FAILURES as error:
            raise Rejected from error
        self.setup += lines

    def add_part(self, body: Body) -> None:
        """A class that members may be of."""
        self.parts.append(body)
        for place in self.places:
            exec(str(body), place)

    def modules(self, kind: type[nn.Module]) -> list[tuple[str, nn.Module]]:
        """The members of a class."""
        return [(f"self.{name}", module) for name, module in self.module.named_children() if isinstance(module, kind)]

    def parameters(self) -> list[tuple[str, tuple[int, ...]]]:
        """All parameters, as Python names them, with their shapes."""
        shapes = {name: tuple(p.shape) for name, p in self.module.named_parameters()}
        return [("self." + re.sub(r"\.(\d+)", r"[\1]", name), shape) for name, shape in shapes.items()]

    def size_names(self, source: str) -> None:
        """The first line of a forward: the names of batch and sequence."""
        self.write(source)
        self.statements[-1] = Statement(SIZES, source)

    def body(self, result: str) -> Body:
        return Body(
            self.name, tuple(self.arguments), tuple(self.setup), tuple(self.statements), result
        ).needed()  # fmt: skip
