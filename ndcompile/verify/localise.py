"""Where a difference begins: the first value of the emitted text that is not its part of the reference's value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from ndcompile.axes import KINDS
from ndcompile.codegen.segments import Segment, segments
from ndcompile.fold import unfold
from ndcompile.mesh import MeshSpec
from ndcompile.passes.measure_values import measure_values
from ndcompile.pipeline import copied
from ndcompile.placement import Layout
from ndcompile.program import Program
from ndcompile.reference import walk
from ndcompile.rules.registry import describe, op_name
from ndcompile.size import Size
from ndcompile.units import units_of
from ndcompile.verify.compare import BAR, Difference
from ndcompile.verify.domain import Domain
from ndcompile.verify.execute import alone, cotangent_scales, emitted, forward_of, result_layouts
from ndcompile.verify.lockstep import run_one, run_ranks
from ndcompile.verify.places import Lies, first_wrong, part
from ndcompile.verify.precise import precise
from ndcompile.verify.sample import Sample, symbol_sizes
from ndcompile.verify.shrink import Small
from ndcompile.verify.trace import Call, Value, traced


class OtherLines(ValueError):
    """The text that ran has other statements than the program's graph, so that no place can be named."""


@dataclass
class Fault:
    """The first value that is wrong, in order of the forward, or else of the backward."""

    side: str
    node: str
    layout: str
    rank: int
    line: int
    text: str
    source: str | None

    def __str__(self) -> str:
        rows = [
            f"{self.node}   on rank {self.rank}, {self.side}",
            f"  line {self.line}   {self.text}" if self.line else f"  {self.text}",
            f"  layout   {self.layout}",
        ]
        return "\n".join(rows + ([f"  source   {self.source}"] if self.source else []))


def localise(program: Program, sample: Sample, domain: Domain, source: str | None = None) -> Fault | None:
    """Run the first microbatch once more, looking at every value; none if all of them are right."""
    text = source or str(program)
    with sdpa_kernel(SDPBackend.MATH):
        graph = keyed(program.folded)
        right = run_one(domain, lambda: _right_values(program, sample, domain))
        calls = run_ranks(program.mesh, domain, lambda rank: _traced(program, sample, text, rank, domain))
    rows = list(_rows(graph, calls))
    for node, layout, values in rows:
        found = _wrong(program, right, domain, node, layout, values, text, forward=True)
        if found is not None:
            return found
    for node, layout, values in reversed(rows):
        found = _wrong(program, right, domain, node, layout, values, text, forward=False)
        if found is not None:
            return found
    return None


def begins_at(
    program: Program, sample: Sample, domain: Domain, source: str | None, differences: Sequence[Difference]
) -> str:
    """In words: where the differences begin."""
    try:
        fault = localise(program, sample, domain, source)
    except OtherLines as error:
        return str(error)
    if fault is not None:
        return str(fault)
    name = next((d.what.partition("gradient of ")[2] for d in differences if "gradient of " in d.what), "")
    if not name:
        return "all values of the first microbatch are right, and so are their cotangents: what differs comes later"
    lines = [
        f"  line {n}   {line.strip()}"
        for n, line in enumerate((source or str(program)).splitlines(), 1)
        if 'weight("' in line and name.endswith(line.partition('weight("')[2].partition('"')[0].lstrip("/"))
    ]
    return "\n".join([f"'{name}': its uses get the right gradients, which are then not added right over ranks", *lines])


def keyed(folded: fx.GraphModule) -> fx.GraphModule:
    """The whole graph, in which a node and its twin in the other graph have the same `key`."""
    for node in folded.graph.nodes:
        node.meta["key"] = node.name
    graph = unfold(folded)
    for node in graph.graph.nodes:
        node.meta["key"] = (node.meta.get("key"), node.meta.get("segment"), node.meta.get("name"))
    return graph


def _right_values(program: Program, sample: Sample, domain: Domain) -> dict[Any, Value]:
    """What one device computes, by the keys of nodes: of the graph, or at small sizes of the text for one device."""
    if not isinstance(program, Small):
        return _reference(program, keyed(program.folded_reference), sample, domain)
    measured = copied(program.folded_reference)
    measure_values(measured, MeshSpec(()))
    forward = alone(program, sample.leaves(lambda name, whole: whole), sample.with_own_buffers())
    with traced(program.one_rank) as calls:
        found = forward(sample.batches[0])
    _pull(program, found, sample, domain)
    rows = _rows(keyed(measured), [calls], lambda node: "shape" in node.meta)
    return {node.meta["key"]: values[0] for node, _, values in rows}


def _pull(program: Program, found: Sequence[Any], sample: Sample, domain: Domain) -> None:
    """One device's backward, from the cotangents of the whole results."""
    cotangents, scales = sample.cotangents(found, 0, domain), cotangent_scales(program)
    pairs = [(y, g * (1 / n)) for y, g, n in zip(found, cotangents, scales, strict=True) if g is not None]
    if pairs:
        torch.autograd.backward([y for y, _ in pairs], [g for _, g in pairs])


def _reference(program: Program, graph: fx.GraphModule, sample: Sample, domain: Domain) -> dict[Any, Value]:
    """Every value of the reference graph by the key of its node, with its cotangent."""
    leaves, seen = sample.leaves(lambda name, whole: whole), dict[Any, Value]()
    given = dict(zip(sample.inputs, sample.batches[0], strict=True))

    def keep(node: fx.Node, found: Any) -> None:
        if isinstance(found, Tensor):
            value = seen[node.meta["key"]] = Value(0, node.name, found.detach().clone())
            if found.requires_grad:
                found.register_hook(value.keep)

    found = walk(graph, lambda node: sample.placeholder(node, leaves, given), keep)
    _pull(program, found, sample, domain)
    return seen


