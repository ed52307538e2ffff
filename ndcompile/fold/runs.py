"""Stretches of a graph that repeat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import fx

from ndcompile.borders import AGAIN, ENTER, LEAVE
from ndcompile.fold.items import Item
from ndcompile.fold.place import Place, pins_in

LONGEST = 16  # blocks and stretches in a round


@dataclass
class Run:
    """`rounds` times `period` items from `start` on."""

    start: int
    period: int
    rounds: int

    def dropped(self, i: int) -> bool:
        return self.start + 2 * self.period <= i < self.start + self.rounds * self.period

    def item(self, round: int, position: int) -> int:
        return self.start + round * self.period + position


def runs_of(items: list[Item], pinned: Mapping[str, str]) -> list[Run]:
    """The longest runs, from the first item on, none of which overlap."""
    return _Finder(items, pinned).runs()


class _Finder:
    def __init__(self, items: list[Item], pinned: Mapping[str, str]) -> None:
        self.items = items
        self.keys = [_with_pins(item, pinned) for item in items]
        self.maker = {v: (i, o) for i, item in enumerate(items) for o, v in enumerate(item.outputs) if v is not None}
        nodes = ((i, [*item.nodes, *([item.again] if item.again else [])]) for i, item in enumerate(items))
        self.owner = {node: i for i, own in nodes for node in own}

    def runs(self) -> list[Run]:
        found, at = [], 0
        while at < len(self.items):
            runs = [Run(at, period, self.rounds(at, period)) for period in range(1, LONGEST + 1)]
            best = max(runs, key=lambda run: (run.rounds > 1) * run.rounds * run.period)
            calls = any(self.items[best.item(0, j)].body is not None for j in range(best.period))
            if best.rounds > 1 and calls:
                found.append(best)
                at += best.rounds * best.period
            else:
                at += 1
        return found

    def rounds(self, start: int, period: int) -> int:
        """How many rounds of `period` items from `start` on are one run."""
        run = Run(start, period, 1)
        while run.item(run.rounds + 1, 0) <= len(self.items):
            if not all(self.continues(run, j) for j in range(period)) or not _steps(self.items, run):
                break
            run.rounds += 1
        for round in range(run.rounds - 1):
            made = [v for j in range(period) for v in self.items[run.item(round, j)].outputs if v is not None]
            users = (user for value in made for user in value.users if user.target not in (ENTER, LEAVE))
            if any(self.owner.get(user, len(self.items)) >= run.item(round + 2, 0) for user in users):
                return round + 1
        return run.rounds if run.rounds == 1 or self._carries(run) else 1

    def _carries(self, run: Run) -> bool:
        """Whether the last round and the one before are used alike: what is dead code in one is so in the other."""
        last = run.rounds - 1
        pairs = ((run.item(last - 1, j), run.item(last, j)) for j in range(run.period))
        return all(self._live_outputs(earlier) == self._live_outputs(later) for earlier, later in pairs)

    def _live_outputs(self, i: int) -> list[bool]:
        return [value in self.live for value in self.items[i].outputs]

    @cached_property
    def live(self) -> set[fx.Node]:
        """Every value on which a result of the graph depends, or a change of something."""
        nodes: Any = next(iter(self.owner)).graph.nodes if self.owner else []
        front = [v for node in nodes if _kept(node) for v in node.all_input_nodes]
        found: set[fx.Node] = set()
        while front:
            value = front.pop()
            if value not in found:
                found.add(value)
                front += self._needed(value)
        return found

    def _needed(self, value: fx.Node) -> list[fx.Node]:
        """What a value is made of; of a call's result the arguments that the block reads for it."""
        i, output = self.maker.get(value, (None, 0))
        if i is None or self.items[i].again is None:
            return [v for v in value.all_input_nodes if v.target is not AGAIN]
        template = next(item for item in self.items if item.body == self.items[i].body)
        given = dict(zip(template.inputs, self.items[i].inputs, strict=True))
        inner, front = set[fx.Node](), [template.outputs[output]]
        while front:
            part = front.pop()
            if part is not None and part not in inner:
                inner.add(part)
                front += [] if part in given else part.all_input_nodes
        return [v for v in inner if v not in template.nodes and v not in given] + [
            given[v] for v in inner if v in given
        ]

    def continues(self, run: Run, position: int) -> bool:
        """Whether an item of the round after the run is as the one of the run's last round."""
        now, before = run.item(run.rounds, position), run.item(run.rounds - 1, position)
        if self.keys[now] != self.keys[before] or len(self.items[now].inputs) != len(self.items[before].inputs):
            return False
        pairs = zip(self.items[before].inputs, self.items[now].inputs, strict=True)
        return all(self._corresponds(run, earlier, later) for earlier, later in pairs)

    def _corresponds(self, run: Run, earlier: fx.Node, later: fx.Node) -> bool:
        """Whether two rounds take the same from outside, from their own round, or from the round before."""
        by, output = self.maker.get(later, (-1, 0))
        if by < run.start:
            return earlier is later
        if by < run.item(run.rounds - 1, 0):
            return False  # from two rounds ago
        if run.rounds == 1 and by < run.item(1, 0):
            return self.maker.get(earlier, (-1, 0))[0] < run.start  # what the first round takes comes from outside
        return self.maker.get(earlier) == (by - run.period, output)


def _kept(node: fx.Node) -> bool:
    """A node that is there for what it does."""
    marks = (ENTER, LEAVE, AGAIN)
    return node.op == "output" or (node.op == "call_function" and node.target not in marks and _mutates(node))


def _mutates(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _with_pins(item: Item, pinned: Mapping[str, str]) -> Any:
    return (item.key, item.block.rpartition(".")[0], pins_in(pinned, item.block))


def _steps(items: list[Item], run: Run) -> bool:
    """Whether the blocks at each position are one, or follow each other in a list at even distances: of the next round.

    That it holds of the run's own rounds was seen before.
    """
    last = run.rounds
    gaps = [[_gap(items, run, round, j) for round in (0, last - 1)] for j in range(run.period)]
    return all(first == latest and first is not None for first, latest in gaps)


def _gap(items: list[Item], run: Run, round: int, position: int) -> int | None:
    """How far in its list the next round's block is; None where it does not follow."""
    one, two = (items[run.item(r, position)].block for r in (round, round + 1))
    if one == two:
        return 0
    before, after = (path.rpartition(".")[2] for path in (one, two))
    gap = int(after) - int(before) if before.isdigit() and after.isdigit() else 0
    return gap if gap > 0 else None


def places_of(items: list[Item], runs: list[Run]) -> dict[int, Place]:
    found = {i: Place(i, item.block, (item.block,)) for i, item in enumerate(items) if item.body is not None}
    for number, run in enumerate(runs):
        for j in range(run.period):
            paths = [items[run.item(r, j)].block for r in range(run.rounds)]
            found[run.item(0, j)] = Place(run.item(0, j), paths[0], (paths[0],), number, 0, j)
            found[run.item(1, j)] = Place(run.item(1, j), paths[1], tuple(paths[1:]), number, 1, j)
    return found
