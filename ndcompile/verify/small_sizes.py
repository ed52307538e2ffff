"""Small numbers for the sizes of a program: which will do is known from its graph.

A dim that an op takes as a product of others is that product, a dim that an axis cuts evenly is cut evenly, one that it
does not is not, and one that axes fill, so that others shard what is minor to it, is full.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ndcompile.codegen.sizes import SizeFacts
from ndcompile.errors import CompileError
from ndcompile.mesh import MeshSpec
from ndcompile.program import Program

LARGEST = 96
"""The largest number that is tried for a size that nothing else fixes."""

TRIED = 5_000
"""How many numbers are tried in a row without finding a table."""


@dataclass(frozen=True)
class _Rule:
    """What must hold of some names; where one side is a single name, the other says what it is."""

    names: frozenset[str]
    holds: Callable[[Mapping[str, int]], bool]
    name: str = ""
    value: Callable[[Mapping[str, int]], int] | None = None


def tables(program: Program, mesh: MeshSpec, alone: SizeFacts) -> Iterator[dict[str, int]]:
    """Numbers for all names in both texts, small and different from each other where they are in the program."""
    facts = program.made.emitted.sizes
    real = alone.table | facts.table
    if any(real[name] != number for name, number in alone.table.items()):
        raise CompileError("the text for one device has a name for another size than the program's text has")
    names = sorted(_names(facts) | _names(alone), key=lambda name: (real[name], name))
    rules = list(_cuts(program, facts, mesh))
    for each in (facts, alone):
        rules += [*_equalities(each), *_halves(each), *_ends(each), *_places_within(each)]
    rules += _full(facts, mesh)
    yield from _Search(names, real, rules, all_differ=True).tables()
    yield from _Search(names, real, rules, all_differ=False).tables()


def _names(facts: SizeFacts) -> set[str]:
    texts = [text for dims in facts.dims.values() for text in dims if text]
    texts += [text for pair in facts.equal for text in pair]
    return {name for text in texts for name in _words(text)} | set(facts.table)


def _words(text: str) -> list[str]:
    return re.findall(r"[A-Za-z_]\w*", text)


def number_of(text: str) -> Callable[[Mapping[str, int]], int]:
    code = compile(text, "<size>", "eval")
    return lambda table: int(eval(code, {"__builtins__": {}}, dict(table)))


def _times(part: Callable[[Mapping[str, int]], int], count: int) -> Callable[[Mapping[str, int]], int]:
    return lambda table: part(table) * count


def _equalities(facts: SizeFacts) -> Iterator[_Rule]:
    for left, right in facts.equal:
        one, two = number_of(left), number_of(right)
        names = frozenset(_words(left) + _words(right))

        def holds(table: Mapping[str, int], one: Any = one, two: Any = two) -> bool:
            return bool(one(table) == two(table))

        yield _Rule(names, holds)
        sides = (left, right, two), (right, left, one)
        yield from (_Rule(names, holds, a, b) for a, c, b in sides if a.isidentifier() and a not in _words(c))
        for part, text in ((one, right), (two, left)):  # of a part that is known, the whole
            if (found := re.fullmatch(r"(\w+) // (\d+)", text)) and found[1].isidentifier():
                yield _Rule(names, holds, found[1], _times(part, int(found[2])))


def _cuts(program: Program, facts: SizeFacts, mesh: MeshSpec) -> Iterator[_Rule]:
    """A dim that axes cut evenly stays so, an uneven one too, and no rank is left without a part of it."""
    seen = set()
    for node in program.folded.graph.nodes:
        layouts = [node.meta[key] for key in ("layout", "stored") if node.meta.get(key) is not None]
        for dim, axes in (pair for layout in layouts for pair in enumerate(layout.dims)):
            text = facts.dims.get(node.name, ())[dim] if node.name in facts.dims else None
            if not axes or text is None:
                continue
            even = node.meta["sizes"][dim] % program.mesh.size(*axes) == 0
            if (text, axes, even) in seen:
                continue
            seen.add((text, axes, even))
            size, parts = number_of(text), mesh.size(*axes)

            def holds(table: Mapping[str, int], size: Any = size, parts: int = parts, even: bool = even) -> bool:
                return (size(table) % parts == 0) == even and size(table) >= parts

            yield _Rule(frozenset(_words(text)), holds)


def _halves(facts: SizeFacts) -> Iterator[_Rule]:
    """What is written as a part of a size is a whole part of it."""
    texts = {text for pair in facts.equal for text in pair} | {t for dims in facts.dims.values() for t in dims if t}
    for text in texts:
        for whole, parts in re.findall(r"(\w+(?: \* \w+)*) // (\d+)", text):
            size, count = number_of(whole), int(parts)

            def holds(table: Mapping[str, int], size: Any = size, count: int = count) -> bool:
                return bool(size(table) % count == 0)

            yield _Rule(frozenset(_words(whole)), holds)


def _ends(facts: SizeFacts) -> Iterator[_Rule]:
    """A dim reaches to the place in it that is written as a number."""
    for text, number in facts.least:
        size = number_of(text)

        def holds(table: Mapping[str, int], size: Any = size, number: int = number) -> bool:
            return bool(size(table) >= number)

        yield _Rule(frozenset(_words(text)), holds)


def _places_within(facts: SizeFacts) -> Iterator[_Rule]:
    """A place with a name is one in its dim."""
    for name, text in facts.places:
        size = number_of(text)

        def holds(table: Mapping[str, int], name: str = name, size: Any = size) -> bool:
            return bool(table[name] < size(table))

        yield _Rule(frozenset([name, *_words(text)]), holds)


def _full(facts: SizeFacts, mesh: MeshSpec) -> Iterator[_Rule]:
    """A factor that axes fill stays full: else a rank's part of what is minor to it would not lie in one piece."""
    for text, axes in facts.full:
        size, ranks = number_of(text), mesh.size(*axes)

        def holds(table: Mapping[str, int], size: Any = size, ranks: int = ranks) -> bool:
            return bool(size(table) == ranks)

        def value(_: Mapping[str, int], ranks: int = ranks) -> int:
            return ranks

        yield _Rule(frozenset(_words(text)), holds, text, value)


