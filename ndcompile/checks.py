"""What must hold of a graph: predicates that raise `CheckError`. Nothing here is shared with what sets the layouts.

`ops_are_legal` deduces each op's output placement from its operands' placements and the op's rule, as a type checker
does; propagation enumerates rows and picks. The others read the conversions alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from ndcompile.duties import duties
from ndcompile.errors import CompileError
from ndcompile.mesh import HEAD_TAIL, MeshAxis, MeshSpec, kind_of
from ndcompile.placement import COLLECTIVES, IN_ORDER, REDUCING, I, Layout, P, Placement, R, S, row_of
from ndcompile.size import ONE, Size, product


class CheckError(CompileError):
    """A compiled graph breaks a law of placements: a bug of the compiler, or of a rule that was registered."""


REPORT = "report this: a pass of the compiler is wrong; nd.compile(…, dump=FOLDER) writes the graph after each"
RULE = "the rule of this op, if you registered it (nd.register_rule); otherwise " + REPORT


COPIES = ("aten.contiguous.default", "aten.clone.default", "aten.lift_fresh_copy.default")


def no_noops(graph: fx.GraphModule, mesh: MeshSpec) -> None:
    """No casts to the dtype at hand and no copies are left."""
    for node in _ops(graph):
        name = str(node.target)
        same = name == "aten.to.dtype" and _tensor(node.args[0]).meta["dtype"] == node.meta["dtype"]
        if same or name in COPIES:
            raise _broken(f"{name} changes nothing", node, "it would be given a layout and a cost of its own")


def no_fixed_device(graph: fx.GraphModule, mesh: MeshSpec) -> None:
    """No op names a device: each rank has its own."""
    for node in _ops(graph):
        if any(isinstance(value, torch.device) for value in (*node.args, *node.kwargs.values())):
            raise _broken(f"{node.target} makes its result on a fixed device", node, "each rank has its own device")


def no_hidden_randomness(graph: fx.GraphModule, mesh: MeshSpec) -> None:
    """Random numbers are functions of a key and a global index, so that they are the same on every mesh."""
    for node in _ops(graph):
        seeded = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        attends = str(node.target).startswith("aten.scaled_dot_product_attention")
        if seeded and not (attends and _dropout_p(node) == 0):
            raise _broken(f"{node.target} draws random numbers of its own", node, "each rank would draw others")


def _dropout_p(node: fx.Node) -> Any:
    return node.kwargs.get("dropout_p", node.args[4] if len(node.args) > 4 else 0.0)


def every_value_placed(graph: fx.GraphModule, mesh: MeshSpec) -> None:
    """Each value has one placement on each axis, of dims that it has."""
    for node in graph.graph.nodes:
        if "shape" not in node.meta:
            continue
        layout = node.meta.get("layout")
        if layout is None or len(layout.dims) != len(node.meta["shape"]) or sorted(layout.axes) != sorted(mesh.names):
            raise _broken(f"%{node.name} has layout '{layout}' on mesh '{mesh}'", node, "each axis needs one placement")


def parameters_lie_where_they_are_used(graph: fx.GraphModule, mesh: MeshSpec) -> None:
    """What shards a parameter in compute shards it between steps in the same order, and outside of what is gathered."""
    for node in graph.graph.find_nodes(op="placeholder"):
        if "stored" not in node.meta:
            continue
        for kept, used in zip(node.meta["stored"].dims, node.meta["layout"].dims, strict=True):
            if kept[: len(used)] != used:
                raise _broken(
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
                raise _broken(what, node or second[position][1], "the second stands for all later ones")


def no_implicit_communication(graph: fx.GraphModule, mesh: MeshSpec) -> None:
    """Every operand has the layout that its op was given a row for; every result the contract's."""
    for node in [*_ops(graph), graph.graph.output_node()]:
        if "move" in node.meta or "data_axes" in node.meta:
            continue
        values, wanted = _tensors(node), node.meta.get("wanted", ())
        if len(values) != len(wanted):
            raise _broken(f"%{node.name} has layouts for {len(wanted)} of its {len(values)} operands", node, UNPLACED)
        for value, layout in zip(values, wanted, strict=True):
            here = value.meta.get("stored", value.meta["layout"])
            if not _agrees(here, layout, value.meta["grad"]):
                raise _broken(
                    f"%{node.name} takes %{value.name} as '{layout}', but it is '{here}'",
                    node,
                    "a conversion is missing on this edge",
                )
            if node.op == "output" and _head_tail(value):
                raise _broken(f"the result %{value.name} lies head–tail", node, "a conversion is missing on this edge")


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
            raise _broken(
                f"no conversion {move.source}→{move.target} is called {called}", node, "the table has no such row"
            )
        _check_arguments(node, row.name, move.source, move.target, move.axes)
        value = _tensor(node.args[0])
        if row == IN_ORDER and move.axes not in [(axis,) for axis in _head_tail(value)]:
            raise _broken(f"{row.name} of what does not lie head–tail on {', '.join(move.axes)}", node, ORDERED)
        before = value.meta["stored"] if "stored" in value.meta and node.meta["bucket"] else value.meta["layout"]
        after = node.meta["layout"]
        for axis in move.axes:
            if not _is(before.on(axis), move.source, value.meta["grad"]) or after.on(axis) != move.target:
                raise _broken(
                    f"{row.name} turns '{before}' into '{after}'",
                    node,
                    f"its row is {axis} {move.source}→{move.target}",
                )
        _check_minor(node, before, move.source, move.axes)
        _check_minor(node, after, move.target, move.axes)
        if before.without(move.axes) != after.without(move.axes):
            moved = ", ".join(move.axes)
            raise _broken(f"{row.name} turns '{before}' into '{after}'", node, f"it may change {moved} only")


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
        raise _broken(what, node, f"its row is {', '.join(axes)} {source}→{target}")


