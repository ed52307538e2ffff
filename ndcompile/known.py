"""What is known of a program's lengths by the answers that its trace got, and how sizes can be written by that.

A model that pads `s` to whole chunks of 8, and then uses the result as `s`, was traced with the answer that `s` divides
by 8. Where that holds, `8 * ((s + 7) // 8)` is `s`, and rules see one size. Nothing is taken from the example but the
answers, and each of them is a condition of the program.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import sympy

from ndcompile.answers import Fact, Range, Ranges, decided, facts
from ndcompile.rounded import RESTS, TRACED, rounded
from ndcompile.runtime import private

BATCH = sympy.Symbol("b", positive=True, integer=True)
"""What is asked of it is a condition and no more: sizes are written for any batch."""

LEAST = 4
"""Answers that are the same for all sizes from here on are not asked again: torch itself tells 0 and 1 from others."""


@dataclass
class Known:
    """What lengths divide by, their bounds, and answers that say more than these."""

    chunks: dict[sympy.Symbol, int] = field(default_factory=dict)
    least: dict[sympy.Symbol, int] = field(default_factory=dict)
    most: dict[sympy.Symbol, int] = field(default_factory=dict)
    others: tuple[sympy.Expr, ...] = ()

    @classmethod
    def of(cls, asked: Iterable[sympy.Expr]) -> Known:
        """From answers that are true of one example; what is learned from one may decide another."""
        known, answers = cls(), [rounded(part) for answer in asked for part in sympy.And.make_args(answer)]
        while True:
            before = dict(known.chunks), dict(known.least), dict(known.most)
            known.others = tuple(left for answer in dict.fromkeys(answers) for left in known._take(answer))
            if before == (known.chunks, known.least, known.most):
                return known

    def _take(self, answer: sympy.Expr) -> list[sympy.Expr]:
        """Learn what an answer says, and hand back what says more."""
        told = self.simplified(answer)
        assert told is not sympy.false, f"{answer} held in the trace"
        if told is sympy.true or decided(told, self._ranges(told, LEAST)) is sympy.true:
            return []
        learned = facts(told, self._ranges(told))
        for fact in learned or ():
            self._learn(fact)
        return [told] if learned is None else []

    def _learn(self, fact: Fact) -> None:
        x, number = fact.symbol, fact.number
        if fact.kind == "chunk":
            self.chunks[x] = math.lcm(self.chunks.get(x, 1), number)
        elif fact.kind == "least" and number > 1:
            self.least[x] = max(self.least.get(x, number), number)
        elif fact.kind == "most":
            self.most[x] = min(self.most.get(x, number), number)
        chunk = self.chunks.get(x, 1)
        if x in self.least:
            self.least[x] = -(-self.least[x] // chunk) * chunk
        if x in self.most:
            self.most[x] = self.most[x] // chunk * chunk

    def fixed(self, x: sympy.Symbol) -> int | None:
        """The one number that a length can be."""
        least, most = self.least.get(x), self.most.get(x)
        return least if least is not None and least == most and x != BATCH else None

    def simplified(self, size: Any) -> Any:
        """A size, or a relation of sizes, as it can be written by what is known of lengths."""
        if isinstance(size, int) or not size.free_symbols:
            return size
        size = size.xreplace({x: sympy.Integer(n) for x in size.free_symbols if (n := self.fixed(x)) is not None})
        lengths = size.free_symbols - {BATCH}
        parts = {x: sympy.Dummy(positive=True, integer=True) for x in self.chunks if x in lengths}
        ranges = self._ranges(size) | {part: self._of_chunks(x) for x, part in parts.items()}
        size = _by_bounds(size.xreplace({x: self.chunks[x] * part for x, part in parts.items()}), ranges)
        for x, part in parts.items():
            size = _in_whole(size, part, x, self.chunks[x])
        return size

    def _ranges(self, size: sympy.Expr, least: int = 1) -> dict[sympy.Symbol, Range]:
        """Of what is in a size, where nothing is smaller than `least`."""
        return {x: self._range(x, least) for x in size.free_symbols}

    def _range(self, x: sympy.Symbol, least: int) -> Range:
        if x == BATCH:
            return least, None
        bound, most = self.least.get(x, 0), self.most.get(x)
        if most is not None and most < LEAST:
            least = 1
        return (max(bound, least) if bound > LEAST else least), most

    def _of_chunks(self, x: sympy.Symbol) -> Range:
        (least, most), chunk = self._range(x, 1), self.chunks[x]
        return -(-least // chunk), most if most is None else most // chunk

    def conditions(self) -> list[sympy.Expr]:
        """What a call's sizes must be like; a length that can be but one number is that number in the program."""
        found: list[sympy.Expr] = []
        for x in dict.fromkeys((*self.chunks, *self.least, *self.most)):
            if self.fixed(x) is None:
                found += [sympy.Eq(TRACED.Mod(x, self.chunks[x]), 0)] if x in self.chunks else []
                found += [sympy.Ge(x, self.least[x])] if x in self.least else []
                found += [sympy.Le(x, self.most[x])] if x in self.most else []
        return [*found, *self.others]


def _by_bounds(size: sympy.Expr, ranges: Ranges) -> sympy.Expr:
    """Quotients, rests, minima and maxima as what bounds show them to be."""

    def known(part: sympy.Expr) -> sympy.Expr:
        least, most = private.bounds(part, ranges)
        if least is not None and least == most:
            return sympy.Integer(least)
        return _reached(part, ranges) if isinstance(part, (sympy.Min, sympy.Max)) else part

    return size.replace(lambda part: isinstance(part, (TRACED.FloorDiv, sympy.Min, sympy.Max, *RESTS)), known)


def _reached(extreme: sympy.Expr, ranges: Ranges) -> sympy.Expr:
    """A minimum, or maximum, without what another of its parts is never beyond."""
    sign, kept = (-1 if isinstance(extreme, sympy.Max) else 1), list(extreme.args)
    for part in extreme.args:
        least = [private.bounds(sympy.expand(sign * (part - other)), ranges)[0] for other in kept if other != part]
        if any(n is not None and n >= 0 for n in least):
            kept.remove(part)
    return extreme.func(*kept)


def _in_whole(size: sympy.Expr, part: sympy.Symbol, whole: sympy.Symbol, chunk: int) -> sympy.Expr:
    """A size in the number of chunks as one in the length, where it has so many of them, else in `whole // chunk`."""

    def product(*factors: sympy.Expr) -> sympy.Expr:
        times, rest = sympy.Mul(*factors).as_coeff_Mul()
        while times.is_Integer and times % chunk == 0 and part in rest.as_powers_dict():
            times, rest = times // chunk, rest / part * whole
        return times * rest

    return size.replace(sympy.Mul, product).xreplace({part: number_of_chunks(whole.name, chunk)})


def number_of_chunks(length: str, chunk: int) -> sympy.Expr:
    """How many chunks a length has that divides by them."""
    return TRACED.FloorDiv(sympy.Symbol(length, positive=True, integer=True), sympy.Integer(chunk))
