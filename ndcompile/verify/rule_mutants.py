"""Bugs planted in the rules, one at a time: in what one rule says of its op, or in how rows follow from every rule."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from ndcompile.placement import I, P, Placement, R
from ndcompile.rules import rows as derivation
from ndcompile.rules.notation import Call, Dims, Rule, Signature
from ndcompile.rules.registry import RULES
from ndcompile.rules.rows import Row
from ndcompile.size import Size

Sites = Iterator[tuple[str, Signature]]
"""Places in a signature where an operator applies, and the signature with the bug there."""


# ---- in what one rule says -------------------------------------------------------------------------------------------


def _partial_in_nonlinear(s: Signature) -> Sites:
    if s.terms is None:
        everything = tuple(range(len(s.operands)))
        for i in everything:
            yield f"operand {i}", replace(s, terms=(everything,), carriers=frozenset({i}))


def _maximum_as_sum(s: Signature) -> Sites:
    """A reduction that is no sum, whose parts are added."""
    gone = s.whole - {f for dims in s.output for f in dims}
    if s.terms is None and gone and len(s.operands) == 1:
        yield "", replace(s, terms=((0,),), carriers=frozenset({0}), whole=s.whole - gone)


def _product_as_sum(s: Signature) -> Sites:
    for number, term in enumerate(s.terms or ()):
        if len(term) > 1 and set(term) <= s.carriers:
            parts = tuple((i,) for i in term)
            others = (s.terms or ())[:number], (s.terms or ())[number + 1 :]
            yield f"term {number}", replace(s, terms=(*others[0], *parts, *others[1]))


def _sum_as_product(s: Signature) -> Sites:
    if s.terms is not None and len(s.terms) > 1:
        yield "", replace(s, terms=(tuple(dict.fromkeys(itertools.chain(*s.terms))),))


def _partial_denominator(s: Signature) -> Sites:
    for i in sorted({i for term in s.terms or () for i in term} - s.carriers):
        yield f"operand {i}", replace(s, carriers=s.carriers | {i})


def _forgotten_term(s: Signature) -> Sites:
    """A bias that stays whole where the contraction is sharded."""
    if s.terms is not None and len(s.terms) > 1:
        for number in range(len(s.terms)):
            yield f"term {number}", replace(s, terms=s.terms[:number] + s.terms[number + 1 :])


def _sharded_whole(s: Signature) -> Sites:
    """Also where a dim is whole because its operands have other sizes there."""
    for factor in sorted(s.whole):
        size = Size(12) if s.sizes[factor].symbols == ("acted",) else s.sizes[factor]
        yield factor, replace(s, whole=s.whole - {factor}, sizes=s.sizes | {factor: size})


def _unmasked(s: Signature) -> Sites:
    for factor in sorted(s.masked):
        yield factor, replace(s, masked=s.masked - {factor})


def _special_as_contracted(s: Signature) -> Sites:
    """A factor that needs an algorithm is sharded without one, and the result is called partial."""
    for factor in sorted(s.special):
        everything = tuple(range(len(s.operands)))
        yield factor, replace(s, special=s.special - {factor}, terms=s.terms or (everything,))


def _tensors(s: Signature) -> list[tuple[str, Dims]]:
    return [*((f"operand {i}", dims) for i, dims in enumerate(s.operands)), ("output", s.output)]


def _with(s: Signature, number: int, dims: Dims, **more: Any) -> Signature:
    every = [*s.operands, s.output]
    every[number] = dims
    return replace(s, operands=tuple(every[:-1]), output=every[-1], **more)


def _minor_before_major(s: Signature) -> Sites:
    """Of a dim of several factors (a reshape, heads in groups) a later one is the first: in one tensor, or in all."""
    for number, (name, dims) in enumerate(_tensors(s)):
        for d, factors in enumerate(dims):
            if len(factors) > 1:
                yield f"{name}, dim {d}", _with(s, number, _turned(dims, factors))
    for factors in dict.fromkeys(part for _, dims in _tensors(s) for part in dims if len(part) > 1):
        every = [_turned(dims, factors) for _, dims in _tensors(s)]
        yield f"all, {' '.join(factors)}", replace(s, operands=tuple(every[:-1]), output=every[-1])


def _turned(dims: Dims, factors: tuple[str, ...]) -> Dims:
    return tuple(part[::-1] if part == factors else part for part in dims)


def _other_dim(s: Signature) -> Sites:
    """Two neighbouring dims exchanged."""
    for number, (name, dims) in enumerate(_tensors(s)):
        for d in range(len(dims) - 1):
            if dims[d] != dims[d + 1]:
                turned = (*dims[:d], dims[d + 1], dims[d], *dims[d + 2 :])
                yield f"{name}, dims {d} and {d + 1}", _with(s, number, turned)


def _untied(s: Signature) -> Sites:
    """A factor that two tensors share is a factor of its own in one of them."""
    for number, (name, dims) in enumerate(_tensors(s)):
        others = [f for other, (_, given) in enumerate(_tensors(s)) if other != number for part in given for f in part]
        for factor in dict.fromkeys(f for part in dims for f in part):
            if factor in others:
                renamed = tuple(tuple("other" if f == factor else f for f in part) for part in dims)
                yield f"{name}, {factor}", _with(s, number, renamed, sizes=s.sizes | {"other": s.sizes[factor]})


def _sharded_unit(s: Signature) -> Sites:
    """A dim of size 1 is taken for the one that it broadcasts to."""
    for number, (name, dims) in enumerate(_tensors(s)):
        for d, part in enumerate(dims):
            at = d - len(dims) + len(s.output)
            if not part and 0 <= at < len(s.output) and s.output[at]:
                yield f"{name}, dim {d}", _with(s, number, (*dims[:d], s.output[at], *dims[d + 1 :]))


IN_A_RULE: Mapping[str, Callable[[Signature], Sites]] = {
    "partial values accepted by a nonlinear op": _partial_in_nonlinear,
    "a maximum taken as a sum": _maximum_as_sum,
    "a product taken as a sum": _product_as_sum,
    "a sum taken as a product": _sum_as_product,
    "a denominator that may be partial": _partial_denominator,
    "a term of the sum forgotten": _forgotten_term,
    "a whole dim sharded": _sharded_whole,
    "a lookup without its mask": _unmasked,
    "a special algorithm left out": _special_as_contracted,
    "a later factor of a dim taken as the first": _minor_before_major,
    "a wrong dim": _other_dim,
    "a factor not tied to another tensor's": _untied,
    "a dim of size 1 sharded": _sharded_unit,
}
"""What a signature becomes under each operator, at each site."""


# ---- in what a rule sees ---------------------------------------------------------------------------------------------

DIMS = ("dim", "dims", "dim0", "dim1", "start_dim", "source", "destination")


def _negative_forgotten(call: Call) -> Call:
    """The call with negative dims as a rule sees them that forgets to count from the end: as no dim, or the first."""

    def forgotten(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [forgotten(v) for v in value]
        return max(value, 0) if isinstance(value, int) and not isinstance(value, bool) else value

    named = {name: forgotten(value) if name in DIMS else value for name, value in call.arguments.items()}
    return replace(call, arguments=named)


NEGATIVE = "negative dims forgotten"


# ---- in how rows follow ----------------------------------------------------------------------------------------------


def _each(change: Callable[[Row], Row], *functions: str) -> dict[str, Any]:
    """The functions of `rules/rows.py` with each row changed."""

    def changed(right: Callable[..., Iterable[Row]]) -> Callable[..., list[Row]]:
        return lambda *args, **kwargs: [change(row) for row in right(*args, **kwargs)]

    return {name: changed(getattr(derivation, name)) for name in functions}


def _replaced(placement: Placement, old: Placement, new: Placement) -> Placement:
    return new if placement == old else placement


def _row(change: Callable[[Placement], Placement], given: bool = True, made: bool = True) -> Callable[[Row], Row]:
    def changed(row: Row) -> Row:
        operands = tuple(map(change, row.operands)) if given else row.operands
        return replace(row, operands=operands, output=change(row.output) if made else row.output)

    return changed


def _any_leads(dims: Dims, factor: str, sizes: Any, taken: Any) -> int:
    return next((d for d, factors in enumerate(dims) if factor in factors), -1)


def _untaken_divides(s: Signature, factor: str, ranks: int, taken: Any, symbols: Any) -> bool:
    return _divides(s, factor, ranks, {}, symbols)


def _untaken_leads(dims: Dims, factor: str, sizes: Any, taken: Any) -> int | None:
    full = {f: sizes[f].coefficient for f in taken}
    return _leads(dims, factor, sizes, full)


def _always_divides(s: Signature, factor: str, ranks: int, taken: Any, symbols: Any) -> bool:
    return factor not in s.whole and s.sizes[factor].coefficient >= ranks


def _all_partial(s: Signature, flows: Sequence[bool]) -> list[Row]:
    if s.terms is None:
        return []
    return [Row(tuple(P() if i in s.carriers and flows[i] else R for i in range(len(flows))), P())]


_divides, _leads = derivation._divides, derivation.leads

IN_ROWS: Mapping[str, Mapping[str, Any]] = {
    "P(max) for P(sum)": _each(_row(lambda p: _replaced(p, P(), P("max"))), "_partial", "_sharded"),
    "a contraction's result called whole": _each(_row(lambda p: _replaced(p, P(), R), given=False), "_sharded"),
    "a bias whole where it must be partial": _each(_row(lambda p: _replaced(p, P(), R), made=False), "_sharded"),
    "an invariant operand beside a shard": _each(_row(lambda p: _replaced(p, R, I), made=False), "_sharded"),
    "a special algorithm's result called replicated": _each(
        _row(lambda p: _replaced(p, I, R), given=False), "_sharded"
    ),
    "every operand of a product partial": {"_partial": _all_partial},
    "a partial operand's result called whole": _each(_row(lambda p: _replaced(p, P(), R), given=False), "_partial"),
    "a later factor of a dim sharded where the first is not": {"leads": _any_leads},
    "what an earlier axis took of a factor forgotten": {"_divides": _untaken_divides},
    "a factor full as soon as it is sharded": {"leads": _untaken_leads},
    "a part of a dim cut unevenly": {"_divides": _always_divides},
}
"""For each operator the functions of `rules/rows.py` that are wrong."""


# ---- planting --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RuleMutant:
    """A bug in the rule of an op, at a site of its signature; or, without an op, in how rows follow from all rules."""

    operator: str
    op: str = ""
    site: str = ""

    def __str__(self) -> str:
        return "   ".join(part for part in (self.operator, self.op, self.site) if part)

    @contextmanager
    def planted(self) -> Iterator[None]:
        """A block in which the rules have the bug."""
        if self.op:
            with mock.patch.dict(RULES, {self.op: self._rule(RULES[self.op])}):
                yield
        else:
            with mock.patch.multiple(derivation, **IN_ROWS[self.operator]):
                yield

    def _rule(self, right: Rule) -> Rule:
        if self.operator == NEGATIVE:
            return lambda call: right(_negative_forgotten(call))

        def wrong(call: Call) -> Signature:
            bound = right(call)
            return dict(IN_A_RULE[self.operator](bound)).get(self.site, bound)

        return wrong


def rule_mutants(op: str, signatures: Iterable[Signature], negative: bool = False) -> list[RuleMutant]:
    """The bugs in an op's rule that show in these signatures of it; also forgotten negative dims, where it has any."""
    found = {
        RuleMutant(operator, op, site): None
        for signature in signatures
        for operator, sites in IN_A_RULE.items()
        for site, _ in sites(signature)
    }
    return [*found, *([RuleMutant(NEGATIVE, op)] if negative else [])]


def derivation_mutants() -> list[RuleMutant]:
    """The bugs in how rows follow from a rule."""
    return [RuleMutant(operator) for operator in IN_ROWS]
