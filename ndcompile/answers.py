"""What an answer about sizes says of one length: that it divides by a number, and how long it is.

`8 * ((s + 7) // 8) == s` says that `s` divides by 8, `min(256, s) == s` that it is at most 256. Each of these facts is
as good as the answer, for all lengths; of an answer that says more there are none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import sympy
from sympy.core.relational import Relational

from ndcompile.codegen.written import written
from ndcompile.rounded import RESTS, TRACED, rounded
from ndcompile.runtime import private

PERIOD = 4096
"""The longest period in which an answer is looked at length by length."""

Range = tuple[int, int | None]
Ranges = Mapping[sympy.Symbol, Range]
"""The least and the most that each symbol may be; None where nothing is above it."""


@dataclass(frozen=True)
class Fact:
    """`symbol` divides by `number`, or is at least or at most that."""

    symbol: sympy.Symbol
    kind: Literal["chunk", "least", "most"]
    number: int


def decided(answer: sympy.Expr, ranges: Ranges) -> sympy.Expr:
    """True or false where the answer is the same for all sizes in their ranges; else the answer as it is."""
    if not isinstance(answer, Relational):
        return answer
    above = {x: sympy.Dummy(nonnegative=True, integer=True) for x in answer.free_symbols}
    difference = (answer.lhs - answer.rhs).xreplace({x: ranges[x][0] + more for x, more in above.items()})
    rest = dict[sympy.Symbol, Range]()
    for x, more in above.items():
        least, most = ranges[x]
        rest[more] = 0, None if most is None else most - least
    can_be = private.bounds(answer.func(sympy.expand(difference), 0), rest)
    return sympy.sympify(can_be[0]) if can_be in ((True, True), (False, False)) else answer


def facts(answer: sympy.Expr, ranges: Ranges) -> list[Fact] | None:
    """What an answer comes to for sizes in their ranges; None where it says more."""
    if not isinstance(answer, Relational):
        return None
    difference = answer.lhs - answer.rhs
    if isinstance(answer, (sympy.Le, sympy.Lt)):
        difference = -difference
    difference = _without_positive(difference, ranges)
    if not difference.is_integer or len(difference.free_symbols) > 1:
        return None
    if isinstance(answer, (sympy.Gt, sympy.Lt)):
        difference = difference - 1
    return _facts_of(difference, next((kind for kind in (sympy.Eq, sympy.Ne) if isinstance(answer, kind)), sympy.Ge))


class _SaysMore(Exception):
    """An answer is not as good as some facts."""


def _facts_of(difference: sympy.Expr, relation: type[Relational]) -> list[Fact] | None:
    try:
        return list(_facts(difference, relation))
    except _SaysMore:
        return None


def _without_positive(difference: sympy.Expr, ranges: Ranges) -> sympy.Expr:
    """The difference of two sizes without factors that are always positive: it has the same sign."""
    total = sympy.Integer(1)
    for factor in sympy.Mul.make_args(sympy.factor(difference)):
        factor = rounded(factor)
        least = private.bounds(factor, ranges)[0]
        total *= sympy.sign(factor) if factor.is_Integer else 1 if least is not None and least > 0 else factor
    return sympy.expand(total)


def _facts(difference: sympy.Expr, relation: type[Relational]) -> Iterator[Fact]:
    """Of a difference that is zero (`Eq`), or not (`Ne`), or not negative (`Ge`)."""
    if difference.is_Integer:
        if relation(difference, 0) is not sympy.true:
            raise _SaysMore
        return
    constant, rest = difference.as_coeff_Add()
    times, atom = rest.as_coeff_Mul()
    if atom.is_Symbol and relation is not sympy.Ne:
        yield from _bounds(atom, int(times), int(constant), relation)
    elif isinstance(atom, TRACED.FloorDiv) and atom.args[1].is_Integer and relation is not sympy.Ne:
        inner, chunk = atom.args
        for least, number in _ends(int(times), int(constant), relation):
            bound = inner - number * chunk if least else number * chunk + chunk - 1 - inner
            yield from _facts(sympy.expand(bound), sympy.Ge)
    else:
        found = _of_extremes(difference, relation)
        yield from _of_period(difference, relation) if found is None else found


def _ends(times: int, constant: int, relation: type[Relational]) -> Iterator[tuple[bool, int]]:
    """`times · x + constant` is zero or not negative: the numbers that `x` is at least (True) and at most (False)."""
    if relation is sympy.Eq and constant % times:
        raise _SaysMore
    if relation is sympy.Eq or times > 0:
        yield True, -(constant // times)
    if relation is sympy.Eq or times < 0:
        yield False, constant // -times


def _bounds(symbol: sympy.Symbol, times: int, constant: int, relation: type[Relational]) -> Iterator[Fact]:
    for least, number in _ends(times, constant, relation):
        yield Fact(symbol, "least" if least else "most", number)


def _of_extremes(difference: sympy.Expr, relation: type[Relational]) -> Iterator[Fact] | None:
    """Of a difference that is the least or the greatest of some."""
    extremes = [t for t in sympy.Add.make_args(difference) if isinstance(t.as_coeff_Mul()[1], (sympy.Min, sympy.Max))]
    if len(extremes) != 1 or relation is sympy.Ne:
        return None
    times, extreme = extremes[0].as_coeff_Mul()
    least = (times > 0) == isinstance(extreme, sympy.Min)
    each = [sympy.expand(difference - extremes[0] + times * part) for part in extreme.args]
    if relation is sympy.Eq:
        each = [part if least else -part for part in each] if 0 in each else []
    elif not least:  # one of them is not negative
        always = [part for part in each if _facts_of(part, relation) == []]
        each = always[:1] or [part for part in each if not part.is_Integer]
        each = each if len(each) == 1 else []
    return (fact for part in each for fact in _facts(part, sympy.Ge)) if each else None


def _of_period(difference: sympy.Expr, relation: type[Relational]) -> Iterator[Fact]:
    """Of a difference that comes again after so many places, or grows: is it as asked where the length divides?"""
    (symbol,) = difference.free_symbols
    divisors = [part.args[1] for part in difference.atoms(TRACED.FloorDiv, *RESTS)]
    if not divisors or not all(n.is_Integer for n in divisors):
        raise _SaysMore
    period = math.lcm(*map(int, divisors))
    if period > PERIOD:
        raise _SaysMore
    growth = _growth(difference, symbol, period)
    if growth < 0 or (growth and relation is not sympy.Ge):
        raise _SaysMore
    code = compile(f"{written(difference)} {relation.rel_op} 0", "<answer>", "eval")
    true = [n for n in range(1, period + 1) if eval(code, {"__builtins__": {}}, {str(symbol): n})]
    chunk = true[0] if true else period
    if (growth and len(true) < period) or period % chunk or true != list(range(chunk, period + 1, chunk)):
        raise _SaysMore
    if chunk > 1:
        yield Fact(symbol, "chunk", chunk)


def _growth(size: sympy.Expr, symbol: sympy.Symbol, by: int) -> int:
    """How much a size grows wherever the symbol grows by so much."""
    if not size.has(symbol):
        return 0
    if size == symbol:
        return by
    if size.is_Add:
        return sum(_growth(term, symbol, by) for term in size.args)
    times, rest = size.as_coeff_Mul()
    if times != 1 and times.is_Integer:
        return int(times) * _growth(rest, symbol, by)
    if isinstance(size, (TRACED.FloorDiv, *RESTS)):
        inner, divisor = _growth(size.args[0], symbol, by), int(size.args[1])
        if inner % divisor == 0:
            return inner // divisor if isinstance(size, TRACED.FloorDiv) else 0
    raise _SaysMore
