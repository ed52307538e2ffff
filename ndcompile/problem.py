"""The problem that `choose` solves, for one axis of one graph: every op's rows, every edge's cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

from torch import fx

from ndcompile.axes import KINDS, AxisKind, data_ranks
from ndcompile.choose import Edge, Problem
from ndcompile.cost import BUS, NOMINAL, conversion_bytes, conversion_time, op_time
from ndcompile.fold import in_run, repeat_of
from ndcompile.mesh import MeshSpec, kind_of
from ndcompile.placement import I, Placement, R, S
from ndcompile.rules.notation import Signature
from ndcompile.rules.registry import op_name, operands, results, signature, updates
from ndcompile.rules.rows import Row, rows
from ndcompile.size import Size
from ndcompile.units import units_of

OUTPUT = "output"


@dataclass
class State:
    """What earlier axes have decided: each node's row an axis, and how many ways its factors are sharded."""

    graph: fx.GraphModule
    mesh: MeshSpec
    local_outputs: bool = False
    taken: dict[fx.Node, dict[str, int]] = field(default_factory=dict)
    signatures: dict[fx.Node, Signature] = field(default_factory=dict)
    parts: dict[fx.Node, int] = field(default_factory=dict)
    steps: defaultdict[str, int] = field(init=False)
    """What a length is a multiple of: the ranks that do not shard the batch, and its chunks."""

    @property
    def batch(self) -> Size:
        """The size of the batch: a multiple of the ranks that shard it."""
        return Size(data_ranks(self.mesh), ("b",))

    def __post_init__(self) -> None:
        rest = self.mesh.world_size // data_ranks(self.mesh)
        self.steps = defaultdict(lambda: rest)
        self.steps |= {name: size.coefficient for name, size in units_of(self.graph, self.mesh).items()}
        for node in self.ops():
            if node.target is not getitem:
                self.signatures[node] = signature(node)
            self.taken[node] = {}
        for node in self.graph.graph.nodes:
            if "shape" in node.meta:
                node.meta |= dict(placements={}, uses={}, key=key_of(node))
                self.parts[node] = 1

    def ops(self) -> list[fx.Node]:
        return [n for n in self.graph.graph.nodes if n.op == "call_function" and "shape" in n.meta]

    def sources(self) -> list[fx.Node]:
        return [n for n in self.graph.graph.nodes if n.op == "placeholder"]


def problem_on(state: State, kind: AxisKind, ranks: int) -> Problem:
    """All choices on one axis, on the sizes that earlier axes leave."""
    problem = Problem()
    for node in state.sources():
        options = _source_rows(node, kind, ranks)
        price = kind.price * node.meta["nbytes"] / state.parts[node] / BUS if _is_matrix(node) else 0.0
        _add(problem, node, options, [price * row.output.whole for row in options])
    for node in state.ops():
        options = _op_rows(state, node, kind, ranks)
        _add(problem, node, options, [_op_cost(state, node, kind, row, ranks) for row in options])
    _add_edges(state, problem, kind, ranks)
    _add_outputs(state, problem, kind, ranks)
    return problem


def key_of(node: fx.Node) -> Any:
    """Nodes at the same place of equal blocks, or of two rounds of a run, have one key, and so one choice."""
    repeats = node.meta.get("block") or in_run(node)
    return node.meta["alias"] if repeats or node.meta.get("role") else node.name


def _add(problem: Problem, node: fx.Node, options: list[Row], costs: list[float]) -> None:
    key = key_of(node)
    problem.weights[key] += repeat_of(node)
    problem.rows.setdefault(key, options)
    problem.costs.setdefault(key, costs)


def _is_matrix(node: fx.Node) -> bool:
    return node.meta["role"] == "parameter" and len(node.meta["shape"]) > 1


def _source_rows(node: fx.Node, kind: AxisKind, ranks: int) -> list[Row]:
    shape = node.meta["shape"]
    if node.meta["role"] == "parameter":
        dim = _cut_dim(node, kind)
        uses = kind.parameter_uses(shape, ranks)
        return [Row((), use) for use in uses if use.whole or dim in (None, use.dim)]
    if node.meta["role"] == "input":
        if kind.shards_batch and (dim := batch_dim(shape)) is not None:
            return [Row((), S(dim))]
        return [Row((), I if node.meta["grad"] else R)]
    return [Row((), R)]


def batch_dim(shape: tuple[Size, ...]) -> int | None:
    """The first dim that the batch is in; data axes shard it."""
    return next((dim for dim, size in enumerate(shape) if "b" in size.symbols), None)


