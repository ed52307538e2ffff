"""Every row of a rule on drawn calls: split against whole, forward and gradient, in floating point and in a field."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache

import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

from ndcompile.rules.trial import FLOATING, Arithmetic, Rows, Trial
from ndcompile.runtime import private
from ndcompile.verify.domain import NotInDomain, ZeroDenominator
from ndcompile.verify.field import Field
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
        if x.is_complex():
            return torch.view_as_complex(self.domain.draw((*x.shape, 2)))
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

    def check(self, most: int, among: Sequence[Rows] | None = None) -> Sequence[Rows]:
        """The combinations of rows that hold (`Trial.check`). Raises `RuleError`, or what else goes wrong."""
        if not self.exact:
            return self._check(FLOATING, most, among)
        try:
            return self._check(in_field(), most, among)
        except (NotInDomain, ZeroDenominator):
            return self._check(FLOATING, most, among)

    def trial(self, arithmetic: Arithmetic = FLOATING) -> Trial:
        torch.manual_seed(self.number)
        return self.call.trial(arithmetic, self.stopped)

    def _check(self, arithmetic: Arithmetic, most: int, among: Sequence[Rows] | None) -> Sequence[Rows]:
        return self.trial(arithmetic).check(*self.ways, most=most, among=among)


def tries(rule: str) -> st.SearchStrategy[Try]:
    """What a rule is tried on. A rule without calls cannot be tried."""
    assert rule in CALLS, f"no calls of {rule} are drawn: say which in tests/rules/calls"
    stopped = st.one_of(st.none(), st.integers(0, 3))
    return st.builds(Try, CALLS[rule], st.sampled_from(WAYS), stopped, st.booleans(), st.integers(0, 9))


def each(rule: str, count: int, function: Callable[[Try], object], start: int = 0) -> None:
    """A function of so many tries of a rule, drawn from that seed on: the simplest, and one a seed.

    Within a run hypothesis goes on from what it has drawn; each run here has one draw, so that they differ more.
    """
    done: set[str] = set()

    def run(tried: Try) -> None:
        if str(tried) not in done:
            function(tried)
            done.add(str(tried))

    for number in range(start, start + count):
        seed(number)(ONE_DRAW(given(tries(rule))(run)))()


ONE_DRAW = settings(
    max_examples=2,
    deadline=None,
    database=None,
    derandomize=False,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
)


@dataclass
class Held:
    """What held of a rule: combinations of rows, and which kinds of placement they take or give."""

    combinations: int = 0
    kinds: set[str] = field(default_factory=set)

    def add(self, held: Sequence[Rows]) -> None:
        self.combinations += len(held)
        self.kinds |= {p.kind for rows in held for row in rows for p in (*row.operands, row.output)}


def search(rule: str, count: int, most: int = 24, start: int = 0) -> Held:
    """Check so many tries of a rule; of each at most so many combinations of rows."""
    found = Held()
    each(rule, count, lambda tried: found.add(tried.check(most)), start)
    return found
