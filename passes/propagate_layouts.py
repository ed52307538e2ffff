"""Give every value and every use a layout, one axis after the other."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import fx

from ndcompile.axes import KINDS
from ndcompile.choose import Infeasible, Problem, choose
from ndcompile.errors import CompileError
from ndcompile.heads import Attention, attentions
from ndcompile.mesh import GATHERED, MeshSpec
from ndcompile.pins import Pins, resolve_pins
from ndcompile.placement import I, Layout, Placement, S
from ndcompile.problem import State, batch_dim, key_of, problem_on, returned
from ndcompile.rules.layers import HEADS
from ndcompile.rules.registry import op_name, operands, updates
from ndcompile.rules.rows import Row
from ndcompile.size import Shape


def propagate_layouts(
    graph: fx.GraphModule, mesh: MeshSpec, pins: Pins, local_outputs: bool = False, all_pins_match: bool = True
) -> dict[str, Problem]:
    """Choose one row per op and axis; set `layout` on each value, `wanted` (a layout an operand) on each op.

    Data axes are placed first, then the others, each on the sizes that are left. Parameters get `stored`, their layout
    between steps, and `layout`, the one in which compute takes them. With `local_outputs` no result is sharded on
    other than data axes. Returns each axis's problem, for `explain`.
    Afterwards `every_value_placed` holds.
    """
    pinned = resolve_pins(graph, mesh, pins, all_pins_match)
    state = State(graph, mesh, local_outputs)
    heads = attentions(graph)
    problems = {}
    for axis in sorted(mesh.names, key=lambda name: KINDS[mesh[name].kind].integers):
        problems[axis] = _place(state, axis, pinned.get(axis, {}), heads)
    _store(state, mesh)
    return problems


def _place(state: State, axis: str, pinned: Mapping[fx.Node, Placement], heads: list[Attention]) -> Problem:
    kind, ranks = KINDS[state.mesh[axis].kind], state.mesh[axis].size
    problem = problem_on(state, kind, ranks)
    for node in _repeated(state, axis, heads) - set(pinned):
        _keep_whole(problem, node)
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
    _require_heads(state, axis, heads)
    _require_sequences(state, axis)
    return problem


def _repeated(state: State, axis: str, heads: list[Attention]) -> set[fx.Node]:
    """The matrices that make keys and values whose heads do not divide further: each rank needs all that they make."""
    if not KINDS[state.mesh[axis].kind].integers:
        return set()
    exhausted = [a for a in heads if a.keys % (_cut(state, a) * state.mesh[axis].size)]
    return {matrix for attention in exhausted for matrix in attention.matrices}


def _keep_whole(problem: Problem, parameter: fx.Node) -> None:
    """Every rank holds the parameter and uses all of it."""
    problem.allow(key_of(parameter), lambda row: row.output.whole)
    for user in parameter.users:
        problem.allow(key_of(user), partial(_takes_whole, user, parameter))


def _takes_whole(user: fx.Node, value: fx.Node, row: Row) -> bool:
    return all(taken.whole for operand, taken in zip(operands(user), row.operands, strict=True) if operand is value)


def _cut(state: State, attention: Attention) -> int:
    """Over how many ranks the heads are sharded already."""
    dim = len(attention.node.meta["shape"]) + HEADS
    return state.mesh.size(*(a for a, placement in attention.node.meta["placements"].items() if placement == S(dim)))


def _shown(node: fx.Node) -> str:
    return str(node.meta.get("name") or node.meta["module"])


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


def _decide(state: State, node: fx.Node, axis: str, ranks: int, row: Row) -> None:
    node.meta["placements"][axis] = row.output
    node.meta["uses"][axis] = row.operands
    if row.output.kind == "S":
        state.parts[node] *= ranks
    if node in state.taken:
        node.meta.setdefault("taken", {})[axis] = dict(state.taken[node])
    if row.factor is None or node not in state.signatures:
        return
    bound = state.signatures[node]
    for factor in bound.together if row.factor in bound.together else (row.factor,):
        state.taken[node][factor] = state.taken[node].get(factor, 1) * ranks
    if row.factor in bound.masked | bound.special | bound.together:
        node.meta.setdefault("algorithm_axes", []).append((axis, row.factor))


def _require_heads(state: State, axis: str, heads: list[Attention]) -> None:
    """Attention on a tensor axis is sharded by heads, or the mesh is refused: each rank would do all of it."""
    if not KINDS[state.mesh[axis].kind].integers:
        return
    whole = state.mesh[axis].kind
    ranks = state.mesh.size(whole)
    for attention in heads:
        queries, keys, node = attention.queries, attention.keys, attention.node
        fits = [n for n in range(2, queries + 1) if queries % n == 0 and (keys % n == 0 or n % keys == 0)]
        if not node.meta["placements"][axis].whole or ranks in fits:
            continue
        few = "" if keys == queries else f" over {keys} of keys and values"
        raise CompileError(
            f"{queries} attention heads{few} do not divide over {ranks} ranks of axis '{whole}'",
            node=f"%{node.name}   {node.meta['module']}",
            source=node.meta["source"],
            why="every rank would repeat the whole attention",
            tries=f"{whole} = {', '.join(map(str, fits)) or 1}",
        )


def _require_sequences(state: State, axis: str) -> None:
    """An axis of sequences shares the work on them, or the mesh is refused: each rank would do all of it."""
    kind = KINDS[state.mesh[axis].kind]
    if not kind.attends:
        return
    long = [n for n in state.ops() if any(kind.shards(size) for size in n.meta["shape"])]
    if not any(node.meta["placements"][axis].kind == "S" for node in long):
        fixed_at = next((line for node in state.graph.graph.nodes if (line := node.meta.get("fixed_at"))), None)
        raise CompileError(
            f"axis '{axis}' has nothing to shard",
            source=fixed_at,
            why="this line makes a number of a length, so it is the example's in the whole program"
            if fixed_at
            else "no value has a length that is open when the model is compiled; a recurrence step by step fixes it",
            tries=("x.size(1) as it is, without int(…)", "a mesh without cp")
            if fixed_at
            else "a mesh without cp, or dynamic_dims={'input': {1: 's'}}",
        )
    for node in long:
        name = op_name(node.target)
        if node.meta["grad"] and node.meta["placements"][axis].whole and any(work in name for work in HEAVY):
            raise CompileError(
                f"{name} needs the whole sequence, and each rank of axis '{axis}' would repeat it",
                node=f"%{node.name}   {node.meta['module']}",
                source=node.meta["source"],
                why="no algorithm is known here that shares it between ranks",
                tries="a mesh without cp",
            )


HEAVY = ("attention", "conv", "linear", "matmul", "mm", "einsum", "lstm", "gru", "rnn")
"""What does the work of a model, by a part of the op's name."""


