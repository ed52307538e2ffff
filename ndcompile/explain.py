"""Why a value has its placement: what the whole program would cost with each alternative."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from torch import fx

from ndcompile.choose import Infeasible, Problem, choose
from ndcompile.errors import CompileError
from ndcompile.placement import Placement


def explain(graph: fx.GraphModule, problems: Mapping[str, Problem], name: str) -> str:
    """For each axis the alternatives of a parameter, or of a module's result, cheapest first."""
    node = _find(graph, name)
    lines = [f"{name}   {node.meta['layout'] or 'one rank'}"]
    for axis, problem in problems.items():
        chosen = node.meta["placements"][axis]
        costs = _alternatives(problem, node)
        best = costs[chosen]
        lines.append(f"  axis '{axis}': {chosen}, of {len(costs)} that the rules allow")
        for placement, cost in sorted(costs.items(), key=lambda pair: (pair[1], str(pair[0]))):
            mark = "→" if placement == chosen else " "
            more = "no program has it" if cost == float("inf") else f"+{(cost - best) * 1e6:.1f} µs a step"
            lines.append(f"   {mark} {placement!s:<8} {more}")
    return "\n".join(lines)


def _find(graph: fx.GraphModule, name: str) -> fx.Node:
    placed = [n for n in graph.graph.nodes if "placements" in n.meta]
    named = {n.meta["module"]: n for n in placed if n.op == "call_function" and n.meta["module"]}
    named |= {n.meta["name"]: n for n in placed if n.meta.get("role") == "parameter"}
    named |= {n.name: n for n in placed if n.name not in named}
    if name not in named:
        tries = "a parameter, a module or a node of program.graph"
        raise CompileError(f"nothing in the program is called '{name}'", tries=tries)
    return named[name]


def _alternatives(problem: Problem, node: fx.Node) -> dict[Placement, float]:
    from ndcompile.passes.propagate_layouts import key_of

    key = key_of(node)
    costs: dict[Placement, float] = {}
    for placement in dict.fromkeys(row.output for row in problem.rows[key]):
        tried = copy.copy(problem)
        tried.rows, tried.costs = dict(problem.rows), dict(problem.costs)
        tried.allow(key, lambda row, placement=placement: row.output == placement)  # type: ignore[misc]
        try:
            costs[placement] = choose(tried)[1]
        except Infeasible:
            costs[placement] = float("inf")
    return costs
