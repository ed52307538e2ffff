"""The integers modulo a prime, as an arithmetic."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from fractions import Fraction
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ndcompile.runtime import private
from ndcompile.verify.domain import Domain, NotInDomain, Op, ZeroDenominator, base_name, is_element, wide
from ndcompile.verify.field_images import IMAGES
from ndcompile.verify.field_layers import LAYERS
from ndcompile.verify.field_ops import CONSTANTS, FUNCTIONS, MOVES, OPS
from ndcompile.verify.known import Known

UNSET = ("empty", "empty_strided", "fill_")
"""Ops whose result is not yet what it will be, or is another tensor's memory."""

PRIME = 1048573
"""The largest prime below 2²⁰: a product of two residues is below 2⁴⁰, so sums of 2¹³ of them are exact in float64."""


class Field(Domain):
    """The integers modulo a prime. Sums, products and quotients are exact; what is neither is a random function.

    A float tensor holds residues, or infinities; a complex one two of them. A constant is exact if it is a small
    rational, else a random element; max and comparisons are by a random order of the elements, except that infinities
    are its ends.
    """

    name = "F_p"
    exact = True
    prime = PRIME

    def __init__(self, seed: int, device: torch.device | str = "cpu") -> None:
        super().__init__(seed, device)
        self._functions: dict[Any, Tensor] = {}
        self._numbers: dict[Any, float] = {}
        self._inverses = inverses(self.prime).to(self.device)
        self.infinite = False
        self.known = Known()

    # ---- elements ------------------------------------------------------------------------------------------------

    def draw(self, shape: Sequence[int], positive: bool = False) -> Tensor:
        with private.undispatched():  # a drawn number is no known one
            return torch.randint(1, self.prime, tuple(shape), generator=self.generator).double().to(self.device)

    def number(self, x: float | int | bool) -> float:
        """A constant as an element: exact where it is a rational of small numerator and denominator."""
        if isinstance(x, float) and not math.isfinite(x):
            self.infinite = self.infinite or math.isinf(x)
            return x
        key = type(x), x
        if key not in self._numbers:
            self._numbers[key] = self._finite(x)
        return self._numbers[key]

    def _finite(self, x: float | int | bool) -> float:
        fraction = Fraction(x).limit_denominator(1000)
        if isinstance(x, int) or float(fraction) == x:
            return float(fraction.numerator * pow(fraction.denominator, -1, self.prime) % self.prime)
        return float(scrambled(self.seed, "constant", x) % self.prime)

    def follows(self, args: tuple[Any, ...]) -> bool:
        return self.known.concerns(args)

    def encode(self, x: Tensor) -> Tensor:
        if x.is_complex():
            return torch.view_as_complex(self.encode(torch.view_as_real(x)))
        if not x.is_floating_point():
            return x
        x = x.double()
        if bool((x.round() == x).all()) and bool(x.isfinite().all()):
            return x.remainder(self.prime)
        distinct, where = torch.unique(x, return_inverse=True)
        elements = torch.tensor([self.number(v) for v in distinct.tolist()], dtype=torch.float64, device=x.device)
        return elements[where].view(x.shape)

    def element(self, x: Any) -> Any:
        """An operand of an arithmetic op: whole numbers and constants become elements."""
        if not isinstance(x, Tensor):
            return self.number(x)
        return x if is_element(x) else self.mod(x.double())

    def mod(self, x: Tensor) -> Tensor:
        """The residue; infinities stay."""
        if x.is_complex():
            return torch.view_as_complex(self.mod(torch.view_as_real(x)))
        if not self.infinite:
            return x.remainder_(self.prime)
        return torch.where(x.isinf(), x, x.remainder(self.prime))

    def inverse(self, x: Tensor | float) -> Tensor:
        x = x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64, device=self.device)
        if bool((x == 0).any()):
            raise ZeroDenominator("a denominator is 0 modulo p")
        self.degree += x.numel()
        return look_up(self._inverses, x)

    def function(self, name: Any, x: Tensor) -> Tensor:
        """A random function of an element, the same for the same name; of minus infinity it is 0."""
        if name not in self._functions:
            self._functions[name] = _random_function(self.prime, scrambled(self.seed, name)).to(self.device)
        if self.infinite:
            finite = x.isfinite()
            return torch.where(finite, look_up(self._functions[name], torch.where(finite, x, 0.0)), 0.0)
        return look_up(self._functions[name], x)

    def order(self, x: Tensor) -> Tensor:
        """Each element's place in the random total order."""
        if "order" not in self._functions:
            self._functions["order"] = _random_order(self.prime, scrambled(self.seed, "order")).to(self.device)
        if self.infinite:
            finite = x.isfinite()
            return torch.where(finite, look_up(self._functions["order"], torch.where(finite, x, 0.0)), x)
        return look_up(self._functions["order"], x)

    def elements_in_order(self) -> Tensor:
        """The elements by their place in the random total order."""
        self.order(torch.zeros((), dtype=torch.float64, device=self.device))
        return self._functions["order"].argsort().double()

    # ---- ops -----------------------------------------------------------------------------------------------------

    def run(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `op` means; where it means nothing but its operands depend on sizes alone, what it gives in truth."""
        try:
            made = self._meant(op, args, kwargs)
        except NotInDomain:
            true = self.known.of(op, *wide(op, args, kwargs))
            if true is None:
                raise
            return self._encoded(true)
        if self.follows(args):
            self.known.follow(op, *wide(op, args, kwargs), made)
        return made

    def _encoded(self, true: Any) -> Any:
        made = self.encode(true) if isinstance(true, Tensor) else pytree.tree_map_only(Tensor, self.encode, true)
        self.known.keep(made, true)
        return made

    def _meant(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name, kind, meaning = meaning_of(op)
        if kind == "moves":
            args, kwargs = wide(op, args, kwargs)
            return op(*args, **kwargs)
        if kind == "constant" or not any(is_element(a) for a in args):
            args, kwargs = wide(op, args, kwargs)
            made = op(*args, **kwargs)
            return pytree.tree_map_only(Tensor, self.encode, made) if name in UNSET else self._encoded(made)
        if kind == "unknown":
            raise NotInDomain(f"{name} has no meaning in the prime field")
        self.degree += kind != "function"
        result = meaning(self, *args, **kwargs)
        return args[0].copy_(result) if kind == "in place" else result

    def reduce(self, op: str, values: Sequence[Tensor]) -> Tensor:
        stacked = torch.stack(list(values))
        if op == "sum":
            return self.mod(stacked.sum(0)) if stacked.is_floating_point() else stacked.sum(0)
        keys = self.order(stacked) if stacked.is_floating_point() else stacked
        best = (keys.argmax(0, keepdim=True), keys.argmin(0, keepdim=True))[op == "min"]
        return stacked.gather(0, best).squeeze(0)

    def distance(self, a: Tensor, b: Tensor, least: float) -> float:
        return 0.0 if torch.equal(a, b) else math.inf


@cache
def meaning_of(op: Op) -> tuple[str, str, Any]:
    """An op's name, of which kind it is in the field, and what does it there."""
    name = base_name(op)
    if name in LAYERS or name in IMAGES:
        return name, "op", LAYERS.get(name) or IMAGES[name]
    if name in MOVES:
        return name, "moves", None
    if name in CONSTANTS:
        return name, "constant", None
    if name in OPS:
        return name, "function" if name in FUNCTIONS else "op", OPS[name]
    if name.endswith("_") and name[:-1] in OPS:
        return name, "in place", OPS[name[:-1]]
    return op.name(), "unknown", None


def scrambled(*of: Any) -> int:
    """A number that depends on all of these, and is the same in every process."""
    return zlib.crc32(repr(of).encode()) * 2654435761 % (1 << 32)


def look_up(table: Tensor, x: Tensor) -> Tensor:
    """Of each element what the table has there, in memory of its own."""
    if x.is_complex():
        raise NotInDomain("what is neither a sum nor a product of complex numbers has no meaning in the prime field")
    index = x.long()
    assert torch.equal(index.to(x.dtype), x), "a float tensor in the field holds residues"
    return table.take(index)


@lru_cache(maxsize=32)
def _random_function(prime: int, seed: int) -> Tensor:
    """An element for each element. The next domain of the same seed, of another program, has the same ones."""
    return torch.randint(0, prime, (prime,), generator=torch.Generator().manual_seed(seed)).double()


@lru_cache(maxsize=4)
def _random_order(prime: int, seed: int) -> Tensor:
    return torch.randperm(prime, generator=torch.Generator().manual_seed(seed)).double()


@cache
def inverses(prime: int) -> Tensor:
    """The inverse of each residue modulo a prime, by Fermat: x to the p − 2."""
    result, power, exponent = torch.ones(prime, dtype=torch.int64), torch.arange(prime), prime - 2
    while exponent:
        if exponent & 1:
            result = result * power % prime
        power = power * power % prime
        exponent >>= 1
    return result.double()
