"""Say which blocks compute two halves of their batch in turn, what is cut, and where the other half goes on."""

from __future__ import annotations

from torch import fx

from ndcompile.axes import data_axes
from ndcompile.codegen.names import block_range
from ndcompile.codegen.segments import Segment, batch_dim, segments
from ndcompile.errors import CompileError
from ndcompile.mesh import MeshSpec
from ndcompile.passes.mark_recomputed import MADE_BY
from ndcompile.placement import COLLECTIVES, Placement, R, S
from ndcompile.rules.registry import BY_INDEX, op_name, operands, signature
from ndcompile.rules.rows import rows

Cuts = dict[fx.Node, int | None]
"""On which dim each value is cut in halves; None: both halves have all of it."""


class Whole(Exception):
    """Why a block stays whole, and at which node."""

    def __init__(self, why: str, node: fx.Node) -> None:
        super().__init__(why)
        self.why, self.node = why, node

    def __str__(self) -> str:
        source = (self.node.meta.get("source") or "").split("   ")[0]
        return f"{self.why} (%{self.node.name}{', ' + source if source else ''})"


def cut_in_halves(graph: fx.GraphModule, mesh: MeshSpec, required: bool = True) -> fx.GraphModule:
    """Set on the nodes of blocks whose samples do not meet: `cut`, the dim on which the value is cut in halves (None:
    both halves have it); `sent`, of conversions: "start" where they travel while the other half computes, "once" where
    both halves have the value; `turn`, where the other half goes on though nothing is sent.

    The halves are one more axis, on which a value is `S` or `R` and nothing is converted: the rules that place values
    on the mesh say whether an op may take them so. `whole` on the graph's output has the other blocks, each with the
    reason. Raises `CompileError` if no block can be cut, unless it is not `required`. Reads `layout` and `segment`.
    """
    found: dict[int | None, tuple[list[str], Whole | None]] = {}
    blocks = [segment for segment in segments(graph) if segment.block]
    cuts: list[tuple[Segment, Cuts]] = []
    for segment in blocks:
        names, why = found.setdefault(segment.kind, ([], None))
        names += segment.blocks
        try:
            cuts.append((segment, _cut(segment, mesh)))
        except Whole as reason:
            found[segment.kind] = names, why or reason
    halved = [(segment, cut) for segment, cut in cuts if found[segment.kind][1] is None]
    if required and not halved:
        raise _nothing([why for _, why in found.values() if why])
    for segment, cut in halved:
        _mark(segment, cut, mesh)
    graph.graph.output_node().meta["whole"] = {
        block_range(list(dict.fromkeys(names))): str(why) for names, why in found.values() if why
    }
    return graph


def _nothing(reasons: list[Whole]) -> CompileError:
    if not reasons:
        return CompileError(
            "halves=True, and the model has no blocks",
            why="a block is a child of an nn.ModuleList, and what is computed in halves is a block",
            tries="halves=False",
        )
    first = reasons[0]
    return CompileError(
        "halves=True, and no block can be computed in halves",
        node=f"%{first.node.name}   {first.node.meta.get('module') or ''}".rstrip(),
        source=first.node.meta.get("source"),
        why=first.why,
        tries="halves=False",
    )


def _cut(segment: Segment, mesh: MeshSpec) -> Cuts:
    """How each value of a block is cut, op by op. Raises `Whole`."""
    cuts: Cuts = {entry.node: None for entry in segment.entries}
    inner = {value: port for port, value in segment.ports.items()}
    for value in segment.inputs:
        cuts[value] = cuts[inner.get(value, value)] = _of_input(value, segment.nodes[0])
    for node in segment.nodes:
        cuts[node] = _of_op(node, cuts, mesh)
        _require_batch(node, cuts[node], mesh)
    if not any(_starts(node, cuts, mesh) for node in segment.nodes):
        raise Whole("no collective of parts of the batch stands between its ops", segment.nodes[-1])
    return cuts


def _of_input(value: fx.Node, user: fx.Node) -> int | None:
    dim = batch_dim(value)
    if dim is None and _with_batch(value):
        raise Whole("an input has the batch in no dim by itself, or in two", user)
    return dim


def _with_batch(node: fx.Node) -> list[int]:
    """The dims whose size depends on the batch."""
    return [d for d, size in enumerate(node.meta["sizes"]) if has_batch(size)]


def has_batch(size: object) -> bool:
    return any(str(symbol) == "b" for symbol in getattr(size, "free_symbols", ()))


def _require_batch(node: fx.Node, dim: int | None, mesh: MeshSpec) -> None:
    """A value is cut where the batch is, and nowhere else; of the mesh's axes only those of the batch cut it too."""
    layout = node.meta["layout"]
    if _with_batch(node) != ([] if dim is None else [dim]):
        raise Whole("samples meet: a result has the batch in another dim than its operands, or in two", node)
    if dim is not None and tuple(a for a in layout.dims[dim] if not layout.on(a).within) != data_axes(mesh):
        raise Whole("the batch is not only cut by data-parallel axes", node)