def _cut_dim(node: fx.Node, kind: AxisKind) -> int | None:
    """The dim of a parameter that an earlier part of this axis shards: later parts shard that one or none."""
    found = (p.dim for a, p in node.meta["placements"].items() if KINDS[kind_of(a)] is kind and p.kind == "S")
    return next(found, None)


def _op_rows(state: State, node: fx.Node, kind: AxisKind, ranks: int) -> list[Row]:
    if node.target is getitem:
        whole = [I, R] if node.meta["grad"] else [R]
        shape = node.meta["shape"]
        dims = [S(d) for d in range(len(shape))]
        dims += [S(d, str(state.batch)) for d in range(len(shape)) if kind.attends and len(shape[d].symbols) > 1]
        return [Row((p,), p) for p in (*whole, *dims)]
    bound, grads = (
        state.signatures[node],
        [o.meta["grad"] for o in ([node] if node.meta.get("port") else operands(node))],
    )
    found = rows(bound, ranks, taken=state.taken[node], grads=grads, batch=state.batch if kind.attends else None,
                 steps=state.steps)  # fmt: skip
    return [row for row in found if row.factor is None or _may_shard(node, kind, bound, row)]


def _may_shard(node: fx.Node, kind: AxisKind, bound: Signature, row: Row) -> bool:
    """Whether an axis of this kind may run the op so: what counts needs its place in a whole dim."""
    assert row.factor is not None
    if kind.attends and op_name(node.target) in COUNTING and any(p.within for p in (*row.operands, row.output)):
        return False
    return kind.shards(bound.sizes[row.factor]) and not (kind.attends and op_name(node.target) in RANGES)


RANGES = frozenset({"aten.arange.default", "aten.arange.start", "aten.arange.start_step"})
"""Cheap, and the same on every rank: a rank takes its part of the numbers."""

COUNTING = frozenset({"runtime.dropout", "runtime.uniform"})
"""Ops that use an element's index in the whole value."""


def _op_cost(state: State, node: fx.Node, kind: AxisKind, row: Row, ranks: int) -> float:
    """An op on a whole value is repeated on every rank: that is what makes sharded norms worth it."""
    share = 1 / ranks if row.factor else 1.0
    together = state.signatures[node].together if node in state.signatures else frozenset()
    exchanged = _keys_and_values(state, node, ranks) if row.factor in together and len(together) > 1 else 0.0
    read = sum(o.meta["nbytes"] / state.parts[o] for o in operands(node))
    moved = read + node.meta["nbytes"] / state.parts[node]
    repeated = REPEATED if kind.attends and row.factor is None and node.meta["grad"] else 1.0
    return exchanged + op_time(_flops(state, node), moved) * share * repeated


REPEATED = 1e3
"""How much dearer an op is that every rank of a sequence's axis would repeat: to share that work is what it is for."""


def _keys_and_values(state: State, node: fx.Node, ranks: int) -> float:
    """Seconds in which attention over its axis brings keys and values to every rank, and their gradients back."""
    _, *both = operands(node)[:3]
    return sum(conversion_time(S(0), R, v.meta["nbytes"] / state.parts[v], ranks, v.meta["grad"]) for v in both)


def _flops(state: State, node: fx.Node) -> float:
    """Multiplications and additions of a product, thrice with its backward; other ops have none to speak of."""
    bound = state.signatures.get(node)
    if bound is None or not any(len(term) > 1 for term in bound.terms or ()):
        return 0.0
    total = 6.0 if node.meta["grad"] else 2.0
    for factor in bound.factors:
        size = bound.sizes[factor]
        total *= size.value({symbol: NOMINAL.get(symbol, NOMINAL["s"]) for symbol in size.symbols})
        total /= state.taken[node].get(factor, 1)
    return total


def _add_edges(state: State, problem: Problem, kind: AxisKind, ranks: int) -> None:
    """A conversion stands once a segment for all uses in it that want one layout, on the axes placed before too."""
    stand: dict[Any, dict[Any, int]] = defaultdict(dict)
    for node in state.ops():
        for number, value in enumerate(operands(node)):
            before = tuple(used[number] for used in node.meta["uses"].values())
            edge = Edge(key_of(value), key_of(node), number, (node.meta.get("kind"), before))
            cost = _unchanged if node.target is getitem else _EdgeCost.of(state, value, kind, ranks, before)
            problem.edges.setdefault(edge, cost)
            stand[edge.producer, edge.place][value, node.meta.get("segment")] = repeat_of(node)
    problem.times = {place: sum(found.values()) for place, found in stand.items()}


