"""The dataflow between segments: what each takes and gives, and which run in a loop."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

from torch import fx

from ndcompile.codegen.cuts import groups
from ndcompile.fold import Place
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
    place: Place | None = None
    nodes: list[fx.Node] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)
    ports: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """A block's names for the values that it takes from outside."""
    saved: tuple[str, ...] | None = None
    """The results that are kept of a block that backward recomputes."""
    gathered: bool = False
    """Whether its gathered weights stay until backward."""
    parts: list[Segment] = field(default_factory=list)
    """Its pure functions, in order: the segment itself where it is one."""
    border: bool = False
    """A part that only brings results into the user's layout: it is no function, and is not compiled."""

    @property
    def functions(self) -> list[Segment]:
        return [part for part in self.parts if not part.border]

    halved: bool = False
    """Whether two halves of its batch are computed in turn."""

    @property
    def blocks(self) -> tuple[str, ...]:
        """The blocks that it stands for."""
        return self.place.stands_for if self.block and self.place else (self.block,) if self.block else ()

    @property
    def run(self) -> int | None:
        return None if self.place is None else self.place.run

    @property
    def text(self) -> object:
        """What it has in common with the segments that are emitted as one text with it."""
        alone = not self.block and (self.run is None or self.kind is None)
        return ("alone", self.number) if alone else (bool(self.block), self.kind, None if self.block else self.run)


def segments(graph: fx.GraphModule) -> list[Segment]:
    """Cut the parallel graph where `mark_blocks` said, conversions standing with their users."""
    found: dict[float, Segment] = {}
    for node in graph.graph.nodes:
        number = node.meta.get("segment")
        if node.op != "call_function" or number is None:
            continue
        fresh = Segment(number, node.meta["block"], node.meta.get("kind"), node.meta.get("place"))
        segment = found.setdefault(number, fresh)
        if segment.kind is None:
            segment.kind = node.meta.get("kind")
        segment.saved, segment.gathered = node.meta.get("saved"), node.meta.get("gathered", False)
        segment.halved = node.meta.get("halved", False)
        if not node.meta.get("bucket"):
            segment.nodes.append(node)
    listed = [found[number] for number in sorted(found)]
    for segment in listed:
        _connect(segment)
    _find_outputs(graph, listed)
    _cut(graph, listed)
    return listed


def batch_dim(value: fx.Node) -> int | None:
    """The one dim of a value whose size is the batch's."""
    dims = [d for d, size in enumerate(value.meta["sizes"]) if str(size) == "b"]
    depend = [size for size in value.meta["sizes"] if any(str(s) == "b" for s in getattr(size, "free_symbols", ()))]
    return dims[0] if len(dims) == len(depend) == 1 else None


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
        segment.outputs = [node for node in segment.nodes if node in later or node in returned]
    _share_outputs(listed)


def _share_outputs(listed: list[Segment]) -> None:
    """Both rounds of a run give what either gives: what the first gives to the second, the second gives to the next."""
    rounds: dict[object, list[Segment]] = {}
    for segment in listed:
        if segment.place is not None and segment.run is not None and segment.kind is not None:
            rounds.setdefault((segment.run, segment.place.position), []).append(segment)
    for pair in rounds.values():
        given = {n.meta["at"] for segment in pair for n in segment.outputs}
        for segment in pair:
            segment.outputs = [n for n in segment.nodes if n.meta.get("at") in given]


def _cut(graph: fx.GraphModule, listed: list[Segment]) -> None:
    """Give each segment its parts; segments of one text are cut alike, by the results of any of them."""
    border, returned = _at_border(graph)
    alike: dict[object, list[Segment]] = {}
    for segment in listed:
        alike.setdefault(segment.text, []).append(segment)
    for same in alike.values():
        optional = {i for segment in same for i, node in enumerate(segment.nodes) if node in returned}
        for segment in same:
            last = [node for node in segment.nodes if node in border]
            nodes = [node for node in segment.nodes if node not in border]
            given = {*segment.outputs, *(value for node in last for value in operands(node))}
            found = groups(nodes, given, [n for i, n in enumerate(segment.nodes) if i in optional])
            segment.parts = [_part(segment, nodes) for nodes in found] if last or len(found) > 1 else [segment]
            if last:
                segment.parts.append(replace(_part(segment, last), border=True))


