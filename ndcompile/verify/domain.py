"""The arithmetics in which a program and its reference are run: each gives every ATen op a meaning."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ndcompile.verify.precise import precise

Op = Any
"""An ATen op, as a dispatch mode sees it: `torch.ops.aten.mul.Tensor`."""


FAILURES = (RuntimeError, ValueError, IndexError, TypeError, AssertionError, KeyError, AttributeError, NameError)
"""What a wrong program may raise when it runs."""


class NotInDomain(NotImplementedError):
    """An op that an arithmetic has no meaning for: nothing can be said of the program there."""


class ZeroDenominator(ArithmeticError):
    """A division by zero in the field, which chance brings: the sample is drawn again."""


class Domain(ABC):
    """An arithmetic. Every floating dtype is carried as float64, so that casts between them change nothing."""

    name: str
    exact: bool
    widens: bool = True
    """Whether one dtype stands for all floating ones."""
    optimizes: bool = True
    """Whether a step ends with the norm, clipping and AdamW."""
    eps: float = 1e-8
    """AdamW's, by which it divides at least."""
    degree: int = 0
    """An estimate of the degree of what is computed, as a rational function: its products and denominators."""

    def __init__(self, seed: int, device: torch.device | str = "cpu") -> None:
        self.seed = seed
        self.device = torch.device(device)
        self.generator = torch.Generator().manual_seed(seed)
        """On the CPU: what is drawn is the same on every device."""

    @abstractmethod
    def run(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `op` gives here."""

    @abstractmethod
    def encode(self, x: Tensor) -> Tensor:
        """True numbers as values of the domain; integers and booleans stay what they are."""

    @abstractmethod
    def draw(self, shape: Sequence[int], positive: bool = False) -> Tensor:
        """A random tensor: a parameter, an input, a cotangent."""

    def follows(self, args: tuple[Any, ...]) -> bool:
        """Whether of what an op makes of these more is noted than the result says."""
        return False

    def stored(self, x: Tensor, dtype: torch.dtype | None) -> Tensor:
        """What is drawn, as a value of the program's dtype: here there is one dtype for all."""
        return x

    @abstractmethod
    def reduce(self, op: str, values: Sequence[Tensor]) -> Tensor:
        """What a reducing collective makes of the ranks' tensors."""

    @abstractmethod
    def distance(self, a: Tensor, b: Tensor, least: float) -> float:
        """How far `a` is from the right value `b`: 0 if equal, and in an exact domain infinite if not."""


def widened(value: Any) -> Any:
    """Arguments with every floating dtype as float64."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, torch.dtype):
        return torch.float64 if value.is_floating_point else torch.complex128 if value.is_complex else value
    if isinstance(value, (list, tuple)):
        return type(value)(widened(v) for v in value)
    return value


def wide(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """All that an op is given, with every floating dtype as float64."""
    return (widened(args), {k: widened(v) for k, v in kwargs.items()}) if _takes_dtype(op) else (args, kwargs)


@cache
def _takes_dtype(op: Op) -> bool:
    return any("ScalarType" in str(argument.real_type) for argument in op._schema.arguments)


@cache
def base_name(op: Op) -> str:
    """`mul` of `aten.mul.Tensor`."""
    name: str = op.name()
    return name.partition("::")[2].partition(".")[0]


def namespace(op: Op) -> str:
    found: str = op.namespace
    return found


def is_element(x: Any) -> bool:
    if isinstance(x, Tensor):
        return x.is_floating_point() or x.is_complex()
    return isinstance(x, (list, tuple)) and any(is_element(each) for each in x)


class Float64(Domain):
    """Floating point of 53 bits: every op is torch's own."""

    name = "float64"
    exact = False

    def run(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = wide(op, args, kwargs)
        made = op(*args, **kwargs)
        return self.encode(made) if isinstance(made, Tensor) else made  # what no dtype was said of brings its own

    def encode(self, x: Tensor) -> Tensor:
        return precise(x) if is_element(x) else x

    def draw(self, shape: Sequence[int], positive: bool = False) -> Tensor:
        x = torch.randn(tuple(shape), generator=self.generator, dtype=torch.float64).to(self.device)
        if positive:
            return x.abs() + 0.5
        return x / math.sqrt(max(1, shape[-1])) if len(shape) > 1 else x

    def reduce(self, op: str, values: Sequence[Tensor]) -> Tensor:
        by: dict[str, Callable[..., Tensor]] = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}
        return by[op](torch.stack(list(values)), 0)

    def distance(self, a: Tensor, b: Tensor, least: float) -> float:
        if a.shape != b.shape:
            return math.inf
        a, b = precise(a.detach()), precise(b.detach())
        far, size = float((a - b).norm()), max(float(b.norm()), least)
        if far == 0:
            return 0.0
        return far / size if far == far and size > 0 else math.inf


class AsWritten(Float64):
    """Floating point with the dtypes that the text says: of a program in float64 mode, a cast to less shows."""

    name = "float64, dtypes as written"

    def run(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return op(*args, **kwargs)