def _unchanged(source: Placement, target: Placement) -> float:
    """A list of tensors is taken apart as it is: conversions are of tensors."""
    return 0.0 if source == target else float("inf")


@dataclass(frozen=True)
class _EdgeCost:
    """Seconds, and bytes, of converting one value on one axis; what may not happen costs infinity.

    `earlier` are the seconds of this edge's conversions on axes placed before: uses that want two layouts here convert
    twice there. They are not less where this axis shards the value, so that axes convert on the same edges.
    """

    shape: tuple[Size, ...]
    nbytes: float
    grad: bool
    parameter: bool
    kind: AxisKind
    ranks: int
    earlier: float = 0.0
    held: float = 0.0
    """Seconds that a piece of a matrix costs where every rank holds it: as much as a matrix that it is."""
    bucketed: bool = False
    """Whether it is a piece of a vector, which communicates in its block's bucket or not at all."""

    @classmethod
    def of(
        cls, state: State, value: fx.Node, kind: AxisKind, ranks: int, before: Sequence[Placement] = ()
    ) -> _EdgeCost:
        meta = value.meta
        parameter = meta.get("role") == "parameter"
        nbytes, earlier = meta["nbytes"] / state.parts[value], 0.0
        for (axis, source), target in zip(meta["placements"].items(), before, strict=False):
            size = state.mesh.size(axis)
            nbytes /= size if target.kind == "S" != source.kind else 1  # what was cut there is smaller here
            whole = nbytes * (size if "S" in (source.kind, target.kind) else 1)
            earlier += 0.0 if parameter else conversion_time(source, target, whole, size, meta["grad"])
        piece = meta.get("piece")
        held = kind.price * nbytes / BUS if piece == "matrix" else 0.0
        return cls(meta["shape"], nbytes, meta["grad"], parameter, kind, ranks, earlier, held, piece == "vector")

    def __call__(self, source: Placement, target: Placement) -> float:
        return self.earlier + self.held * target.whole + self._here(source, target)

    def _here(self, source: Placement, target: Placement) -> float:
        if source == target:
            return 0.0
        if self.parameter and source.kind == "S":
            return float("inf")  # a sharded parameter is used where it lies; data axes gather it before
        if self.bucketed and source.kind in "IS":
            return float("inf")
        if target.within:
            return float("inf")  # a whole is sharded before its sequence is joined, as cheaply
        if source.within:  # by a view in which the sequence is a dim of its own
            return self._moved(source, target) if target.whole else float("inf")
        exchanged = (source, target) if source.kind == "S" else (target,)
        if target.kind == "S" and not all(self._even(placement) for placement in exchanged):
            return float("inf")
        return self._moved(source, target)

    def _moved(self, source: Placement, target: Placement) -> float:
        return conversion_time(source, target, self.nbytes, self.ranks, self.grad)

    def volume(self, source: Placement, target: Placement) -> float:
        return conversion_bytes(source, target, self.nbytes, self.ranks, self.grad)

    def _even(self, placement: Placement) -> bool:
        assert placement.dim is not None
        if placement.dim >= len(self.shape):
            return False
        size = self.shape[placement.dim]
        joined = self.kind.attends and "b" in size.symbols
        return self.kind.shards(size) and size.divides_by(self.ranks) and not joined


def _add_outputs(state: State, problem: Problem, kind: AxisKind, ranks: int) -> None:
    """A result is sharded on its batch over data axes; on others it is whole, or as sharded as it is made.

    What a buffer becomes is whole on every axis.
    """
    written = set(updates(state.graph).values())
    for number, node in enumerate(returned(state.graph)):
        shape, key = node.meta["shape"], (OUTPUT, number)
        dim = batch_dim(shape) if kind.shards_batch else None
        wanted = [I] if dim is None else [S(dim)]
        if not kind.shards_batch and not state.local_outputs and node not in written:
            wanted += [S(d) for d in range(len(shape)) if not (kind.attends and "b" in shape[d].symbols)]
        problem.rows[key] = [Row((p,), p) for p in wanted]
        problem.costs[key] = [0.0] * len(wanted)
        inner = _EdgeCost.of(state, node, kind, ranks)

        def cost(source: Placement, target: Placement, inner: Any = inner, free: bool = not kind.shards_batch) -> float:
            return float("inf") if free and target.kind == "S" and source != target else inner(source, target)

        problem.edges[Edge(key_of(node), key, 0, key)] = cost


def returned(graph: fx.GraphModule) -> list[fx.Node]:
    return [n for n in results(graph) if isinstance(n, fx.Node)]