def _at_border(graph: fx.GraphModule) -> tuple[set[fx.Node], set[fx.Node]]:
    """The nodes that only bring results into the user's layout, in words that need no size; and with them the results
    before they are brought there.
    """
    border, returned = set[fx.Node](), set[fx.Node]()
    for value in results(graph):
        while isinstance(value, fx.Node):
            returned.add(value)
            brings = "data_axes" in value.meta or (value.meta.get("natural") and "size" not in value.kwargs)
            if not brings or any(user.op != "output" and user not in border for user in value.users):
                break
            border.add(value)
            value = value.all_input_nodes[0]
    return border, returned


def _part(segment: Segment, nodes: list[fx.Node]) -> Segment:
    """These nodes of a segment as one; in a block it takes all weights, else those of the stretch or none."""
    own, taken = set(nodes), dict.fromkeys(value for node in nodes for value in operands(node))
    entered = {entry.node for entry in segment.entries}
    entries = segment.entries if segment.block or entered & set(taken) else []
    ports = {port: value for port, value in segment.ports.items() if port in taken}
    outside = [value for value in taken if value not in own | entered and value not in ports]
    outside.sort(key=segment.inputs.__contains__)  # what the segment itself makes comes first
    given = {*segment.outputs, *(value for node in segment.nodes if node not in own for value in operands(node))}
    return replace(
        segment, nodes=nodes, entries=entries, ports=ports, inputs=list(dict.fromkeys([*ports.values(), *outside])),
        outputs=[node for node in nodes if node in given],
    )  # fmt: skip


@dataclass
class Call:
    """One statement of the root: a segment, once."""

    segment: Segment


@dataclass
class Loop:
    """A statement that repeats `body`, a run's second round.

    `before` is its first round, and is one of the times that the body runs if `whole`. `carried` are pairs of values: a
    result of the first round that the second takes, and the same result of the second, which the next one takes.
    """

    before: list[Segment]
    body: list[Segment]
    whole: bool
    carried: list[tuple[fx.Node, fx.Node]]

    @property
    def times(self) -> int:
        place = self.body[0].place
        assert place is not None, "a loop is a run"
        return place.repeat + self.whole

    def blocks(self, at: int) -> tuple[str, ...]:
        """The blocks at one place of the body, in order of the rounds."""
        first = self.before[at].blocks if self.whole else ()
        return (*first, *self.body[at].blocks)

    def start(self, at: int, position: int) -> fx.Node:
        """What an input of the body is in the first round that the loop runs."""
        return (self.before if self.whole else self.body)[at].inputs[position]


def statements(listed: list[Segment]) -> list[Call | Loop]:
    """The root's statements in order: a run is a loop over both rounds if they are equal, also at their borders."""
    found: list[Call | Loop] = []
    for run, group in itertools.groupby(listed, key=lambda segment: segment.run):
        members = list(group)
        if run is None:
            found += [Call(segment) for segment in members]
            continue
        before, body = ([s for s in members if s.place and s.place.round == r] for r in (0, 1))
        whole = list(map(_border, before)) == list(map(_border, body))
        if not whole:
            found += [Call(segment) for segment in before]
        found.append(Loop(before, body, whole, _carried(before, body)))
    return found


def _border(segment: Segment) -> object:
    """What tells segments of two rounds apart: their kind, and of conversions between blocks what they do."""
    moves = [(str(n.target), str(n.meta["move"])) for n in segment.nodes if segment.kind is None]
    return (segment.kind, moves, len(segment.inputs), len(segment.outputs))


def _carried(before: list[Segment], body: list[Segment]) -> list[tuple[fx.Node, fx.Node]]:
    twins = {n.meta["at"]: n for segment in body for n in segment.nodes if "at" in n.meta}
    taken = dict.fromkeys(value for segment in body for value in segment.inputs)
    made = {n for segment in before for n in segment.outputs}
    return [(value, twins[value.meta["at"]]) for value in taken if value in made]