def _check_minor(node: fx.Node, layout: Layout, placement: Placement, axes: tuple[str, ...]) -> None:
    if placement.kind == "S":
        assert placement.dim is not None
        if layout.dims[placement.dim][-len(axes) :] != axes:
            what = f"{', '.join(axes)} is not the minor axis of dim {placement.dim} in '{layout}'"
            raise _broken(what, node, "parts of a dim can only be joined or cut from the inside")


def reductions_state_their_dtype(graph: fx.GraphModule, mesh: MeshSpec) -> None:
    """Each side that adds says in which dtype."""
    for node in _ops(graph):
        move = node.meta.get("move")
        if move is None:
            continue
        for side in ("forward", "backward"):
            dtype = node.meta.get(f"{side}_dtype")
            if getattr(move.conversion, side) in REDUCING and not isinstance(dtype, torch.dtype):
                raise _broken(f"{move.conversion.name} adds in no stated dtype {side}", node, "sums round by dtype")


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
            raise _broken(f"%{node.name} starts {node.target}, and {how}", node, UNWAITED, WAIT)


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
            raise _broken(f"{move.conversion.name} over {over} leaves ranks out", node, f"the mesh is '{mesh}'")


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
            raise _broken(f"%{node.name} exchanges samples of two halves", node, "they are not there at one time")
        allowed = {given[0]} if kept else deduce(node, signature(node), HALVES, given, [False] * len(given))
        if made not in allowed:
            raise _broken(f"%{node.name} is {made} in halves, but its operands make it {_any_of(allowed)}", node, RULE)
        sent = node.meta.get("sent")
        if sent is not None and (move is None or (sent == "once") != (made == R)):
            raise _broken(f"%{node.name} is sent by '{sent}', and is {made} in halves", node, "one half has one part")


HALVES = "halves"
"""What the two halves of a batch are called as an axis."""


# ---- the deduction -------------------------------------------------------------------------------------------------


def ops_are_legal(graph: fx.GraphModule, mesh: MeshSpec, signature: Callable[[fx.Node], Any]) -> None:
    """Deduce each op's output placement on each axis from its operands'; raise where the op is not legal on them."""
    for node in _ops(graph):
        if "move" in node.meta or "data_axes" in node.meta:
            continue
        name = str(getattr(node.target, "__name__", node.target))
        bound = None if name == "getitem" else signature(node)
        for axis in mesh.names:
            given = [v.meta["layout"].on(axis) for v in _tensors(node)]
            grads = [v.meta["grad"] for v in _tensors(node)]
            made = node.meta["layout"].on(axis)
            allowed = {given[0]} if bound is None else deduce(node, bound, axis, given, grads)
            one_whole = not (node.meta["grad"] and any(grads))  # without a gradient R and I are the same
            if made not in allowed and not (one_whole and made.whole and any(p.whole for p in allowed)):
                raise _broken(
                    f"%{node.name} is {made} on axis '{axis}', but its operands make it {_any_of(allowed)}", node,
                    f"operands: {', '.join(map(str, given))}", RULE,
                )  # fmt: skip


WRONG_GRADIENT = "an invariant operand mixed with another has the right value and a wrong gradient"
ONE_PARTIAL = "each term of a sum needs exactly one partial operand, where the op is linear"


def deduce(node: fx.Node, bound: Any, axis: str, given: list[Placement], grads: list[bool]) -> set[Placement]:
    """The output placements that an op may have: one, but dims that no operand has (of `arange`) may be born cut."""
    kinds = {p.kind for p, grad in zip(given, grads, strict=True) if grad}
    if "I" in kinds and kinds != {"I"}:
        raise _mix(node, given, axis, WRONG_GRADIENT)
    cuts: set[tuple[str, Size]] = set()
    for i, placement in enumerate(given):
        if placement.kind == "S":
            if placement.dim is None or not bound.operands[i][placement.dim]:
                raise _mix(node, given, axis, "an operand is sharded along a dim that the op broadcasts")
            cuts.add(_cut(node, bound, i, axis, given))
    if len(cuts) > 1 and {factor for factor, _ in cuts} == bound.together:
        return {_at_once(node, bound, axis, given)}
    if len(cuts) > 1:
        raise _mix(node, given, axis, "operands are sharded along dims that do not run together")
    for factor, major in cuts:
        return {_along(node, bound, axis, given, factor, major)}
    if any(p.kind == "P" for p in given):
        return {_partial(node, bound, axis, given)}
    known = {factor for dims in bound.operands for factors in dims for factor in factors}
    taken = node.meta.get("taken", {}).get(axis, {})
    born = {S(d) for d, dims in enumerate(bound.output) if dims and _uncut(bound, dims, taken) not in known}
    made = node.meta["layout"].on(axis)
    if made.within and S(made.dim) in born:
        born.add(made)  # no place in it is told from another
    return {I} if kinds == {"I"} else {R, *born}


