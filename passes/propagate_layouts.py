"""Give every value and every use a layout, one axis after the other."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
from torch import fx

from ndcompile.axes import KINDS, AxisKind
from ndcompile.choose import Edge, Infeasible, Problem, choose
from ndcompile.cost import BUS, NOMINAL, conversion_bytes, conversion_time, op_time
from ndcompile.errors import CompileError
from ndcompile.mesh import MeshSpec
from ndcompile.placement import I, Layout, Placement, R, S
from ndcompile.rules.notation import Signature
from ndcompile.rules.registry import op_name, operands, results, signature
from ndcompile.rules.rows import Row, rows
from ndcompile.size import Size

Pins = Mapping[str, Mapping[str, Placement]]
"""For a parameter or module by name (or wildcard): a placement on an axis."""

OUTPUT = "output"


def propagate_layouts(
    graph: fx.GraphModule, mesh: MeshSpec, pins: Pins, local_outputs: bool = False
) -> dict[str, Problem]:
    """Choose one row per op and axis; set `layout` on each value, `wanted` (a layout an operand) on each op.

    Data axes are placed first, then the others, each on the sizes that are left. Parameters get `stored`, their layout
    between steps, and `layout`, the one in which compute takes them. With `local_outputs` no result is sharded on
    other than data axes. Returns each axis's problem, for `explain`.
    Afterwards `every_value_placed` holds.
    """
    measure(graph, mesh)
    mark_gradients(graph)
    pinned = resolve_pins(graph, mesh, pins)
    state = _State(graph, mesh, local_outputs)
    problems = {}
    for axis in sorted(mesh.names, key=lambda name: KINDS[mesh[name].kind].integers):
        problems[axis] = _place(state, axis, pinned.get(axis, {}))
    _store(state, mesh)
    return problems


def measure(graph: fx.GraphModule, mesh: MeshSpec) -> None:
    """Set `shape` (monomials): the batch is a multiple of the data axes, the sequence of the others."""
    data = math.prod(axis.size for axis in mesh.axes if KINDS[axis.kind].shards_batch)
    rest = math.prod(axis.size for axis in mesh.axes if not KINDS[axis.kind].shards_batch)
    symbols = {"b": Size(data, ("b",)), "s": Size(rest, ("s",))}
    nominal = {sympy.Symbol("b", positive=True, integer=True): NOMINAL["b"] * data}
    nominal[sympy.Symbol("s", positive=True, integer=True)] = NOMINAL["s"]
    for node in graph.graph.nodes:
        if "sizes" in node.meta:
            node.meta["shape"] = tuple(Size.of(size, symbols) for size in node.meta["sizes"])
            count = math.prod(int(sympy.sympify(size).subs(nominal)) for size in node.meta["sizes"])
            node.meta["nbytes"] = count * node.meta["dtype"].itemsize


def mark_gradients(graph: fx.GraphModule) -> None:
    """Set `grad`: whether a gradient flows through the value; for a block's port, through that of any equal block."""
    ports: set[Any] = set()
    while True:
        for node in graph.graph.nodes:
            if "shape" in node.meta and node.op == "call_function":
                stopped = op_name(node.target) == "aten.detach.default" or not node.meta["dtype"].is_floating_point
                flows = any(o.meta["grad"] for o in operands(node)) or (is_port(node) and node.meta["alias"] in ports)
                node.meta["grad"] = flows and not stopped
        found = {n.meta["alias"] for n in graph.graph.nodes if is_port(n) and n.meta["grad"]}
        if found == ports:
            return
        ports = found


def is_port(node: fx.Node) -> bool:
    """A block's own name for a value that it takes from outside."""
    return bool(node.meta.get("port"))


