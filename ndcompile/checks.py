"""What must hold of a graph: predicates that raise `CheckError`. Nothing here is shared with what sets the layouts.

`ops_are_legal` deduces each op's output placement (`deduction.py`); the others read the conversions alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ndcompile.deduction import REPORT, RULE, broken, deduce
from ndcompile.duties import duties
from ndcompile.errors import CheckError
from ndcompile.mesh import HEAD_TAIL, MeshAxis, MeshSpec, kind_of
from ndcompile.placement import COLLECTIVES, IN_ORDER, REDUCING, Layout, P, Placement, R, S, row_of

COPIES = ("aten.contiguous.default", "aten.clone.default", "aten.lift_fresh_copy.default")


def no_noops(graph: fx.GraphModule, mesh: MeshSpec) -> None:
    """No casts to the dtype at hand and no copies are left."""
    for node in _ops(graph):
        name = str(node.target)
        same = name == "aten.to.dtype" and _tensor(node.args[0]).meta["dtype"] == node.meta["dtype"]
        if same or name in COPIES:
            raise broken(f"{name} changes nothing", node, "it would be given a layout and a cost of its own")


def no_fixed_device(graph: fx.GraphModule, mesh: MeshSpec) -> None:
    """No op names a device: each rank has its own."""
    for node in _ops(graph):
        if any(isinstance(value, torch.device) for value in (*node.args, *node.kwargs.values())):
            raise broken(f"{node.target} makes its result on a fixed device", node, "each rank has its own device")


def no_hidden_randomness(graph: fx.GraphModule, mesh: MeshSpec) -> None:
    """Random numbers are functions of a key and a global index, so that they are the same on every mesh."""
    for node in _ops(graph):
        seeded = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        attends = str(node.target).startswith("aten.scaled_dot_product_attention")
        if seeded and not (attends and _dropout_p(node) == 0):
            raise broken(f"{node.target} draws random numbers of its own", node, "each rank would draw others")


def _dropout_p(node: fx.Node) -> Any:
    return node.kwargs.get("dropout_p", node.args[4] if len(node.args) > 4 else 0.0)


def every_value_placed(graph: fx.GraphModule, mesh: MeshSpec) -> None:
    """Each value has one placement on each axis, of dims that it has."""
    for node in graph.graph.nodes:
        if "shape" not in node.meta:
            continue
        layout = node.meta.get("layout")
        if layout is None or len(layout.dims) != len(node.meta["shape"]) or sorted(layout.axes) != sorted(mesh.names):
            raise broken(f"%{node.name} has layout '{layout}' on mesh '{mesh}'", node, "each axis needs one placement")


def parameters_lie_where_they_are_used(graph: fx.GraphModule, mesh: MeshSpec) -> None:
    """What shards a parameter in compute shards it between steps in the same order, and outside of what is gathered."""
    for node in graph.graph.find_nodes(op="placeholder"):
        if "stored" not in node.meta:
            continue
        for kept, used in zip(node.meta["stored"].dims, node.meta["layout"].dims, strict=True):
            if kept[: len(used)] != used:
                raise broken(
                    f"'{node.meta['name']}' lies as '{node.meta['stored']}', but compute takes it as "
                    f"'{node.meta['layout']}'",
                    node,
                    "a rank would hold other rows than those that it uses",
                )


def rounds_are_equal(graph: fx.GraphModule, mesh: MeshSpec) -> None:
    """Both rounds of a run that stand for all of it do the same: their segments are of the same kinds."""
    rounds: dict[int, tuple[dict[Any, Any], dict[Any, Any]]] = {}
    for node in _ops(graph):
        place = node.meta.get("place")
        if place is not None and place.run is not None:
            rounds.setdefault(place.run, ({}, {}))[place.round][place.position] = (node.meta.get("kind"), node)
    for first, second in rounds.values():
        for position in {*first, *second}:
            (kind, node), (other, _) = (r.get(position, (None, None)) for r in (first, second))
            if kind != other:
                what = "two rounds of a run of blocks do not do the same"
                raise broken(what, node or second[position][1], "the second stands for all later ones")


def no_implicit_communication(graph: fx.GraphModule, mesh: MeshSpec) -> None:
    """Every operand has the layout that its op was given a row for; every result the contract's."""
    for node in [*_ops(graph), graph.graph.output_node()]:
        if "move" in node.meta or "data_axes" in node.meta:
            continue
        values, wanted = _tensors(node), node.meta.get("wanted", ())
        if len(values) != len(wanted):
            raise broken(f"%{node.name} has layouts for {len(wanted)} of its {len(values)} operands", node, UNPLACED)
        for value, layout in zip(values, wanted, strict=True):
            here = value.meta.get("stored", value.meta["layout"])
            if not _agrees(here, layout, value.meta["grad"]):
                raise broken(
                    f"%{node.name} takes %{value.name} as '{layout}', but it is '{here}'",
                    node,
                    "a conversion is missing on this edge",
                )
            if node.op == "output" and _head_tail(value):
                raise broken(f"the result %{value.name} lies head–tail", node, "a conversion is missing on this edge")