def _store(state: State, mesh: MeshSpec) -> None:
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
    written, ends = set(updates(state.graph).values()), []
    for node in returned(state.graph):
        ends.append(_end_layout(node, mesh, order, state.local_outputs or node in written))
    state.graph.graph.output_node().meta["wanted"] = tuple(ends)


def _stored(node: fx.Node, mesh: MeshSpec, order: list[str]) -> Layout:
    """What is gathered is so first: it is the minor part of its dim."""
    shape, used = node.meta["shape"], node.meta["placements"]
    dim, several = _gathered_dim(shape, used, mesh)
    placements = {a: used[a] for a in order if mesh[a].kind not in GATHERED}
    cut = False
    for axis in (a for a in order if mesh[a].kind in GATHERED):
        stored = KINDS[mesh[axis].kind].stored(used[axis], None if cut and not several else dim)
        cut = cut or stored.kind == "S"
        placements[axis] = stored
    return Layout.make(len(shape), placements)


def _gathered_dim(shape: Shape, used: Mapping[str, Placement], mesh: MeshSpec) -> tuple[int | None, bool]:
    """The dim that gathered axes shard, and whether all of them may: only one may cut a dim unevenly."""
    taken = {p.dim: mesh.size(a) for a, p in used.items() if p.kind == "S"}
    cutting = [a for a in used if mesh[a].kind in GATHERED and KINDS[mesh[a].kind].stored(used[a], 0).kind == "S"]
    free = [d for d in range(len(shape)) if shape[d].divides_by(taken.get(d, 1))]
    dims = sorted(free, key=lambda d: (d in taken, d))
    even = [d for d in dims if shape[d].divides_by(taken.get(d, 1) * mesh.size(*cutting))]
    found = (even or dims) if len(cutting) > 1 else dims
    return (found[0] if found else None), len(cutting) < 2 or bool(even)


def _end_layout(node: fx.Node, mesh: MeshSpec, order: list[str], local: bool) -> Layout:
    shape, found = node.meta["shape"], {}
    for axis in order:
        kind, made = KINDS[mesh[axis].kind], node.meta["placements"][axis]
        if kind.shards_batch and (dim := batch_dim(shape)) is not None:
            found[axis] = S(dim)
        else:
            kept = made.kind == "S" and not made.within and not kind.shards_batch and not local
            found[axis] = made if kept else I
    return Layout.make(len(shape), found)
