"""Why a value has its placement: what the whole program would cost with each alternative."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from torch import fx

from ndcompile.choose import Infeasible, Problem, choose, moved_bytes
from ndcompile.errors import CompileError
from ndcompile.placement import Placement
from ndcompile.rules.rows import Row


def explain(graph: fx.GraphModule, problems: Mapping[str, Problem], name: str) -> str:
    """For each axis the alternatives of a parameter, or of a module's result, cheapest first.

    Each comes with what a rank of the cheapest program that has it would send in a step, at nominal sizes, beside what
    data axes always gather and reduce; and with the time that it costs more, by the model of `cost`.
    """
    node = _find(graph, name)
    lines = [f"{name}   {node.meta['layout'] or 'one rank'}"]
    for axis, problem in problems.items():
        chosen = node.meta["placements"][axis]
        found = _alternatives(problem, node)
        best = found[chosen].seconds
        lines.append(f"  axis '{axis}': {chosen}, of {len(found)} that the rules allow")
        for placement, other in sorted(found.items(), key=lambda pair: (pair[1].seconds, str(pair[0]))):
            mark = "→" if placement == chosen else " "
            more = f"{other.nbytes / 1e6:10.3f} MB sent   +{(other.seconds - best) * 1e6:.1f} µs"
            lines.append(f"   {mark} {placement!s:<8} {more if other.possible else 'no program has it'}")
    return "\n".join(lines)


@dataclass(frozen=True)
class Alternative:
    """The cheapest program in which a value has one placement: its time, and the bytes that a rank sends."""

    seconds: float
    nbytes: float

    @property
    def possible(self) -> bool:
        return self.seconds < float("inf")


def _find(graph: fx.GraphModule, name: str) -> fx.Node:
    placed = [n for n in graph.graph.nodes if "placements" in n.meta]
    named = {n.meta["module"]: n for n in placed if n.op == "call_function" and n.meta["module"]}
    named |= {n.meta["name"]: n for n in placed if n.meta.get("role") == "parameter"}
    named |= {n.name: n for n in placed if n.name not in named}
    if name not in named:
        tries = "a parameter, a module or a node of program.graph"
        raise CompileError(f"nothing in the program is called '{name}'", tries=tries)
    return named[name]


def _alternatives(problem: Problem, node: fx.Node) -> dict[Placement, Alternative]:
    key = node.meta["key"]
    found: dict[Placement, Alternative] = {}
    for placement in dict.fromkeys(row.output for row in problem.rows[key]):
        tried = copy.copy(problem)
        tried.rows, tried.costs = dict(problem.rows), dict(problem.costs)
        tried.allow(key, partial(_gives, placement))
        try:
            chosen, seconds = choose(tried)
            found[placement] = Alternative(seconds, moved_bytes(tried, chosen))
        except Infeasible:
            found[placement] = Alternative(float("inf"), 0.0)
    return found


def _gives(placement: Placement, row: Row) -> bool:
    return row.output == placement
