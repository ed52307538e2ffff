"""A program at small sizes, on a small mesh, with few blocks: the same text, other numbers in its table.

The emitted text holds no size but by name, and no rank. So the text of a program for 8,192 ranks runs on 16 as it is,
once the line that names the mesh and the table of sizes have other numbers. Which numbers will do is known from the
graph: a dim that an op takes as a product of others is that product, a dim that an axis cuts evenly is cut evenly, one
that it does not is not, and one that axes fill, so that others shard what is minor to it, is full. Of a run of equal
blocks three are kept: the first, one in the middle, and its successor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from ndcompile.axes import parts as parts_of
from ndcompile.codegen.emit import emit
from ndcompile.codegen.sizes import SizeFacts
from ndcompile.errors import CompileError
from ndcompile.fold import Place
from ndcompile.mesh import MeshSpec
from ndcompile.passes.measure_values import measure_values
from ndcompile.passes.propagate_layouts import propagate_layouts
from ndcompile.pipeline import copied
from ndcompile.program import Parameter, Program
from ndcompile.runtime.manifest import Manifest, ParameterPlan

LARGEST = 96
"""The largest number that is tried for a size that nothing else fixes."""

TRIED = 5_000
"""How many numbers are tried in a row without finding a table."""

ROUNDS = 2
"""How many of the rounds that a run's second one stands for are kept."""


RANKS, ELEMENTS = 16, 2_000_000
"""A program of more ranks, or with more elements in its parameters, runs at small sizes."""

SMALL_ENOUGH = f"a configuration of at most {ELEMENTS:,} parameters on at most {RANKS} ranks: it runs at its own sizes"


@dataclass
class Small(Program):
    """A program whose sizes were changed. `one_rank` is the text for one device at these sizes."""

    one_rank: str = ""
    large: Program | None = None
    large_text: str = ""
    """The program that it was made of, and the text for one device at its sizes."""
    without: frozenset[str] = frozenset()
    """The blocks that are left out."""
    named: dict[str, int] = field(default_factory=dict)
    """The numbers of the text's table."""

    def renumbered(self, source: str) -> str:
        """Another text for the large program, with this one's mesh and table."""
        return _with_numbers(source, self.made.emitted.sizes, self.named, self.mesh)


def shrink(program: Program, ranks: Mapping[str, int] | None = None) -> Iterator[Small]:
    """Programs with the same text at small sizes, smallest first; `ranks` gives axes another size than 2.

    Sizes that the facts do not rule out may still not fit together: then the text raises when it runs, and the next
    one is to be tried. Raises `CompileError` where there is no table to change, or none that would do.
    """
    mesh = MeshSpec.parse(", ".join(f"{a.name}={(ranks or {}).get(a.name, 2)}" for a in program.mesh.axes))
    alone = _on_one_rank(program)
    found = False
    for sizes in tables(program, mesh, alone.sizes):
        found = True
        yield _small(program, alone, mesh, sizes)
    if not found:
        raise CompileError(
            "no small sizes were found that keep the program's text",
            why="the numbers in its table fit together in no other way that was tried",
            tries=SMALL_ENOUGH,
        )


# ---- the numbers ---------------------------------------------------------------------------------------------------


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


def _number(text: str) -> Callable[[Mapping[str, int]], int]:
    code = compile(text, "<size>", "eval")
    return lambda table: int(eval(code, {"__builtins__": {}}, dict(table)))


def _times(part: Callable[[Mapping[str, int]], int], count: int) -> Callable[[Mapping[str, int]], int]:
    return lambda table: part(table) * count


def _equalities(facts: SizeFacts) -> Iterator[_Rule]:
    for left, right in facts.equal:
        one, two = _number(left), _number(right)
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
            size, parts = _number(text), mesh.size(*axes)

            def holds(table: Mapping[str, int], size: Any = size, parts: int = parts, even: bool = even) -> bool:
                return (size(table) % parts == 0) == even and size(table) >= parts

            yield _Rule(frozenset(_words(text)), holds)


def _halves(facts: SizeFacts) -> Iterator[_Rule]:
    """What is written as a part of a size is a whole part of it."""
    texts = {text for pair in facts.equal for text in pair} | {t for dims in facts.dims.values() for t in dims if t}
    for text in texts:
        for whole, parts in re.findall(r"(\w+(?: \* \w+)*) // (\d+)", text):
            size, count = _number(whole), int(parts)

            def holds(table: Mapping[str, int], size: Any = size, count: int = count) -> bool:
                return bool(size(table) % count == 0)

            yield _Rule(frozenset(_words(whole)), holds)


def _ends(facts: SizeFacts) -> Iterator[_Rule]:
    """A dim reaches to the place in it that is written as a number."""
    for text, number in facts.least:
        size = _number(text)

        def holds(table: Mapping[str, int], size: Any = size, number: int = number) -> bool:
            return bool(size(table) >= number)

        yield _Rule(frozenset(_words(text)), holds)


def _places_within(facts: SizeFacts) -> Iterator[_Rule]:
    """A place with a name is one in its dim."""
    for name, text in facts.places:
        size = _number(text)

        def holds(table: Mapping[str, int], name: str = name, size: Any = size) -> bool:
            return bool(table[name] < size(table))

        yield _Rule(frozenset([name, *_words(text)]), holds)


def _full(facts: SizeFacts, mesh: MeshSpec) -> Iterator[_Rule]:
    """A factor that axes fill stays full: else a rank's part of what is minor to it would not lie in one piece."""
    for text, axes in facts.full:
        size, ranks = _number(text), mesh.size(*axes)

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