def _cut(node: fx.Node, bound: Any, operand: int, axis: str, given: list[Placement]) -> tuple[str, Size]:
    """The factor that is cut in a dim of several, and within what part of it."""
    placement = given[operand]
    if kind_of(axis) not in HEAD_TAIL:
        return _leading(bound, operand, placement, node.meta.get("taken", {}).get(axis, {})), ONE
    within, before = Size.read(placement.within), ONE
    for factor in bound.operands[operand][placement.dim]:
        size = bound.sizes[factor]
        if before == within:
            return str(factor), ONE
        if before.gcd(within) == before and (rest := within // before) == rest.gcd(size) and rest != size:
            return str(factor), rest
        before = before * size
    raise _mix(node, given, axis, f"no factor of dim {placement.dim} begins within {within}")


def _at_once(node: fx.Node, bound: Any, axis: str, given: list[Placement]) -> Placement:
    """An algorithm that shards several factors needs each of them sharded wherever an operand has it."""
    for i, placement in enumerate(given):
        has = any(bound.together & set(factors) for factors in bound.operands[i])
        if has != (placement.kind == "S"):
            raise _mix(node, given, axis, "one operand is sharded along a dim, another that has the dim is not")
    return next(S(dim) for dim, factors in enumerate(bound.output) if bound.together & set(factors))


def _leading(bound: Any, operand: int, placement: Placement, taken: Mapping[str, int]) -> str:
    """The factor of an operand's dim that an axis cuts."""
    return _uncut(bound, bound.operands[operand][placement.dim], taken)


def _uncut(bound: Any, dims: tuple[str, ...], taken: Mapping[str, int]) -> str:
    """The factor that is cut in a dim of several: the first that is not yet cut to size 1 by major axes."""
    for factor in dims:
        size = bound.sizes[factor]
        if not size.constant or size.coefficient > taken.get(factor, 1):
            return str(factor)
    return str(dims[-1])


def _along(node: fx.Node, bound: Any, axis: str, given: list[Placement], factor: str, major: Size = ONE) -> Placement:
    if factor in bound.whole:
        raise _mix(node, given, axis, "the op acts along the sharded dim, which must be whole")
    if factor in bound.together and (bound.together != {factor} or kind_of(axis) not in HEAD_TAIL):
        raise _mix(node, given, axis, "the op needs an algorithm that shards all of its sequences")
    for i, placement in enumerate(given):
        has = any(factor in dim for dim in bound.operands[i])
        if has and placement.kind != "S":
            raise _mix(node, given, axis, "one operand is sharded along a dim, another that has the dim is not")
    for dim, factors in enumerate(bound.output):
        if factor in factors:
            if any(p.kind == "P" for p in given):
                raise _mix(node, given, axis, "partial and sharded operands do not mix here")
            if kind_of(axis) not in HEAD_TAIL:
                return S(dim)
            before = product(tuple(bound.sizes[f] for f in factors[: factors.index(factor)])) * major
            return S(dim, "" if before == ONE else str(before))
    if factor in bound.special:
        return I
    if bound.terms is None:
        raise _mix(node, given, axis, "a nonlinear op needs the sharded dim whole")
    for term in bound.terms:
        sharded = any(given[i].kind == "S" for i in term)
        partials = [i for i in term if given[i].kind == "P"]
        if not sharded and not partials:
            raise _mix(node, given, axis, f"the term that is not sharded would be counted once per {axis} rank")
        if (sharded and partials) or len(partials) > 1:
            raise _mix(node, given, axis, "a product of partial values is not the partial value of the product")
    return P()


def _partial(node: fx.Node, bound: Any, axis: str, given: list[Placement]) -> Placement:
    if bound.terms is None:
        raise _mix(node, given, axis, "a nonlinear op of a partial value is not the partial value of its result")
    for term in bound.terms:
        partials = [i for i in term if given[i].kind == "P"]
        if len(partials) != 1 or partials[0] not in bound.carriers:
            raise _mix(node, given, axis, ONE_PARTIAL)
    return next(p for p in given if p.kind == "P")


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


def _broken(what: str, node: fx.Node, why: str, tries: str = REPORT) -> CheckError:
    module, source = node.meta.get("module") or "", node.meta.get("source")
    return CheckError(what, node=f"%{node.name}   {module}".rstrip(), source=source, why=why, tries=tries)


def _mix(node: fx.Node, given: list[Placement], axis: str, why: str) -> CheckError:
    name = getattr(node.target, "__name__", str(node.target)).split(".")[0]
    return _broken(f"{name} cannot take {', '.join(map(str, given))} on axis '{axis}'", node, why, RULE)