def _traced(program: Program, sample: Sample, text: str, rank: int, domain: Domain) -> list[Call]:
    mesh, manifest = program.mesh, program.manifest
    leaves = sample.leaves(lambda name, whole: part(whole, manifest.parameters[name].dims, mesh, rank))
    own = sample.with_own_buffers()
    root = emitted(program, text, rank, leaves, own, domain)
    with traced(text) as calls:
        found = forward_of(root, program, own, sample.batches[0], rank)
    pairs = [
        (y, part(g, layout.dims, mesh, rank))
        for y, g, layout in zip(found, sample.drawn[0], result_layouts(program), strict=True)
        if g is not None and layout is not None and y.requires_grad
    ]
    if pairs:
        torch.autograd.backward([y for y, _ in pairs], [g for _, g in pairs])
    return calls


def _placed(node: fx.Node) -> bool:
    return isinstance(node.meta.get("layout"), Layout)


Row = tuple[fx.Node, Any, list[Value]]


def _rows(
    graph: fx.GraphModule, calls: Sequence[Sequence[Call]], is_tensor: Callable[[fx.Node], bool] = _placed
) -> Iterator[Row]:
    """Each value of a text: its node in the graph, its layout, and what the ranks hold."""
    for number, segment in enumerate(own for whole in segments(graph) for own in whole.parts):
        here = [of_rank[number] for of_rank in calls]
        for i, entry in enumerate(segment.entries):
            yield entry.node, entry.node.meta.get("layout"), [call.weights[i] for call in here]
        yield from _values(segment, here, is_tensor)


def _values(segment: Segment, here: Sequence[Call], is_tensor: Callable[[fx.Node], bool]) -> Iterator[Row]:
    tensors = [node for node in segment.nodes if is_tensor(node) and not _several(node)]
    if any(len(half.values) != len(tensors) for call in here for half in (call, call.second) if half):
        raise OtherLines(f"the text of {here[0].function} has other statements than the program: no place can be named")
    for i, node in enumerate(tensors):
        yield node, node.meta.get("layout"), [_of_batch(call, i, node) for call in here]


def _of_batch(call: Call, i: int, node: fx.Node) -> Value:
    """A value of a call; of one in halves, both put together, as the graph says that it is cut."""
    value = call.values[i]
    if call.second is None:
        return value
    other, cut = call.second.values[i], node.meta["cut"]
    if cut is not None:
        joined = Value(value.line, value.name, torch.cat((value.value, other.value), cut))
        if value.cotangent is not None and other.cotangent is not None:
            joined.cotangent = torch.cat((value.cotangent, other.cotangent), cut)
        return joined
    flows = [v.cotangent for v in (value, other) if v.cotangent is not None]
    once = node.meta.get("sent") == "once"  # then both are one tensor, and have its whole cotangent
    added = flows[0] if once or len(flows) == 1 else flows[0] + flows[1] if flows else None
    return Value(value.line, value.name, value.value, added)


def _several(node: fx.Node) -> bool:
    """Whether a node gives a list of tensors."""
    return any(op_name(user.target) == "_operator.getitem" for user in node.users if user.op == "call_function")


def _wrong(
    program: Program, right: dict[Any, Value], domain: Domain, node: fx.Node, layout: Layout, values: list[Value],
    text: str, forward: bool,
) -> Fault | None:  # fmt: skip
    whole = right.get(_origin(node).meta["key"])
    if whole is None:
        return None
    if not forward:
        if "move" in node.meta or "data_axes" in node.meta or whole.cotangent is None or not node.meta["grad"]:
            return None
        if any(v.cotangent is None for v in values):
            return _fault(node, layout.dual, 0, values[0], text, "the gradient, which does not arrive")
        tensors, target, layout = [v.cotangent for v in values], whole.cotangent, layout.dual
    else:
        tensors, target = [v.value for v in values], whole.value
    held = [precise(t) for t in tensors if t is not None]
    lies, bar = _lies(program, node, layout), BAR[domain.exact]
    rank = first_wrong(held, precise(target), layout, program.mesh, domain, bar, 1e-30, lies)
    return (
        None if rank is None else _fault(node, layout, rank, values[rank], text, "forward" if forward else "backward")
    )


def _lies(program: Program, node: fx.Node, layout: Layout) -> dict[tuple[int, str], Lies]:
    """Where axes of sequences cut a dim: head–tail, and for each index of what is major to the sequence."""
    mesh, found = program.mesh, {}
    for dim, axes in enumerate(layout.dims):
        for number, axis in enumerate(axes):
            if KINDS[mesh[axis].kind].attends:
                within = Size.read(layout.on(axis).within)
                parts = within.value(_bases(program)) // mesh.size(*axes[:number])
                head_tail = not node.meta["shape"][dim].constant and not node.meta.get("natural")
                found[dim, axis] = Lies(head_tail, parts)
    return found


def _bases(program: Program) -> dict[str, int]:
    """A symbol's number, in units of what it is a multiple of (`measure_values`)."""
    units = units_of(program.graph, program.mesh)
    return {name: size // units[name].coefficient for name, size in symbol_sizes(program).items()}


def _origin(node: fx.Node) -> fx.Node:
    """The value that conversions bring: it is the reference's under the same name."""
    while "move" in node.meta or "data_axes" in node.meta:
        node = node.all_input_nodes[0]
    return node


def _fault(node: fx.Node, layout: Layout, rank: int, value: Value, text: str, side: str) -> Fault:
    shown = text.splitlines()[value.line - 1].strip() if value.line else f"the weight w.{value.name}, as it comes in"
    return Fault(side, describe(node), str(layout), rank, value.line, shown, node.meta.get("source"))
