"""The language of op rules: a sum of products of index lists, from which all placements of an op are derived.

    (* k)(n k) + n -> * n        linear: a product that contracts k, plus a bias
    f(* n!, n!, n!) -> * n!      layer norm: nonlinear, and n may not be sharded
    f(v?) h ...                  see the families for the rest

Letters are *factors*: what a dim runs over. `*` stands for all leading dims and broadcasts. Marks: `n!` must be whole,
`v?` is looked up (sharded: a masked lookup, the output is partial), `v~` is sharded by a special algorithm inside the
op (the output is invariant), all of `s@` and `t@` are sharded at once or not at all, by an algorithm that communicates.
Operands are the op's tensor arguments in their order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ndcompile.size import ONE, Shape, Size

Dims = tuple[tuple[str, ...], ...]
"""For each dim of a tensor its factors, major first; a dim that broadcasts has none."""


@dataclass(frozen=True)
class Signature:
    """A rule, bound to the shapes of one call.

    `terms` is the sum of products, by operand number; None says that the op is not linear in anything. `carriers` are
    the operands that may be partial (the numerator of a division, both sides of a product).
    """

    operands: tuple[Dims, ...]
    output: Dims
    sizes: dict[str, Size] = field(compare=False)
    terms: tuple[tuple[int, ...], ...] | None = None
    carriers: frozenset[int] = frozenset()
    whole: frozenset[str] = frozenset()
    masked: frozenset[str] = frozenset()
    special: frozenset[str] = frozenset()
    together: frozenset[str] = frozenset()

    @property
    def factors(self) -> tuple[str, ...]:
        seen = dict.fromkeys(f for dims in (*self.operands, self.output) for factors in dims for f in factors)
        return tuple(seen)


@dataclass(frozen=True)
class Call:
    """What a rule sees of a node: its tensor operands' shapes, its output's, and its other arguments by name."""

    name: str
    operands: tuple[Shape, ...]
    output: Shape
    arguments: dict[str, Any] = field(compare=False)


Rule = Callable[[Call], Signature]

MARKS = "!?~@"


class RuleError(ValueError):
    """A rule that does not fit the call it is used for."""


def line(*texts: str) -> Rule:
    """A rule from its text; of several texts the one with the call's number of operands is used."""
    parsed = [_parse(text) for text in texts]

    def rule(call: Call) -> Signature:
        for pattern in parsed:
            if len(pattern.operands) == len(call.operands):
                return pattern.bind(call)
        raise RuleError(f"{call.name} is called with {len(call.operands)} tensors; its rule has {' or '.join(texts)}")

    return rule


def tokens(text: str) -> tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]:
    """The tokens of each operand and of the output, as they are written."""
    pattern = _parse(text)
    return pattern.operands, pattern.output


@dataclass(frozen=True)
class _Pattern:
    text: str
    operands: tuple[tuple[str, ...], ...]
    output: tuple[str, ...]
    terms: tuple[tuple[int, ...], ...] | None
    carriers: frozenset[int]

    def bind(self, call: Call) -> Signature:
        stars = [f"_{i}" for i in range(self._star_length(call))]
        sizes: dict[str, Size] = {}
        shaped = [*zip(self.operands, call.operands, strict=True), (self.output, call.output)]
        dims = [_bind(tokens, shape, stars, sizes, self.text) for tokens, shape in reversed(shaped)][::-1]
        marks = {mark: frozenset(_marked((*self.operands, self.output), mark)) for mark in MARKS}
        given = tuple(dims[:-1])
        return Signature(
            given, dims[-1], sizes, self.terms, self.carriers,
            whole=marks["!"], masked=marks["?"], special=marks["~"], together=marks["@"],
        )  # fmt: skip

    def _star_length(self, call: Call) -> int:
        lengths = [
            len(shape) - len(tokens) + 1
            for tokens, shape in zip((*self.operands, self.output), (*call.operands, call.output), strict=True)
            if "*" in tokens
        ]
        return max(lengths, default=0)


def _bind(tokens: Sequence[str], shape: Shape, stars: list[str], sizes: dict[str, Size], text: str) -> Dims:
    """The factors of each dim; a dim of size 1 where the factor is larger broadcasts."""
    if "*" in tokens:
        at, count = tokens.index("*"), len(shape) - len(tokens) + 1
        tokens = [*tokens[:at], *stars[len(stars) - count :], *tokens[at + 1 :]] if count else _drop(tokens, at)
    if len(tokens) != len(shape):
        raise RuleError(f"the rule '{text}' does not fit a tensor of {len(shape)} dims")
    dims: list[tuple[str, ...]] = []
    for token, size in zip(tokens, shape, strict=True):
        name = token.rstrip(MARKS)
        if name == "1":
            dims.append(())
            continue
        known = sizes.setdefault(name, size)
        if known == ONE and size != ONE:
            sizes[name] = known = size
        if known != size and size != ONE:
            raise RuleError(f"the rule '{text}' needs equal sizes for '{name}', got {known} and {size}")
        dims.append((name,) if known == size and size != ONE else ())
    return tuple(dims)


def _drop(tokens: Sequence[str], at: int) -> list[str]:
    return [*tokens[:at], *tokens[at + 1 :]]


def _marked(groups: Sequence[Sequence[str]], mark: str) -> list[str]:
    return [token.rstrip(MARKS) for tokens in groups for token in tokens if mark in token]


def _parse(text: str) -> _Pattern:
    left, arrow, right = text.partition("->")
    if not arrow:
        raise RuleError(f"a rule is 'operands -> output', got '{text}'")
    left = left.strip()
    if left.startswith("f(") and left.endswith(")"):
        operands = tuple(tuple(part.split()) for part in left[2:-1].split(","))
        return _Pattern(text, operands, tuple(right.split()), None, frozenset())
    found: list[tuple[str, ...]] = []
    terms, carriers = [], set()
    for term in left.split("+") if left else []:
        numerator, _, denominator = term.partition("/")
        numbers = []
        for position, part in enumerate((numerator, denominator)):
            for operand in re.findall(r"\(([^)]*)\)", part) or ([part] if part.strip() else []):
                numbers.append(len(found))
                if position == 0:
                    carriers.add(len(found))
                found.append(tuple(operand.split()))
        terms.append(tuple(numbers))
    return _Pattern(text, tuple(found), tuple(right.split()), tuple(terms) if terms else None, frozenset(carriers))
