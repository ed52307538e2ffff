"""The whole graph again: every round of every run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import fx

from ndcompile.fold.place import Place, in_run, inside


def unfold(graph: fx.GraphModule) -> fx.GraphModule:
    """A copy of the graph with every round of every run."""
    unfolder = _Unfolder(graph)
    for node in graph.graph.nodes:
        unfolder.take(node)
    return fx.GraphModule(graph, unfolder.new)


class _Unfolder:
    def __init__(self, graph: fx.GraphModule) -> None:
        self.new = fx.Graph()
        self.now: dict[fx.Node, fx.Node] = {}
        """For each node of the folded graph its copy; for those of a second round the one of the latest round."""
        self.parameters: dict[fx.Node, list[fx.Node]] = {}
        runs: dict[int, tuple[list[fx.Node], list[fx.Node]]] = {}
        for node in graph.graph.nodes:
            if node.op == "call_function" and in_run(node):
                runs.setdefault(node.meta["place"].run, ([], []))[node.meta["place"].round].append(node)
        self.runs = {seconds[-1]: (firsts, seconds) for firsts, seconds in runs.values()}

    def take(self, node: fx.Node) -> None:
        names = node.meta.get("stands_for")
        copy = self.now[node] = self.new.node_copy(node, lambda n: self.now[n])
        copy.meta = {k: v for k, v in node.meta.items() if k != "stands_for"}
        if in_run(node):
            copy.meta = _later(node, 0, 0)
        if names:
            self.parameters[node] = [copy]
            for name in names[1:]:
                more = self.new.placeholder(f"{node.name}_{len(self.parameters[node])}")
                more.meta = copy.meta | dict(name=name)
                self.parameters[node].append(more)
        if node in self.runs:
            self.repeat(*self.runs[node])

    def repeat(self, firsts: list[fx.Node], seconds: list[fx.Node]) -> None:
        """Rounds after the second: where the second takes the first's values, each takes those of the one before."""
        latest = {node.meta["at"]: node for node in seconds if "at" in node.meta}
        twins = {node: latest[node.meta["at"]] for node in firsts if "at" in node.meta}
        numbers = {node.meta["segment"] for node in seconds if float(node.meta.get("segment") or 0.5).is_integer()}
        for later in range(1, seconds[0].meta["place"].repeat):
            before = dict(self.now)

            def now(value: fx.Node, later: int = later, before: Mapping[fx.Node, fx.Node] = before) -> fx.Node:
                if value in self.parameters:
                    return self.parameters[value][later]
                return before[twins[value]] if value in twins else self.now[value]

            for node in seconds:
                copy = self.new.node_copy(node, now)
                copy.meta = _later(node, later, len(numbers))
                if node.meta.get("role") == "fold":
                    copy.args = (copy.args[0], node.args[1] + later * len(numbers))  # type: ignore[operator]
                self.now[node] = copy


def _later(node: fx.Node, later: int, segments: int) -> dict[str, Any]:
    """What is known of a second round's node, for a later round."""
    place: Place = node.meta["place"]
    block = place.stands_for[later] if place.stands_for else ""
    here = replace(place, block=block, stands_for=(block,))
    meta = {**node.meta, "place": here}
    for key in ("module", "block", "parameter"):
        if meta.get(key) and inside(meta[key], place.block):
            meta[key] = block + meta[key][len(place.block) :]
    if "segment" in meta:
        meta["segment"] += later * segments
    return meta
