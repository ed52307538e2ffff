"""A program at small sizes, on a small mesh, with few blocks: the same text, other numbers in its table.

The emitted text holds no size but by name, and no rank. So the text of a program for 8,192 ranks runs on 16 as it is,
once the line that names the mesh and the table of sizes have other numbers (`small_sizes.py`). Of a run of equal blocks
three are kept: the first, one in the middle, and its successor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
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
from ndcompile.verify.small_sizes import number_of, tables

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
    """Blocks of rounds that no run needs: each keeps its first ones, with all of their blocks."""
    places = _places(graph)
    runs = _rounds(places)
    kept = {block for place in places if place.round == 0 or place.run not in runs for block in place.stands_for}
    more = {block for rounds in runs.values() for blocks in rounds[:ROUNDS] for block in blocks}
    while not more <= kept:
        kept |= more
        more = {b for rounds in runs.values() for blocks in rounds if not kept.isdisjoint(blocks) for b in blocks}
    return frozenset({block for rounds in runs.values() for blocks in rounds for block in blocks} - kept)


def _places(graph: fx.GraphModule) -> set[Place]:
    return {n.meta["place"] for n in graph.graph.nodes if n.meta.get("place") is not None}


def _rounds(places: set[Place]) -> dict[int | None, list[set[str]]]:
    """The blocks of each round that a run's second one stands for, where these are as many as a list has blocks: other
    runs call one block again and again.
    """
    listed: dict[int | None, list[tuple[str, ...]]] = {}
    for place in places:
        if len(set(place.stands_for)) > 1:
            listed.setdefault(place.run, []).append(place.stands_for)
    return {run: [set(blocks) for blocks in zip(*each, strict=True)] for run, each in listed.items()}


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
    return tuple(n if t is None else number_of(t)(sizes) for n, t in zip(node.meta["sizes"], texts, strict=True))


def _resized(graph: fx.GraphModule, facts: SizeFacts, sizes: Mapping[str, int]) -> fx.GraphModule:
    """A copy that knows the small sizes and the kept rounds. The numbers in its arguments are the old ones."""
    new = shortened(graph)
    for node in new.graph.nodes:
        if node.name in facts.dims and "sizes" in node.meta:
            node.meta["sizes"] = _at(facts, node, sizes)
    return new


def shortened(graph: fx.GraphModule) -> fx.GraphModule:
    """A copy in which runs have the rounds whose blocks are kept."""
    new, without = copied(graph), _left_out(graph)
    runs = _rounds(_places(graph))
    for node in new.graph.nodes:
        place = node.meta.get("place")
        if place is not None and place.round == 1 and place.run in runs:
            rounds = zip(place.stands_for, runs[place.run], strict=True)
            kept = tuple(block for block, blocks in rounds if without.isdisjoint(blocks))
            node.meta["place"] = replace(place, stands_for=kept)
        if "stands_for" in node.meta:
            node.meta["stands_for"] = tuple(name for name in node.meta["stands_for"] if not _inside(name, without))
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