def resolve_pins(graph: fx.GraphModule, mesh: MeshSpec, pins: Pins) -> dict[str, dict[fx.Node, Placement]]:
    """Each pin's nodes by axis: a parameter, or the last value that a module computes."""
    nodes = [n for n in graph.graph.nodes if "shape" in n.meta]
    names: dict[str, fx.Node] = {n.meta["module"]: n for n in nodes if n.op == "call_function" and n.meta["module"]}
    names |= {n.meta["name"]: n for n in nodes if n.meta.get("role") == "parameter"}
    found: dict[str, dict[fx.Node, Placement]] = {}
    for pattern, placements in pins.items():
        matches = fnmatch.filter(names, pattern)
        if not matches:
            raise CompileError(
                f"the pin '{pattern}' matches no parameter and no module",
                tries=tuple(_close(pattern, names)) or "a name from model.named_parameters()",
            )
        for axis, placement in placements.items():
            if axis not in mesh.names and mesh.size(axis) == 1:
                continue
            for name in matches:
                earlier = found.setdefault(axis, {}).setdefault(names[name], placement)
                if earlier != placement:
                    raise CompileError(
                        f"pins contradict each other: '{name}' is {earlier} and {placement} on axis '{axis}'",
                        why=f"the last of the pins that match it is '{pattern}'",
                        tries="one pin for it, or narrower wildcards",
                    )
    return found


def _close(pattern: str, names: Mapping[str, Any]) -> list[str]:
    import difflib

    return [f"'{name}'" for name in difflib.get_close_matches(pattern, names, n=2)]