UNPLACED = "each use needs one layout"


def conversions_are_rows(graph: fx.GraphModule, mesh: MeshSpec) -> None:
    """Each conversion is a row of the table, does what its row says, and moves only the minor axis of a dim."""
    for node in _ops(graph):
        move = node.meta.get("move")
        if move is None:
            continue
        row = row_of(move.source, move.target)
        called = getattr(node.target, "__name__", str(node.target))
        if row is None or called != row.name:
            raise broken(
                f"no conversion {move.source}→{move.target} is called {called}", node, "the table has no such row"
            )
        _check_arguments(node, row.name, move.source, move.target, move.axes)
        value = _tensor(node.args[0])
        if row == IN_ORDER and move.axes not in [(axis,) for axis in _head_tail(value)]:
            raise broken(f"{row.name} of what does not lie head–tail on {', '.join(move.axes)}", node, ORDERED)
        before = value.meta["stored"] if "stored" in value.meta and node.meta["bucket"] else value.meta["layout"]
        after = node.meta["layout"]
        for axis in move.axes:
            if not _is(before.on(axis), move.source, value.meta["grad"]) or after.on(axis) != move.target:
                raise broken(
                    f"{row.name} turns '{before}' into '{after}'",
                    node,
                    f"its row is {axis} {move.source}→{move.target}",
                )
        _check_minor(node, before, move.source, move.axes)
        _check_minor(node, after, move.target, move.axes)
        if before.without(move.axes) != after.without(move.axes):
            moved = ", ".join(move.axes)
            raise broken(f"{row.name} turns '{before}' into '{after}'", node, f"it may change {moved} only")


def _head_tail(value: fx.Node) -> list[str]:
    """The axes whose ranks hold two chunks each of a sequence, and not one part in order."""
    dims = zip(value.meta["layout"].dims, value.meta["shape"], strict=True)
    found = [axis for on_dim, size in dims if not size.constant for axis in on_dim if kind_of(axis) in HEAD_TAIL]
    while "move" in value.meta or "data_axes" in value.meta:
        move = value.meta.get("move")
        if move is not None and move.conversion == IN_ORDER:
            found = [axis for axis in found if axis not in move.axes]
        value = _tensor(value.args[0])
    return found


ORDERED = "it would bring a sequence out of order"


