"""The dataflow between segments: what each takes and gives, which are one function, and which run in a loop."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from ndcompile.rules.registry import operands, results


@dataclass
class Entry:
    """A parameter on its way into a segment: what it is called there, and its conversions on the way."""

    parameter: str
    node: fx.Node
    """What compute uses: the last conversion of the way, or the parameter itself."""
    moves: list[fx.Node]


@dataclass
class Segment:
    """One run of a block, or one stretch of the root between blocks."""

    number: float
    block: str
    kind: int | None
    nodes: list[fx.Node] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)
    ports: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """A block's names for the values that it takes from outside."""


def segments(graph: fx.GraphModule) -> list[Segment]:
    """Cut the parallel graph where `mark_blocks` said, conversions standing with their users."""
    found: dict[float, Segment] = {}
    for node in graph.graph.nodes:
        number = node.meta.get("segment")
        if node.op != "call_function" or number is None:
            continue
        segment = found.setdefault(number, Segment(number, node.meta["block"], node.meta.get("kind")))
        if segment.kind is None:
            segment.kind = node.meta.get("kind")
        if not node.meta.get("bucket"):
            segment.nodes.append(node)
    listed = [found[number] for number in sorted(found)]
    for segment in listed:
        _connect(segment)
    _find_outputs(graph, listed)
    return listed


def _connect(segment: Segment) -> None:
    own, entries = set(segment.nodes), dict[fx.Node, Entry]()
    ports = {node: node.all_input_nodes[0] for node in segment.nodes if node.meta.get("port")}
    segment.nodes = [node for node in segment.nodes if node not in ports]
    segment.ports = ports
    inputs: dict[fx.Node, None] = dict.fromkeys(ports.values())
    for node in segment.nodes:
        for value in operands(node):
            if value in own or value in entries:
                continue
            origin, moves = _origin(value)
            if origin is not None:
                entries[value] = Entry(origin, value, moves)
            else:
                inputs[value] = None
    segment.entries, segment.inputs = list(entries.values()), list(inputs)


def _origin(value: fx.Node) -> tuple[str | None, list[fx.Node]]:
    """The parameter that a bucket node comes from, with the conversions in between."""
    moves: list[fx.Node] = []
    while value.meta.get("bucket"):
        moves.append(value)
        value = value.all_input_nodes[0]
    return (value.meta["name"] if value.meta.get("role") == "parameter" else None), moves[::-1]


def _find_outputs(graph: fx.GraphModule, listed: list[Segment]) -> None:
    returned = results(graph)
    for i, segment in enumerate(listed):
        later = {value for other in listed[i + 1 :] for value in other.inputs}
        wanted = [node for node in segment.nodes if node in later or node in returned]
        segment.outputs = wanted


@dataclass
class Call:
    """One statement of the root: a segment once, or a run of equal blocks as a loop over `carried` values."""

    segments: list[Segment]
    carried: list[tuple[int, int]] = field(default_factory=list)
    """For a loop: pairs (input, output) by position: the output of one block is that input of the next."""


def calls(graph: fx.GraphModule, listed: list[Segment]) -> list[Call]:
    """Runs of consecutive children of one list with one kind, chained in the same way, become a loop."""
    returned = {value for value in results(graph) if isinstance(value, fx.Node)}
    found: list[Call] = []
    i = 0
    while i < len(listed):
        run = [listed[i]]
        links: list[tuple[int, int]] | None = None
        while i + len(run) < len(listed):
            follower = listed[i + len(run)]
            link = _link(run[-1], follower, listed, returned)
            if link is None or (links is not None and link != links):
                break
            links = link
            run.append(follower)
        found.append(Call(run, links or []))
        i += len(run)
    return found


def _link(one: Segment, two: Segment, listed: list[Segment], returned: set[fx.Node]) -> list[tuple[int, int]] | None:
    """How block `two` takes what block `one` gives, the next child of its list, if nothing else sees it."""
    if not one.block or one.kind != two.kind or len(one.inputs) != len(two.inputs):
        return None
    (list_one, at_one), (list_two, at_two) = (s.block.rsplit(".", 1) for s in (one, two))
    if list_one != list_two or int(at_two) != int(at_one) + 1:
        return None
    pairs = []
    for position, (before, now) in enumerate(zip(one.inputs, two.inputs, strict=True)):
        if now in one.outputs:
            pairs.append((position, one.outputs.index(now)))
        elif before is not now and not (before.meta.get("role") == now.meta.get("role") == "fold"):
            return None
    after = [s for s in listed if s.number > two.number]
    seen_later = any(value in s.inputs for s in after for value in one.outputs)
    if seen_later or any(value in returned for value in one.outputs) or len(pairs) != len(one.outputs):
        return None
    return pairs