_Numbers = list[int] | tuple[int, ...]
"""What may be tried for a name; a tuple is what a rule tells of others, which may be larger."""


class _Search:
    """Number after number, back where none is left for a name. Those come first that have to do with what is chosen, so
    that what cannot be shows soon, and of them the one with the fewest numbers left. What is a product or a sum of
    others comes after them: it may be larger than what is tried. Numbers differ where those of the program do; but for
    `all_differ`, what the others tell may be equal to another's.
    """

    def __init__(self, names: list[str], real: Mapping[str, int], rules: list[_Rule], all_differ: bool) -> None:
        self._real, self._all_differ, self._tried = real, all_differ, 0
        self._about = {name: [rule for rule in rules if name in rule.names] for name in names}
        self._made = {name: [r for r in self._about[name] if r.name == name and len(r.names) > 2] for name in names}
        self._open = {name: self._allowed(name, self._candidates(name), {}) for name in names}

    def tables(self) -> Iterator[dict[str, int]]:
        """It ends where too many numbers were tried in vain."""
        return self._from({}, self._open)

    def _candidates(self, name: str) -> list[int]:
        real = self._real[name]
        return [*range(2, LARGEST + 1 if real < 8 else min(LARGEST + 1, real)), real]

    def _from(self, table: dict[str, int], left: Mapping[str, _Numbers]) -> Iterator[dict[str, int]]:
        if not left:
            self._tried = 0
            yield dict(table)
            return
        name = min(left, key=lambda name: (self._waits(name, left), not self._beside(name, table), len(left[name])))
        for number in left[name]:
            self._tried += 1
            if self._tried > TRIED:
                return
            told = isinstance(left[name], tuple) and not self._all_differ
            if not told and number != self._real[name] and self._is_anothers(number, name, table):
                continue
            narrowed = self._narrowed(name, table | {name: number}, left)
            if narrowed is not None:
                yield from self._from(table | {name: number}, narrowed)

    def _waits(self, name: str, left: Mapping[str, _Numbers]) -> bool:
        return len(left[name]) > 1 and any((rule.names - {name}) & left.keys() for rule in self._made[name])

    def _is_anothers(self, number: int, name: str, table: Mapping[str, int]) -> bool:
        return any(table[other] == number and self._real[other] != self._real[name] for other in table)

    def _beside(self, name: str, table: Mapping[str, int]) -> bool:
        return any(rule.names & table.keys() for rule in self._about[name])

    def _narrowed(
        self, name: str, table: Mapping[str, int], left: Mapping[str, _Numbers]
    ) -> dict[str, _Numbers] | None:
        """What is left for the others, or none where a rule of this name does not hold."""
        narrowed = {other: numbers for other, numbers in left.items() if other != name}
        known = [(rule, rule.names - table.keys()) for rule in self._about[name]]
        if not all(rule.holds(table) for rule, unknown in known if not unknown):
            return None
        for rule, unknown in known:  # what a rule tells may be larger than what is tried
            if rule.value is not None and unknown == {rule.name}:
                value, numbers = rule.value(table), narrowed[rule.name]
                told = isinstance(numbers, tuple)
                is_new = not told and value not in self._candidates(rule.name)
                narrowed[rule.name] = (value,) if value in numbers or is_new else ()
        for other in {other for _, unknown in known if len(unknown) == 1 for other in unknown}:
            narrowed[other] = self._allowed(other, narrowed[other], table)
        return narrowed if all(narrowed.values()) else None

    def _allowed(self, name: str, numbers: _Numbers, table: Mapping[str, int]) -> _Numbers:
        """Those with which each rule holds that needs no other number."""
        rules = [rule for rule in self._about[name] if rule.names - {name} <= table.keys()]
        return type(numbers)(n for n in numbers if all(rule.holds({**table, name: n}) for rule in rules))