def _check_arguments(node: fx.Node, name: str, source: Placement, target: Placement, axes: tuple[str, ...]) -> None:
    """The call says what its row says: over which axes, and along which dims."""
    assert isinstance(node.args[1], MeshAxis), "a conversion's second argument is its axes"
    given = node.args[1].names
    if source.kind == target.kind and name != IN_ORDER.name:
        dims, due = [node.kwargs.get("source"), node.kwargs.get("target")], [source.dim, target.dim]
    else:
        dims, due = [node.kwargs.get("dim")], [target.dim if source.dim is None else source.dim]
    if given != axes or dims != due:
        what = f"{name} is called over {', '.join(map(str, given))} and dim {', '.join(map(str, dims))}"
        raise broken(what, node, f"its row is {', '.join(axes)} {source}→{target}")


def _check_minor(node: fx.Node, layout: Layout, placement: Placement, axes: tuple[str, ...]) -> None:
    if placement.kind == "S":
        assert placement.dim is not None
        if layout.dims[placement.dim][-len(axes) :] != axes:
            what = f"{', '.join(axes)} is not the minor axis of dim {placement.dim} in '{layout}'"
            raise broken(what, node, "parts of a dim can only be joined or cut from the inside")


def reductions_state_their_dtype(graph: fx.GraphModule, mesh: MeshSpec) -> None:
    """Each side that adds says in which dtype."""
    for node in _ops(graph):
        move = node.meta.get("move")
        if move is None:
            continue
        for side in ("forward", "backward"):
            dtype = node.meta.get(f"{side}_dtype")
            if getattr(move.conversion, side) in REDUCING and not isinstance(dtype, torch.dtype):
                raise broken(f"{move.conversion.name} adds in no stated dtype {side}", node, "sums round by dtype")


def reduced_exactly_once(graph: fx.GraphModule, mesh: MeshSpec) -> None:
    """At each use, a partial gradient is reduced once on its way to the parameter, any other never."""
    for duty in duties(graph, mesh):
        due = 1 if duty.cotangent == P() else 0
        if len(duty.reductions) != due:
            raise CheckError(
                f"the gradient of '{duty.parameter}' is reduced {len(duty.reductions)} times over axis '{duty.axis}'",
                node=duty.use,
                source=duty.source,
                why=f"it is {duty.cotangent} at this use, so it is due {due} time{'s' if due != 1 else ''}",
                tries=REPORT,
            )


def waited_before_use(graph: fx.GraphModule, mesh: MeshSpec) -> None:
    """What starts a collective is waited for, and nothing else reads its result. (Conversions wait by themselves.)"""
    for node in _ops(graph):
        if not str(node.target).startswith("_c10d_functional.") or "wait_tensor" in str(node.target):
            continue
        early = [user for user in node.users if "wait_tensor" not in str(user.target)]
        if early or not node.users:
            how = f"%{early[0].name} uses it" if early else "nothing waits for it"
            raise broken(f"%{node.name} starts {node.target}, and {how}", node, UNWAITED, WAIT)


UNWAITED = "until it is waited for, the result of a collective is not there"
WAIT = "torch.ops._c10d_functional.wait_tensor on the result, before anything else"


def same_collectives_on_every_rank(graph: fx.GraphModule, mesh: MeshSpec) -> None:
    """Each collective's groups are all ranks, cut along axes of the mesh: every rank takes part, in one order."""
    complete: dict[tuple[str, ...], bool] = {}
    for node in _ops(graph):
        move = node.meta.get("move")
        if move is None or not {move.conversion.forward, move.conversion.backward} & COLLECTIVES:
            continue
        if move.axes not in complete:
            unknown = [axis for axis in move.axes if axis not in mesh.names]
            members = [] if unknown else sorted(rank for group in mesh.groups(*move.axes) for rank in group)
            complete[move.axes] = members == list(range(mesh.world_size))
        if not complete[move.axes]:
            over = ", ".join(move.axes)
            raise broken(f"{move.conversion.name} over {over} leaves ranks out", node, f"the mesh is '{mesh}'")


