"""A run of equal blocks as a loop of the emitted root."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import fx

from ndcompile.codegen.names import fresh, value_name
from ndcompile.codegen.segments import Loop, Segment
from ndcompile.codegen.wrap import indented
from ndcompile.fold import inside
from ndcompile.rules.registry import results


class Statements(Protocol):
    """Who writes the statements of a loop's body."""

    graph: fx.GraphModule
    segments: list[Segment]

    def argument(self, value: fx.Node, names: Any) -> str: ...

    def way(self, segment: Segment) -> str: ...

    def block(self, segment: Segment, path: str) -> str: ...

    def target(self, value: fx.Node, names: dict[fx.Node, str], used: set[str]) -> str: ...

    def call(
        self, segment: Segment, block: str, given: list[str], targets: list[str], names: dict[fx.Node, str],
        used: set[str],
    ) -> list[str]: ...  # fmt: skip


@dataclass(frozen=True)
class LoopWriter:
    """Writes loops; `names` are the variables of values, `used` all that are taken."""

    statements: Statements

    def write(self, loop: Loop, names: dict[fx.Node, str], used: set[str]) -> list[str]:
        """A run as a loop: what one round gives to the next has one name, before, in and after it."""
        lines = self._carry(loop, names, used)
        calls: list[str] = []
        folds: list[tuple[fx.Node, str]] = []
        heads: list[tuple[str, str]] = []
        twins = {second: first for first, second in loop.carried}
        read_after = {second: self._read_after(loop, first, second) for first, second in loop.carried}
        for at, segment in enumerate(loop.body):
            variable, source = self._blocks_of(loop, at, len(heads))
            heads += [(variable, source)] if variable and segment.block else []
            given = [
                self._numbered(loop, at, p, v, folds)
                or _own_buffer(segment, variable, v)
                or self.statements.argument(v, names)
                for p, v in enumerate(segment.inputs)
            ]
            targets = []
            for value in segment.outputs:
                first = twins.get(value)
                if first is None or read_after[value]:
                    names[value] = self.statements.target(value, names, used)
                else:
                    names[value] = names[first]
                targets.append(names[value])
            calls += self.statements.call(segment, variable or source, given, targets, names, used)
        for first, second in loop.carried:
            if names[second] != names[first]:
                calls.append(f"{names[first]} = {names[second]}")
        lines.append(_loop_head(heads, loop.times, bool(folds)))
        return lines + indented(calls, 4)

    def _carry(self, loop: Loop, names: dict[fx.Node, str], used: set[str]) -> list[str]:
        """Name what a round gives to the next, and give it its first value."""
        lines = []
        for first, _ in loop.carried:
            if not loop.whole:
                initial = first
            else:
                at, position = next(
                    (a, p) for a, s in enumerate(loop.body) for p, v in enumerate(s.inputs) if v is first
                )
                initial = loop.start(at, position)
            name = self.statements.argument(initial, names)
            taken = [names[f] for f, _ in loop.carried if f is not first and f in names]
            if not self._dies(initial, loop) or name in taken:
                base = "x" if initial.meta["grad"] else value_name(first)
                own = fresh(base, used)
                lines.append(f"{own} = {name}")
                name = own
            names[first] = name
        return lines

    def _read_after(self, loop: Loop, first: fx.Node, second: fx.Node) -> bool:
        """Whether a round still reads what the round before gave after it has made its own."""
        made = next(i for i, s in enumerate(loop.body) if second in s.outputs)
        return any(first in s.inputs for s in loop.body[made + 1 :])

    def _numbered(
        self, loop: Loop, at: int, position: int, value: fx.Node, folds: list[tuple[fx.Node, str]]
    ) -> str | None:
        """The key of a round, for an input that is one."""
        if value.meta.get("role") != "fold":
            return None
        first = loop.start(at, position).args[1]
        step = len([s for s in loop.body if s.kind is not None])
        number = "i" if step == 1 else f"{step} * i"
        folds.append((value, number))
        return f"fold(rng, {first} + {number})" if first else f"fold(rng, {number})"

    def _blocks_of(self, loop: Loop, at: int, count: int) -> tuple[str, str]:
        """The loop's variable for a block and what it runs through; or nothing and one block's text."""
        blocks, segment = loop.blocks(at), loop.body[at]
        if not blocks or len(set(blocks)) == 1:
            return "", self.statements.block(segment, blocks[0]) if blocks else ""
        path, way = blocks[0].rpartition(".")[0], self.statements.way(segment)
        numbers = [int(block.rpartition(".")[2]) for block in blocks]
        step = numbers[1] - numbers[0]
        variable = "block" if not count else f"block_{count + 1}"
        more = [str(numbers[0]), str(numbers[-1] + 1), *([str(step)] if step > 1 else [])]
        if step == 1 and numbers[0] == 0 and len(numbers) == self._length(path, way):
            more = []
        given = [f'"{path}"', *more, *([f"kind={way}"] if way else [])]
        return variable, f"self.list({', '.join(given)})"

    def _length(self, path: str, way: str) -> int:
        """How many blocks of a list are called in this way, or at all."""
        called = [s for s in self.statements.segments if not way or self.statements.way(s) == way]
        return len({b for s in called for b in s.blocks if b.rpartition(".")[0] == path})

    def _dies(self, value: fx.Node, loop: Loop) -> bool:
        """Whether nothing but the loop's first round needs the value that goes into it."""
        if value.meta.get("role"):
            return False
        inside = {value for value, _ in loop.carried}
        later = [s for s in self.statements.segments if s.number >= loop.body[0].number]
        return (value in inside or not any(value in s.inputs for s in later)) and value not in results(
            self.statements.graph
        )


def _own_buffer(segment: Segment, variable: str, value: fx.Node) -> str | None:
    """A buffer that each block of a loop has its own of."""
    name = str(value.meta.get("name", ""))
    if not variable or value.meta.get("role") != "buffer" or not inside(name, segment.block):
        return None
    names = value.meta.get("stands_for", (name,))
    assert len(set(names)) == len(names), f"the blocks of a loop all share {name}, or none do"
    return f'{variable}.buffer("{name[len(segment.block) + 1 :]}")'


def _loop_head(heads: list[tuple[str, str]], times: int, numbered: bool) -> str:
    if not heads:
        return f"for {'i' if numbered else '_'} in range({times}):"
    variables, sources = ", ".join(v for v, _ in heads), ", ".join(s for _, s in heads)
    every = sources if len(heads) == 1 else f"zip({sources})"
    if not numbered:
        return f"for {variables} in {every}:"
    return f"for i, {variables if len(heads) == 1 else f'({variables})'} in enumerate({every}):"
