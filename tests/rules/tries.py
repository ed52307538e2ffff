"""Every row of a rule on drawn calls: split against whole, forward and gradient, in floating point and in a field."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache

import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

from ndcompile.rules.trial import FLOATING, Arithmetic, Rows
from ndcompile.runtime import private
from ndcompile.verify.arithmetic import Field, NotInDomain, ZeroDenominator
from tests.rules.calls import CALLS
from tests.rules.case import Case

WAYS = ((2,), (3,), (4,), (2, 2), (2, 3), (3, 2), (4, 2), (2, 4))
"""The ranks on one axis, or on two, of which the first is the major one where both shard a dim."""


class InField(Arithmetic):
    """The integers modulo a prime: equal is exactly equal, and a share of a partial value says nothing of it."""

    exact = True
    unknown = NotInDomain

    def __init__(self, number: int = 0) -> None:
        self.domain = Field(number)

    def within(self) -> AbstractContextManager[object]:
        return private.dispatched(self.domain.run)

    def draw(self, x: Tensor) -> Tensor:
        return self.domain.draw(x.shape) if x.is_floating_point() else super().draw(x)


@cache
def in_field() -> InField:
    return InField()


@dataclass(frozen=True)
class Try:
    """A call, the axes' ranks, the operand whose gradient is stopped, the arithmetic, the random numbers."""

    call: Case
    ways: tuple[int, ...]
    stopped: int | None
    exact: bool
    number: int

    def check(self, most: int) -> list[Rows]:
        """The combinations of rows that hold, at most so many. Raises `RuleError`, or what else goes wrong."""
        if not self.exact:
            return self._check(FLOATING, most)
        try:
            return self._check(in_field(), most)
        except (NotInDomain, ZeroDenominator):
            return self._check(FLOATING, most)

    def _check(self, arithmetic: Arithmetic, most: int) -> list[Rows]:
        torch.manual_seed(self.number)
        return self.call.trial(arithmetic, self.stopped).check(*self.ways, most=most)


def tries(rule: str) -> st.SearchStrategy[Try]:
    """What a rule is tried on. A rule without calls cannot be tried."""
    assert rule in CALLS, f"no calls of {rule} are drawn: say which in tests/rules/calls"
    stopped = st.one_of(st.none(), st.integers(0, 3))
    return st.builds(Try, CALLS[rule], st.sampled_from(WAYS), stopped, st.booleans(), st.integers(0, 9))


@dataclass
class Held:
    """What held of a rule: combinations of rows, and which kinds of placement they take or give."""

    combinations: int = 0
    kinds: set[str] = field(default_factory=set)

    def add(self, held: list[Rows]) -> None:
        self.combinations += len(held)
        self.kinds |= {p.kind for rows in held for row in rows for p in (*row.operands, row.output)}


def search(rule: str, examples: int, most: int = 24, start: int | None = None) -> Held:
    """Try a rule on so many calls: always the same ones, or those of a seed."""
    found = Held()

    def holds(tried: Try) -> None:
        found.add(tried.check(most))

    checked = given(tries(rule))(holds)
    if start is not None:
        checked = seed(start)(checked)
    chosen = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=start is None,
        print_blob=False,
        suppress_health_check=[HealthCheck.too_slow],
    )
    chosen(checked)()
    return found
