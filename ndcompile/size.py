"""Sizes of tensor dims: monomials in integers and symbols, so that divisibility is a fact and not a guess."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import sympy


@dataclass(frozen=True)
class Size:
    """`coefficient · symbol · symbol …`. What is no monomial (s + 1) is one opaque symbol.

    >>> b, s = Size(2, ("b",)), Size(1, ("s",))
    >>> b * s * Size(64), (b * s).gcd(Size(4, ("s",)))
    (128·b·s, 2·s)
    """

    coefficient: int
    symbols: tuple[str, ...] = ()

    @classmethod
    def of(cls, expression: int | sympy.Expr, substitute: Mapping[str, Size] | None = None) -> Size:
        """A size from an integer or a sympy expression; `substitute` says what each symbol stands for."""
        if isinstance(expression, int):
            return cls(expression)
        coefficient, rest = sympy.sympify(expression).as_coeff_Mul()
        powers = rest.as_powers_dict() if rest != 1 else {}
        if not coefficient.is_Integer or not all(e.is_Integer and e > 0 for e in powers.values()):
            coefficient, powers = sympy.Integer(1), {sympy.sympify(expression): 1}
        size = cls(int(coefficient))
        for base, exponent in powers.items():
            for _ in range(int(exponent)):
                size = size * (substitute or {}).get(str(base), cls(1, (str(base),)))
        return size

    @classmethod
    def read(cls, text: str) -> Size:
        """A size from its text; nothing is 1."""
        total = ONE
        for part in text.split("·") if text else []:
            total = total * (cls(int(part)) if part.isdecimal() else cls(1, (part,)))
        return total

    def __mul__(self, other: Size) -> Size:
        return Size(self.coefficient * other.coefficient, tuple(sorted(self.symbols + other.symbols)))

    def __floordiv__(self, other: Size) -> Size:
        """The exact quotient; `other` must divide."""
        left = Counter(self.symbols)
        left.subtract(Counter(other.symbols))
        assert self.coefficient % other.coefficient == 0 and min(left.values(), default=0) >= 0, f"{other} ∤ {self}"
        return Size(self.coefficient // other.coefficient, tuple(sorted(left.elements())))

    def gcd(self, other: Size) -> Size:
        common = Counter(self.symbols) & Counter(other.symbols)
        return Size(math.gcd(self.coefficient, other.coefficient), tuple(sorted(common.elements())))

    def divides_by(self, ranks: int) -> bool:
        return self.coefficient % ranks == 0

    @property
    def constant(self) -> bool:
        return not self.symbols

    def value(self, symbols: Mapping[str, int]) -> int:
        """The number, given the symbols'."""
        return self.coefficient * math.prod(symbols[name] for name in self.symbols)

    def __str__(self) -> str:
        parts = ([str(self.coefficient)] if self.coefficient != 1 or not self.symbols else []) + list(self.symbols)
        return "·".join(parts)

    __repr__ = __str__


ONE = Size(1)
Shape = tuple[Size, ...]


def product(sizes: Shape) -> Size:
    total = ONE
    for size in sizes:
        total = total * size
    return total
