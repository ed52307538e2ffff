"""Bugs planted in a parallel graph, one at a time: the conversions that a pass might have got wrong, for the types."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from ndcompile import pipeline, runtime
from ndcompile.errors import CheckError
from ndcompile.mesh import MeshAxis, MeshSpec
from ndcompile.pipeline import copied
from ndcompile.placement import IN_ORDER, TABLE, I, P, Placement, R, S
from ndcompile.program import Program
from ndcompile.route import Move
from ndcompile.rules.registry import describe

CHECKED_AFTER = ("propagate_layouts", "insert_collectives")
"""The steps whose checks hold of the finished graph."""


Change = Callable[[fx.Node], None]


@dataclass(frozen=True)
class GraphMutant:
    """A graph that differs from `right`, the program's, in one conversion: its node of that number."""

    operator: str
    place: str
    right: fx.GraphModule
    number: int
    change: Change

    @property
    def graph(self) -> fx.GraphModule:
        """The graph, made anew."""
        graph = copied(self.right)
        self.change(list(graph.graph.nodes)[self.number])
        return graph

    def __str__(self) -> str:
        return f"{self.operator}   {self.place}"


def check_types(graph: fx.GraphModule, mesh: MeshSpec) -> None:
    """The checks of every compile that hold of a finished parallel graph. Raises `CheckError`."""
    for step in pipeline.PIPELINE:
        if step.name in CHECKED_AFTER:
            for check in step.ensures:
                check(graph, mesh)


def seen_by_types(mutant: GraphMutant, mesh: MeshSpec) -> bool:
    try:
        check_types(mutant.graph, mesh)
    except CheckError:
        return True
    return False


def graph_mutants(program: Program) -> Iterator[GraphMutant]:
    """Every change at every conversion of the program's graph, in which equal blocks are there once."""
    for number, node in enumerate(program.folded.graph.nodes):
        if "move" not in node.meta:
            continue
        for operator, change in _changes(node, program.mesh):
            yield GraphMutant(operator, describe(node), program.folded, number, change)


def _changes(node: fx.Node, mesh: MeshSpec) -> Iterator[tuple[str, Change]]:
    move: Move = node.meta["move"]
    if move.conversion.forward == "identity" and not node.meta["grad"]:
        return  # it changes nothing, and nothing comes back
    what = "a parameter's way" if node.meta["bucket"] else "a conversion"
    yield f"{what} is dropped", _drop
    adds = move.conversion.backward == "all_reduce" or move.conversion.forward in ("all_reduce", "reduce_scatter")
    if adds or move.conversion == IN_ORDER:
        yield f"{what} is done twice", _twice
    for row in TABLE:
        source, target = _like(row.source, move), _like(row.target, move)
        differs = node.meta["grad"] or not (_same(source, move.source) and _same(target, move.target))
        differs = differs and (source, target) != (move.source, move.target)
        if row.forward == move.conversion.forward and row.name != move.conversion.name and differs:
            yield f"{what} is another of the same forward", lambda n, s=source, t=target: _become(n, s, t)  # type: ignore[misc]
    for axis in mesh.names:
        if len(move.axes) == 1 and axis != move.axes[0] and mesh.size(axis) == mesh.size(move.axes[0]):
            yield f"{what} is over another axis", lambda n, a=axis: _over(n, a)  # type: ignore[misc]


def _like(kind: str, move: Move) -> Placement:
    dim = next((p.dim for p in (move.source, move.target) if p.dim is not None), 0)
    return {"R": R, "I": I, "P": P(), "S": S(dim or 0)}[kind]


def _same(one: Placement, two: Placement) -> bool:
    """Without a gradient both replicated placements are one."""
    return one == two or (one.whole and two.whole)


def _drop(node: fx.Node) -> None:
    value = node.args[0]
    assert isinstance(value, fx.Node)
    node.replace_all_uses_with(value)
    node.graph.erase_node(node)


def _twice(node: fx.Node) -> None:
    with node.graph.inserting_after(node):
        again = node.graph.node_copy(node, lambda value: value)
    again.meta = dict(node.meta)
    node.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)
    again.args = (node, *node.args[1:])


def _become(node: fx.Node, source: Placement, target: Placement) -> None:
    """Another row of the table, with all that a pass would have said of it."""
    move = replace(node.meta["move"], source=source, target=target)
    node.target = getattr(runtime, move.conversion.name)
    _set(node, move)


def _over(node: fx.Node, axis: str) -> None:
    axes: Any = MeshAxis((axis,))
    node.args = (node.args[0], axes, *node.args[2:])
    _set(node, replace(node.meta["move"], axes=(axis,)))


def _set(node: fx.Node, move: Move) -> None:
    value = node.args[0]
    assert isinstance(value, fx.Node)
    before = value.meta["stored"] if "stored" in value.meta and node.meta["bucket"] else value.meta["layout"]
    node.meta |= dict(move=move, layout=move.apply(before))
