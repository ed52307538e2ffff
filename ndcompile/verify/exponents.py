"""Exact arithmetic with an exp for which exp(a + b) = exp(a) · exp(b): for lemmas about one softmax, and no more.

Two primes, p = 2q + 1. Values are residues modulo p, and what is given to exp is an *exponent*, a residue modulo
p − 1 = 2q: exp(a) is g to the a, where g generates all p − 1 residues that are not 0. So it has a logarithm too, which
a log-sum-exp needs. An exponent is a tensor's element of its own kind: it cannot be added to a value, and the exp of an
exp has no meaning, which is why whole programs have another arithmetic (`Field`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ndcompile.runtime import private
from ndcompile.verify import field_ops
from ndcompile.verify.domain import NotInDomain, Op, ZeroDenominator, base_name
from ndcompile.verify.field import Field, look_up, scrambled

SAFE_PRIME = 1048343
"""The largest prime p below 2²⁰ of which (p − 1) / 2 is a prime too."""

GENERATOR = 5
"""Neither its square nor its power to the (p − 1) / 2 is 1, so its powers are all residues but 0."""

SHIFT = 1 << 21
"""Exponents are held as numbers from here on, so that they are not taken for values, wherever they are moved."""


class Exponents(Field):
    """The prime field with that exp. Minus infinity is an exponent, and its exp is 0."""

    name = "F_p with a homomorphic exp"
    prime = SAFE_PRIME

    def __init__(self, seed: int, device: torch.device | str = "cpu") -> None:
        super().__init__(seed, device)
        self.infinite = True
        self._powers, self._logarithms = (table.to(self.device) for table in _tables())

    def draw_exponents(self, shape: Sequence[int]) -> Tensor:
        with private.undispatched():
            drawn = torch.randint(self.prime - 1, tuple(shape), generator=self.generator)
            return (drawn + SHIFT).double().to(self.device)

    def run(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = base_name(op)
        own = OPS.get(name) or OPS.get(name.removesuffix("_"))
        if own is not None and any(isinstance(x, Tensor) and x.is_floating_point() for x in args):
            self.degree += 1
            made = own(self, *args, **kwargs)
            return made if name in OPS else args[0].copy_(made)
        if name not in field_ops.MOVES and any(is_exponent(x) for x in args):
            raise NotInDomain(f"{name} of exponents has no meaning")
        return self._meant(op, args, kwargs)

    # ---- between the two kinds -----------------------------------------------------------------------------------

    def exponent(self, x: Any) -> Tensor:
        """An operand as residues modulo p − 1 and infinities: of values only 0 is one."""
        if not isinstance(x, Tensor):
            return torch.tensor(x if math.isinf(x) else self._constant(x), dtype=torch.float64, device=self.device)
        if bool(((x > 0) & (x < SHIFT)).any()):
            raise NotInDomain("a value where an exponent is needed")
        return torch.where(x >= SHIFT, x - SHIFT, x)

    def value(self, x: Tensor) -> Tensor:
        """An operand as residues modulo p. A key is an exponent forward, and a factor of gradients backward."""
        return torch.where(x >= SHIFT, x - SHIFT, x)

    def held(self, x: Tensor) -> Tensor:
        """Sums and products of exponents, as they are held."""
        return torch.where(x.isinf(), x, x.remainder(self.prime - 1) + SHIFT)

    def _constant(self, x: float) -> float:
        whole = float(x).is_integer()
        return float(int(x) if whole else scrambled(self.seed, "exponent", x)) % (self.prime - 1)

    def powers(self, x: Tensor) -> Tensor:
        """exp"""
        exponents = self.exponent(x)
        finite = exponents.isfinite()
        return torch.where(finite, look_up(self._powers, torch.where(finite, exponents, 0.0)), 0.0)

    def logarithms(self, x: Tensor) -> Tensor:
        return torch.where(x == 0, -math.inf, look_up(self._logarithms, x) + SHIFT)


def is_exponent(x: Any) -> bool:
    """Whether a tensor holds exponents: those of a row that sees nothing are minus infinity."""
    floats = isinstance(x, Tensor) and x.is_floating_point()
    return floats and bool(((x >= SHIFT) | (x == -math.inf)).any())


@cache
def _tables() -> tuple[Tensor, Tensor]:
    """g to each exponent, and the exponent of each residue."""
    powers = torch.empty(SAFE_PRIME - 1, dtype=torch.int64)
    powers[0], known, factor = 1, 1, GENERATOR
    while known < len(powers):  # g^(n + i) = g^n · g^i
        more = min(known, len(powers) - known)
        powers[known : known + more] = powers[:more] * factor % SAFE_PRIME
        known, factor = known + more, factor * factor % SAFE_PRIME
    logarithms = torch.zeros(SAFE_PRIME, dtype=torch.int64)
    logarithms[powers] = torch.arange(len(powers))
    return powers.double(), logarithms.double()


def _total(d: Exponents, powers: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """A sum of powers, which is 0 only where all of them are."""
    total = d.mod(powers.sum(list(dims), keepdim=True))
    _no_chance(total, powers.amax(list(dims), keepdim=True))
    return total if keepdim else total.squeeze(list(dims))


def _no_chance(total: Tensor, part: Tensor) -> None:
    if bool(((total == 0) & (part != 0)).any()):
        raise ZeroDenominator("a sum of weights is 0 modulo p")


def _add(d: Exponents, a: Any, b: Any, alpha: Any = 1) -> Tensor:
    if is_exponent(a) or is_exponent(b):
        assert alpha in (1, -1), "sums and differences"
        return d.held(d.exponent(a) + alpha * d.exponent(b))
    total = field_ops.OPS["add"](d, a, b, alpha)
    if alpha == 1 and isinstance(a, Tensor):
        _no_chance(total, a)
    return total


def _sub(d: Exponents, a: Any, b: Any, alpha: Any = 1) -> Tensor:
    return _add(d, a, b, -alpha)


def _mul(d: Exponents, a: Any, b: Any) -> Tensor:
    if is_exponent(a) and not isinstance(b, Tensor):
        return d.held(d.exponent(a) * d.exponent(b))
    if is_exponent(a) or is_exponent(b):
        raise NotInDomain("a product of an exponent and a tensor has no meaning")
    return field_ops.OPS["mul"](d, a, b)


def _matmul(d: Exponents, a: Tensor, b: Tensor) -> Tensor:
    assert a.shape[-1] <= 1 << 12, "exact up to 4096 products an element"
    if is_exponent(a) and is_exponent(b):
        return d.held(d.exponent(a) @ d.exponent(b))
    return field_ops.OPS["matmul"](d, d.value(a), d.value(b))


def _log_sum_exp(d: Exponents, x: Tensor, dim: Sequence[int], keepdim: bool = False) -> Tensor:
    return d.logarithms(_total(d, d.powers(x), dim, keepdim))


def _softmax(d: Exponents, x: Tensor, dim: int, dtype: Any = None) -> Tensor:
    """A row that is minus infinity everywhere gives zeros."""
    powers = d.powers(x)
    total = _total(d, powers, [dim], True)
    return field_ops.OPS["div"](d, powers, total.masked_fill(total == 0, 1))


def _masked_fill(d: Exponents, x: Tensor, mask: Tensor, value: Any) -> Tensor:
    if not is_exponent(x) or math.isinf(value):
        return x.masked_fill(mask, value if math.isinf(value) else d.number(value))
    return x.masked_fill(mask, float(d.held(d.exponent(value))))


def _where(d: Exponents, condition: Tensor, a: Any, b: Any) -> Tensor:
    if is_exponent(a) or is_exponent(b):
        return torch.where(condition, d.held(d.exponent(a)), d.held(d.exponent(b)))
    found: Tensor = field_ops.OPS["where"](d, condition, a, b)
    return found


def _equal(by: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Exponents are told from infinities alone."""

    def run(d: Exponents, a: Tensor, b: Any) -> Tensor:
        assert not is_exponent(a) or math.isinf(b), "an exponent is compared with infinities"
        return by(a, b if isinstance(b, Tensor) or math.isinf(b) else d.number(b))

    return run


OPS: dict[str, Callable[..., Any]] = {
    "exp": lambda d, x: d.powers(x), "log": lambda d, x: d.logarithms(x),
    "add": _add, "sub": _sub, "mul": _mul, "mm": _matmul, "bmm": _matmul, "matmul": _matmul,
    "logsumexp": _log_sum_exp, "_softmax": _softmax, "_safe_softmax": _softmax,
    "masked_fill": _masked_fill, "where": _where, "maximum": lambda d, a, b: torch.maximum(a, b),
    "eq": _equal(torch.eq), "ne": _equal(torch.ne),
}  # fmt: skip
"""What is of exponents, or may be; all else is the field's."""