# ---- the program ---------------------------------------------------------------------------------------------------


def _on_one_rank(program: Program) -> Any:
    """The text for one device, which has the same names for the same sizes."""
    graph, mesh = copied(program.folded_reference), MeshSpec(())
    measure_values(graph, mesh)
    propagate_layouts(graph, mesh, {})
    return emit(graph, mesh, program.made.names, program.manifest.model)


def _small(program: Program, alone: Any, mesh: MeshSpec, sizes: dict[str, int]) -> Small:
    facts, without = program.made.emitted.sizes, _left_out(program.folded)
    shapes = _shapes(program, facts, sizes)
    parameters = {
        name: Parameter(name, shapes.get(name, p.shape), p.dtype, p.layout)
        for name, p in program.parameters.items()
        if not _inside(name, without)
    }
    return Small(
        source=_with_numbers(program.source, facts, sizes, mesh),
        manifest=_manifest(program.manifest, parameters, mesh),
        mesh=mesh,
        parameters=parameters,
        _made=replace(
            program.made,
            folded=_resized(program.folded, facts, sizes),
            folded_reference=_resized(program.folded_reference, facts, sizes),
        ),
        one_rank=_with_numbers(alone.source, alone.sizes, sizes, MeshSpec(())),
        large=program,
        large_text=alone.source,
        without=without,
        named={name: sizes[name] for name in facts.table},
    )


def _left_out(graph: fx.GraphModule) -> frozenset[str]:
    kept: set[str] = set()
    gone: set[str] = set()
    runs = _of_several_blocks(graph)
    for place in _places(graph):
        keeps = _shorter(place, runs)
        kept |= set(keeps)
        gone |= set(place.stands_for) - set(keeps)
    return frozenset(gone - kept)


def _places(graph: fx.GraphModule) -> set[Place]:
    return {n.meta["place"] for n in graph.graph.nodes if n.meta.get("place") is not None}


def _of_several_blocks(graph: fx.GraphModule) -> frozenset[int | None]:
    """The runs whose rounds are as many as a list has blocks; others call one block again and again."""
    return frozenset(place.run for place in _places(graph) if len(set(place.stands_for)) > 1)


def _shorter(place: Place, runs: frozenset[int | None]) -> tuple[str, ...]:
    return place.stands_for[:ROUNDS] if place.run in runs else place.stands_for


def _inside(name: str, blocks: frozenset[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:i]) in blocks for i in range(1, len(parts) + 1))


def _shapes(program: Program, facts: SizeFacts, sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    found = {}
    for node in program.folded.graph.find_nodes(op="placeholder"):
        for name in node.meta.get("stands_for", (node.meta.get("name", ""),)):
            if node.meta["role"] == "parameter":
                found[name] = _at(facts, node, sizes)
    return found


def _at(facts: SizeFacts, node: fx.Node, sizes: Mapping[str, int]) -> tuple[Any, ...]:
    texts = facts.dims[node.name]
    return tuple(n if t is None else _number(t)(sizes) for n, t in zip(node.meta["sizes"], texts, strict=True))


def _resized(graph: fx.GraphModule, facts: SizeFacts, sizes: Mapping[str, int]) -> fx.GraphModule:
    """A copy that knows the small sizes and the kept rounds. The numbers in its arguments are the old ones."""
    new = shortened(graph)
    for node in new.graph.nodes:
        if node.name in facts.dims and "sizes" in node.meta:
            node.meta["sizes"] = _at(facts, node, sizes)
    return new


def shortened(graph: fx.GraphModule) -> fx.GraphModule:
    """A copy in which runs have as many rounds as are kept."""
    new, runs = copied(graph), _of_several_blocks(graph)
    for node in new.graph.nodes:
        if node.meta.get("place") is not None:
            node.meta["place"] = replace(node.meta["place"], stands_for=_shorter(node.meta["place"], runs))
        if "stands_for" in node.meta:
            node.meta["stands_for"] = node.meta["stands_for"][:ROUNDS]
    return new


def _manifest(manifest: Manifest, parameters: Mapping[str, Parameter], mesh: MeshSpec) -> Manifest:
    plans = {
        name: ParameterPlan(parameters[name].shape, plan.dtype, plan.dims, plan.requires_grad)
        for name, plan in manifest.parameters.items()
        if name in parameters
    }
    multiples = {
        symbol: {over: parts_of(over, mesh.size(*over.split(" × "))) for over in found}
        for symbol, found in manifest.multiples.items()
    }
    aliases = {name: first for name, first in manifest.aliases.items() if first in plans}
    return replace(manifest, mesh=str(mesh), parameters=plans, aliases=aliases, multiples=multiples)


def _with_numbers(source: str, facts: SizeFacts, sizes: Mapping[str, int], mesh: MeshSpec) -> str:
    """The text with the small mesh and the small table, every other character as it was."""
    text = "" if not mesh.axes else str(mesh)
    source = re.sub(r'^MESH = current\("[^"]*"', f'MESH = current("{text}"', source, count=1, flags=re.MULTILINE)
    for name, number in facts.table.items():
        source = re.sub(rf"^{name} = {number}$", f"{name} = {sizes[name]}", source, count=1, flags=re.MULTILINE)
    return source


def parameter_count(program: Program) -> int:
    return sum(math.prod(p.shape) for p in program.parameters.values())