@dataclass
class _State:
    """What earlier axes have decided: each node's row an axis, and how many ways its factors are sharded."""

    graph: fx.GraphModule
    mesh: MeshSpec
    local_outputs: bool = False
    taken: dict[fx.Node, dict[str, int]] = field(default_factory=dict)
    signatures: dict[fx.Node, Signature] = field(default_factory=dict)
    parts: dict[fx.Node, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
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


from operator import getitem  # noqa: E402


def _place(state: _State, axis: str, pinned: Mapping[fx.Node, Placement]) -> Problem:
    kind, ranks = KINDS[state.mesh[axis].kind], state.mesh[axis].size
    problem = Problem()
    for node in state.sources():
        options = _source_rows(node, kind, ranks)
        price = kind.price * node.meta["nbytes"] / state.parts[node] / BUS if _is_matrix(node) else 0.0
        _add(problem, node, options, [price * row.output.whole for row in options])
    for node in state.ops():
        options = _op_rows(state, node, kind, ranks)
        _add(problem, node, options, [_op_cost(state, node, row, ranks) for row in options])
    _add_edges(state, problem, kind, ranks)
    _add_outputs(state, problem, kind, ranks)
    for node, placement in pinned.items():
        _pin(problem, node, axis, placement)
    try:
        chosen, _ = choose(problem)
    except Infeasible as error:
        raise CompileError(
            f"no program on axis '{axis}' has all pinned placements",
            why="; ".join(f"'{_shown(node)}' is pinned {placement}" for node, placement in pinned.items())
            or str(error),
            tries="fewer pins: program.explain(name) shows what each costs",
        ) from error
    for node in [*state.sources(), *state.ops()]:
        _decide(state, node, axis, ranks, chosen[key_of(node)])
    _require_heads(state, axis, kind, ranks)
    return problem


def key_of(node: fx.Node) -> Any:
    """Nodes that stand at the same place of equal blocks have one key, and so one choice."""
    return node.meta["alias"] if node.meta.get("block") or node.meta.get("role") else node.name


def _add(problem: Problem, node: fx.Node, options: list[Row], costs: list[float]) -> None:
    key = key_of(node)
    problem.weights[key] += 1
    problem.rows.setdefault(key, options)
    problem.costs.setdefault(key, costs)


def _is_matrix(node: fx.Node) -> bool:
    return node.meta["role"] == "parameter" and len(node.meta["shape"]) > 1


def _source_rows(node: fx.Node, kind: AxisKind, ranks: int) -> list[Row]:
    shape = node.meta["shape"]
    if node.meta["role"] == "parameter":
        return [Row((), placement) for placement in kind.parameter_uses(shape, ranks)]
    sharded = kind.shards_batch and node.meta["role"] == "input" and shape and "b" in shape[0].symbols
    return [Row((), S(0) if sharded else R)]


def _op_rows(state: _State, node: fx.Node, kind: AxisKind, ranks: int) -> list[Row]:
    if node.target is getitem:
        whole = [I, R] if node.meta["grad"] else [R]
        dims = [S(d) for d in range(len(node.meta["shape"]))]
        return [Row((p,), p) for p in (*whole, *dims)]
    bound, grads = state.signatures[node], [o.meta["grad"] for o in ([node] if is_port(node) else operands(node))]
    found = rows(bound, ranks, taken=state.taken[node], grads=grads)
    return [row for row in found if row.factor is None or kind.shards(bound.sizes[row.factor])]


def _op_cost(state: _State, node: fx.Node, row: Row, ranks: int) -> float:
    """An op on a whole value is repeated on every rank: that is what makes sharded norms worth it."""
    share = 1 / ranks if row.factor else 1.0
    read = sum(o.meta["nbytes"] / state.parts[o] for o in operands(node))
    return op_time(0.0, (read + node.meta["nbytes"] / state.parts[node]) * share)


def _add_edges(state: _State, problem: Problem, kind: AxisKind, ranks: int) -> None:
    for node in state.ops():
        for number, value in enumerate(operands(node)):
            place = ("place", node.meta.get("kind"))
            cost = _unchanged if node.target is getitem else _EdgeCost.of(state, value, kind, ranks)
            problem.edges.setdefault(Edge(key_of(value), key_of(node), number, place), cost)
            problem.weights[place] = max(problem.weights[place], problem.weights[key_of(node)])


def _unchanged(source: Placement, target: Placement) -> float:
    """A list of tensors is taken apart as it is: conversions are of tensors."""
    return 0.0 if source == target else float("inf")


@dataclass(frozen=True)
class _EdgeCost:
    """Seconds, and bytes, of converting one value on one axis; what may not happen costs infinity."""

    shape: tuple[Size, ...]
    nbytes: float
    grad: bool
    parameter: bool
    kind: AxisKind
    ranks: int

    @classmethod
    def of(cls, state: _State, value: fx.Node, kind: AxisKind, ranks: int) -> _EdgeCost:
        meta = value.meta
        parameter = meta.get("role") == "parameter"
        return cls(meta["shape"], meta["nbytes"] / state.parts[value], meta["grad"], parameter, kind, ranks)

    def __call__(self, source: Placement, target: Placement) -> float:
        if source == target:
            return 0.0
        if self.parameter and source.kind == "S":
            return float("inf")  # a sharded parameter is used where it lies; data axes gather it before
        exchanged = (source, target) if source.kind == "S" else (target,)
        if target.kind == "S" and not all(self._even(placement) for placement in exchanged):
            return float("inf")
        return conversion_time(source, target, self.nbytes, self.ranks, self.grad)

    def volume(self, source: Placement, target: Placement) -> float:
        return conversion_bytes(source, target, self.nbytes, self.ranks, self.grad)

    def _even(self, placement: Placement) -> bool:
        assert placement.dim is not None
        if placement.dim >= len(self.shape):
            return False
        size = self.shape[placement.dim]
        return self.kind.shards(size) and size.divides_by(self.ranks)


def _add_outputs(state: _State, problem: Problem, kind: AxisKind, ranks: int) -> None:
    """A result is sharded on its batch over data axes; on others it is whole, or as sharded as it is made."""
    for number, node in enumerate(_returned(state.graph)):
        shape, key = node.meta["shape"], (OUTPUT, number)
        batched = kind.shards_batch and shape and "b" in shape[0].symbols
        wanted = [S(0)] if batched else [I]
        if not kind.shards_batch and not state.local_outputs:
            wanted += [S(d) for d in range(len(shape))]
        problem.rows[key] = [Row((p,), p) for p in wanted]
        problem.costs[key] = [0.0] * len(wanted)
        inner = _EdgeCost.of(state, node, kind, ranks)

        def cost(source: Placement, target: Placement, inner: Any = inner, free: bool = not kind.shards_batch) -> float:
            return float("inf") if free and target.kind == "S" and source != target else inner(source, target)

        problem.edges[Edge(key_of(node), key, 0, key)] = cost


def _returned(graph: fx.GraphModule) -> list[fx.Node]:
    return [n for n in results(graph) if isinstance(n, fx.Node)]


def _pin(problem: Problem, node: fx.Node, axis: str, placement: Placement) -> None:
    options = [row.output for row in problem.rows[key_of(node)]]
    whole = placement.whole
    problem.allow(key_of(node), lambda row: row.output == placement or (whole and row.output.whole))
    if not problem.rows[key_of(node)]:
        raise CompileError(
            f"'{_shown(node)}' cannot be {placement} on axis '{axis}'",
            why=f"it can be {', '.join(map(str, dict.fromkeys(options)))}",
            tries="another placement for this pin",
        )


def _shown(node: fx.Node) -> str:
    return str(node.meta.get("name") or node.meta["module"])


def _decide(state: _State, node: fx.Node, axis: str, ranks: int, row: Row) -> None:
    node.meta["placements"][axis] = row.output
    node.meta["uses"][axis] = row.operands
    if row.output.kind == "S":
        state.parts[node] *= ranks
    if node in state.taken:
        node.meta.setdefault("taken", {})[axis] = dict(state.taken[node])
    if row.factor is not None and node in state.taken:
        state.taken[node][row.factor] = state.taken[node].get(row.factor, 1) * ranks
        if row.factor in state.signatures[node].masked | state.signatures[node].special:
            node.meta.setdefault("algorithm_axes", []).append((axis, row.factor))


def _require_heads(state: _State, axis: str, kind: AxisKind, ranks: int) -> None:
    """Attention on a tensor axis is sharded by heads, or the mesh is refused: each rank would do all of it."""
    if kind.shards_batch:
        return
    for node in state.ops():
        if "attention" in op_name(node.target) and node.meta["placements"][axis].whole:
            heads = node.meta["shape"][1]
            fits = [n for n in range(2, int(heads.coefficient) + 1) if heads.coefficient % n == 0]
            if heads.divides_by(ranks):
                continue
            raise CompileError(
                f"{heads} attention heads do not divide over {ranks} ranks of axis '{axis}'",
                node=f"%{node.name}   {node.meta['module']}",
                source=node.meta["source"],
                why="every rank would repeat the whole attention",
                tries=f"{axis} = {', '.join(map(str, fits)) or 1}",
            )


def _store(state: _State, mesh: MeshSpec) -> None:
    """Turn placements into layouts; parameters get the dim that data axes shard where they lie."""
    order = sorted(mesh.names, key=lambda name: KINDS[mesh[name].kind].integers)
    for node in [*state.sources(), *state.ops()]:
        rank = len(node.meta["shape"])
        node.meta["layout"] = Layout.make(rank, {a: node.meta["placements"][a] for a in order})
        node.meta["wanted"] = tuple(
            Layout.make(len(o.meta["shape"]), {a: node.meta["uses"][a][i] for a in order})
            for i, o in enumerate(operands(node))
            if node.op == "call_function"
        )
        if node.meta.get("role") == "parameter":
            node.meta["stored"] = _stored(node, mesh, order)
    ends = []
    for node in _returned(state.graph):
        ends.append(_end_layout(node, mesh, order, state.local_outputs))
    state.graph.graph.output_node().meta["wanted"] = tuple(ends)


def _stored(node: fx.Node, mesh: MeshSpec, order: list[str]) -> Layout:
    shape, used = node.meta["shape"], node.meta["placements"]
    taken = {p.dim: mesh.size(a) for a, p in used.items() if p.kind == "S"}
    free = [d for d in range(len(shape)) if shape[d].divides_by(taken.get(d, 1))]  # one axis may cut a dim unevenly
    dims = sorted(free, key=lambda d: (d in taken, d))
    dim = dims[0] if dims else None
    placements = {a: KINDS[mesh[a].kind].stored(used[a], dim) for a in reversed(order)}
    return Layout.make(len(shape), placements)


def _end_layout(node: fx.Node, mesh: MeshSpec, order: list[str], local: bool) -> Layout:
    shape, found = node.meta["shape"], {}
    for axis in order:
        kind, made = KINDS[mesh[axis].kind], node.meta["placements"][axis]
        if kind.shards_batch and shape and "b" in shape[0].symbols:
            found[axis] = S(0)
        else:
            found[axis] = made if made.kind == "S" and not kind.shards_batch and not local else I
    return Layout.make(len(shape), found)