def halves_are_apart(graph: fx.GraphModule, mesh: MeshSpec, signature: Callable[[fx.Node], Any]) -> None:
    """In a block that is computed in halves no op takes numbers of one half into the other: each result is cut on the
    dim, or whole, as the op's rule gives it of operands that are, and no conversion is along the dim that is cut.
    """
    for node in _ops(graph):
        if not node.meta.get("halved") or node.meta.get("port"):
            continue
        given = [S(v.meta["cut"]) if v.meta.get("cut") is not None else R for v in _tensors(node)]
        made = S(node.meta["cut"]) if node.meta["cut"] is not None else R
        move, name = node.meta.get("move"), str(getattr(node.target, "__name__", node.target))
        kept = move is not None or "data_axes" in node.meta or name == "getitem"
        if move is not None and node.meta["cut"] is not None and node.meta["cut"] in (move.source.dim, move.target.dim):
            raise broken(f"%{node.name} exchanges samples of two halves", node, "they are not there at one time")
        allowed = {given[0]} if kept else deduce(node, signature(node), HALVES, given, [False] * len(given))
        if made not in allowed:
            raise broken(f"%{node.name} is {made} in halves, but its operands make it {_any_of(allowed)}", node, RULE)
        sent = node.meta.get("sent")
        if sent is not None and (move is None or (sent == "once") != (made == R)):
            raise broken(f"%{node.name} is sent by '{sent}', and is {made} in halves", node, "one half has one part")


HALVES = "halves"
"""What the two halves of a batch are called as an axis."""


def ops_are_legal(graph: fx.GraphModule, mesh: MeshSpec, signature: Callable[[fx.Node], Any]) -> None:
    """Deduce each op's output placement on each axis from its operands'; raise where the op is not legal on them."""
    for node in _ops(graph):
        if "move" in node.meta:
            continue
        name = str(getattr(node.target, "__name__", node.target))
        passes_on = name == "getitem" or "data_axes" in node.meta
        bound = None if passes_on else signature(node)
        for axis in mesh.names:
            given = [v.meta["layout"].on(axis) for v in _tensors(node)]
            grads = [v.meta["grad"] for v in _tensors(node)]
            made = node.meta["layout"].on(axis)
            allowed = {given[0]} if bound is None else deduce(node, bound, axis, given, grads)
            one_whole = not (node.meta["grad"] and any(grads))  # without a gradient R and I are the same
            if made not in allowed and not (one_whole and made.whole and any(p.whole for p in allowed)):
                raise broken(
                    f"%{node.name} is {made} on axis '{axis}', but its operands make it {_any_of(allowed)}", node,
                    f"operands: {', '.join(map(str, given))}", RULE,
                )  # fmt: skip


# ---- helpers -------------------------------------------------------------------------------------------------------


def _ops(graph: fx.GraphModule) -> list[fx.Node]:
    return [n for n in graph.graph.nodes if n.op == "call_function" and "sizes" in n.meta]


def _tensor(value: Any) -> fx.Node:
    assert isinstance(value, fx.Node), "an operand is a node"
    return value


def _tensors(node: fx.Node) -> list[fx.Node]:
    """The tensor operands in order, once for each place they stand in."""
    found: list[fx.Node] = []

    def visit(value: Any) -> None:
        if isinstance(value, fx.Node) and "shape" in value.meta:
            found.append(value)
        elif isinstance(value, (list, tuple)):
            for item in value:
                visit(item)

    for value in (*node.args, *node.kwargs.values()):
        visit(value)
    return found


def _agrees(here: Layout, wanted: Layout, grad: bool) -> bool:
    if here.dims != wanted.dims:
        return False
    mine, theirs = dict(here.rest), dict(wanted.rest)
    return all(p == theirs.get(a, R) or (not grad and p.whole and theirs.get(a, R).whole) for a, p in mine.items())


def _is(here: Placement, wanted: Placement, grad: bool) -> bool:
    """Without a gradient there is one replicated placement."""
    return here == wanted or (not grad and here.whole and wanted.whole)


def _any_of(placements: set[Placement]) -> str:
    return " or ".join(sorted(map(str, placements)))