FILLED = ("aten.ones.default", "aten.zeros.default", "aten.full.default")
SHAPED = (
    "aten.view.default", "aten.reshape.default", "aten._unsafe_view.default", "aten.flatten.using_ints",
    "aten.unflatten.int", "aten.expand.default", *FILLED,
)  # fmt: skip
"""Ops that may be given the batch's size: it is the size of their result. What is filled is alike in all places."""


def _of_op(node: fx.Node, cuts: Cuts, mesh: MeshSpec) -> int | None:
    name, given = op_name(node.target), operands(node)
    if name in BY_INDEX:
        raise Whole("random numbers are drawn by each element's place in the whole batch", node)
    if node.meta.get("how") or node.meta.get("algorithm_axes"):
        raise Whole("an op communicates by itself", node)
    if "move" in node.meta:
        return _of_conversion(node, cuts[given[0]])
    if "data_axes" in node.meta or name == "_operator.getitem":
        return cuts[given[0]]
    if not given and _with_batch(node) and name not in FILLED:
        raise Whole("places in the batch are counted", node)
    if name not in SHAPED and any(_is_batch(n) for n in node.all_input_nodes if "shape" not in n.meta):
        raise Whole("the size of the batch is used as a number", node)
    return _by_rule(node, tuple(_placement(cuts[value]) for value in given))


def _is_batch(number: fx.Node) -> bool:
    """Whether a number of the graph depends on the batch's size."""
    if "of" in number.meta:
        of, dims = number.meta["of"]
        return any(has_batch(of.meta["sizes"][dim]) for dim in dims)
    return has_batch(number.meta.get("size"))


def _by_rule(node: fx.Node, given: tuple[Placement, ...]) -> int | None:
    """The dim of the result, by a row of the op's rule on the axis of the halves."""
    listed = rows(signature(node), 1, grads=[False] * len(given))
    made = [row.output for row in listed if row.operands == given]
    there = _with_batch(node)
    wanted = _placement(there[0] if there else None)
    if wanted in made:
        return wanted.dim
    if any(output.kind == "P" for output in made):
        raise Whole("samples meet: an op adds over the batch", node)
    raise Whole("samples meet: an op cannot take its operands in halves", node)


def _placement(dim: int | None) -> Placement:
    return R if dim is None else S(dim)


def _of_conversion(node: fx.Node, dim: int | None) -> int | None:
    move = node.meta["move"]
    if dim is not None and dim in (move.source.dim, move.target.dim):
        raise Whole("a collective works along the batch", node)
    return dim


def _sides(node: fx.Node) -> set[str]:
    row = node.meta["move"].conversion
    return {row.forward, *([row.backward] if node.meta["grad"] else [])}


def _starts(node: fx.Node, cuts: Cuts, mesh: MeshSpec) -> bool:
    """Whether a conversion is sent beside the other half: of even parts in rank order, by a sum if by a reduction."""
    if "move" not in node.meta or cuts[node] is None or not _sides(node) & COLLECTIVES:
        return False
    target = node.kwargs.get("target")
    layout, shape = node.args[0].meta["layout"], node.meta["shape"]  # type: ignore[union-attr]
    even = not isinstance(target, int) or shape[target].divides_by(
        mesh.size(*layout.dims[target], *node.meta["move"].axes)
    )
    return even and node.kwargs.keys() <= {"dim", "source", "target"}


def _mark(segment: Segment, cuts: Cuts, mesh: MeshSpec) -> None:
    for node in (*segment.ports, *segment.nodes):
        node.meta |= dict(halved=True, cut=cuts[node])
    started = [node for node in segment.nodes if _starts(node, cuts, mesh)]
    for node in segment.nodes:
        if "move" in node.meta and _sides(node) & COLLECTIVES and cuts[node] is None:
            node.meta["sent"] = "once"
    for node in started:
        node.meta["sent"] = "start"
    before = 0
    for node in started:
        _give_turn(segment.nodes[before:], node)
        before = segment.nodes.index(node) + 1


def _give_turn(nodes: list[fx.Node], sent: fx.Node) -> None:
    """Before the last product that makes what is reduced, if others stand before it since the last turn: so the other
    half can send what it has waited for, and the last product covers that.
    """
    made = _maker(sent)
    if made in nodes and any(_is_product(node) for node in nodes[: nodes.index(made)]):
        made.meta["turn"] = True


def _maker(sent: fx.Node) -> fx.Node | None:
    """The op whose result is partial, of operands cut in halves that are not."""
    move = sent.meta["move"]
    if move.source.kind != "P":
        return None
    value = sent
    while partial := [v for v in operands(value) if v.meta.get("cut") is not None and _partial(v, move.axes[0])]:
        value = partial[-1]
    return None if "move" in value.meta else value


def _partial(value: fx.Node, axis: str) -> bool:
    return bool(value.meta["layout"].on(axis).kind == "P")


def _is_product(node: fx.Node) -> bool:
    base = op_name(node.target).removeprefix("aten._")
    return any(base == made or base.startswith((made + ".", made + "_")) for ops in MADE_BY.values() for made in ops)
