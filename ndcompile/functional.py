"""A graph without changes in place: each becomes a new value, which later uses of the changed tensor read.

A view is a name for memory of another tensor. Where memory changes, its base gets a new value (a part that was changed
through a view is scattered into the whole), and a view that is used later is taken again. A buffer's last value is one
more result of the graph, and is written to the buffer after the forward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from ndcompile import runtime
from ndcompile.batch_norm import lower_batch_norms
from ndcompile.build import Builder, stands_with
from ndcompile.errors import CompileError
from ndcompile.rules.registry import arguments, model_results, passes_gradients

aten = torch.ops.aten


def make_functional(graph: fx.GraphModule) -> None:
    """Afterwards no op changes a tensor, and `updates` of the output node names the buffers that got a new value.

    Their values are the last results of the graph. Reads `val` (what shares memory), `sizes`, `dtype`, `no_grad`. An
    input or a parameter may not be changed, nor a value that carries a gradient where none is recorded.
    """
    lower_batch_norms(graph)
    _write_masks(graph.graph)
    names = _Names(graph.graph)
    for node in list(graph.graph.nodes):
        names.visit(node)
    names.return_buffers()
    _refuse_returned_parameters(graph)
    for node in reversed(names.changes):
        graph.graph.erase_node(node)
    graph.graph.lint()
    graph.recompile()


def _write_masks(graph: fx.Graph) -> None:
    """`index_put(x, [mask], y)` of a new tensor is written as `x[mask] = y` is."""
    for node in graph.find_nodes(op="call_function", target=aten.index_put.default):
        before, indices, value, *rest = node.args
        if any(index is not None and index.meta["dtype"] == torch.bool for index in indices):
            with graph.inserting_before(node):
                written = _placed(Builder(graph, node), before, indices, value, *rest)
            written.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(written)
            graph.erase_node(node)


def _refuse_returned_parameters(graph: fx.GraphModule) -> None:
    for value in model_results(graph):
        if isinstance(value, fx.Node) and value.meta.get("role") in ("parameter", "buffer"):
            raise CompileError(
                f"forward returns {value.meta['role']} '{value.meta['name']}' itself",
                why="between steps each rank holds a part of it",
                tries="model.get_parameter(name), outside of forward",
            )


class _Names:
    """Which nodes are names of one memory, and which node has each name's value now."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.viewed: dict[fx.Node, fx.Node] = {}
        """A view → the name that it is a view of."""
        self.same: dict[fx.Node, fx.Node] = {}
        """The result of a change → the name that it changed."""
        self.versions: Counter[fx.Node] = Counter()
        """How often the memory of a base was changed."""
        self.now: dict[fx.Node, tuple[int, fx.Node]] = {}
        """A name → its value, and the version of its base for which it is one."""
        self.changes: list[fx.Node] = []

    def visit(self, node: fx.Node) -> None:
        """Let the node read present values; then note what it is a name of, or what it changes."""
        viewed = _viewed(node)
        values = {name: self._value(name, node) for name in node.all_input_nodes}
        if _is_change(node):
            self._change(node, values)
            return
        node.args = fx.node.map_arg(node.args, lambda name: values[name])
        node.kwargs = fx.node.map_arg(node.kwargs, lambda name: values[name])
        if viewed is not None and not self._taken_before(node, self._name(viewed)):
            self.viewed[node] = self._name(viewed)
        if node not in self.same:
            self._set(node, node)

    def _taken_before(self, node: fx.Node, viewed: fx.Node) -> bool:
        """Whether the view, of memory that was changed, is one that has a name: `x[i] += y` takes `x[i]` twice."""
        if not self.versions[self._base(viewed)]:
            return False
        for name, whole in self.viewed.items():
            if whole is viewed and _taken(name) == _taken(node):
                self.same[node] = name
                return True
        return False

    def return_buffers(self) -> None:
        """Make the last value of each changed buffer a result."""
        output, updates = self.graph.output_node(), dict[str, fx.Node]()
        for base in self.versions:
            value = self.now[base][1]
            if base.meta.get("role") == "buffer" and value is not base:
                updates[base.meta["name"]] = _stopped(self.graph, value)
        if updates:
            output.args = ((*output.args[0], *updates.values()),)  # type: ignore[misc]
        output.meta["updates"] = tuple(updates)

    def _name(self, node: fx.Node) -> fx.Node:
        return self.same.get(node, node)

    def _base(self, name: fx.Node) -> fx.Node:
        while name in self.viewed:
            name = self.viewed[name]
        return name

    def _buffer(self, name: fx.Node) -> str:
        """The buffer whose name it is, if it is none of a part."""
        return str(name.meta["name"]) if name.meta.get("role") == "buffer" else ""

    def _set(self, name: fx.Node, value: fx.Node) -> None:
        self.now[name] = (self.versions[self._base(name)], value)

    def _value(self, node: fx.Node, before: fx.Node) -> fx.Node:
        """The present value of a name; a view whose memory was changed is taken again."""
        name = self._name(node)
        version, value = self.now[name]
        if version != self.versions[self._base(name)]:
            whole = self._value(self.viewed[name], before)
            first = name.all_input_nodes[0]
            with self.graph.inserting_before(before):
                value = self.graph.node_copy(name, lambda n: whole if n is first else n)
            kept = {k: v for k, v in name.meta.items() if k not in ("place", "at")}
            value.meta = kept | stands_with(before, "again", name.meta.get("at"))
            self._set(name, value)
        return value

    def _change(self, node: fx.Node, values: dict[fx.Node, fx.Node]) -> None:
        name = self._name(_changed(node))
        self.same[node] = name
        self.changes.append(node)
        if node.target is aten.detach_.default and not carries(values[_changed(node)]):
            return
        self._refuse(node, name)
        build = Builder(self.graph, node)
        with self.graph.inserting_before(node):
            value = _new_value(build, node, values, self._buffer(name))
            if _plain(value) is _plain(values[_changed(node)]):
                return
            written = [(name, value)]
            while name in self.viewed:
                whole = self.viewed[name]
                value = _put(build, name, self._value(whole, node), value)
                name = whole
                written.append((name, value))
        self.versions[name] += 1
        for changed, new in written:
            self._set(changed, new)

    def _refuse(self, node: fx.Node, name: fx.Node) -> None:
        base, path = self._base(name), [name]
        while path[-1] in self.viewed:
            path.append(self.viewed[path[-1]])
        role = base.meta.get("role")
        if role == "buffer":
            return
        if role is not None:
            raise _error(
                f"forward changes {role} '{base.meta['name']}' in place",
                node,
                "what the caller holds would change on some ranks, or in parts",
                "the change on a copy: x = x.clone()",
            )
        if base.target is runtime.literal:
            raise _error(
                "forward changes a tensor in place that is no buffer",
                node,
                "its values are written into the program, the same for every call",
                "register_buffer(name, tensor)",
            )
        hidden = node.meta.get("no_grad") or any(view.target is aten.detach.default for view in path)
        if hidden and not base.meta.get("no_grad") and base.meta["dtype"].is_floating_point:
            raise _error(
                f"{node.target} changes a value in place where no gradient is recorded",
                node,
                "the value's own gradient would go on as if it had not been changed",
                "the same without in-place: y = f(x)",
            )


def _taken(view: fx.Node) -> tuple[Any, ...]:
    """How and in which block a view is taken: two blocks do not share one, so that equal blocks stay equal."""
    return view.target, view.args[1:], view.kwargs, view.meta.get("place")


def _error(what: str, node: fx.Node, why: str, tries: str) -> CompileError:
    shown = f"%{node.name}   {node.meta['module']}".rstrip()
    return CompileError(what, node=shown, source=node.meta["source"], why=why, tries=tries)


def _is_change(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _changed(node: fx.Node) -> fx.Node:
    """The one operand that an op changes."""
    target: Any = node.target
    written = [a.name for a in target._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    changed = arguments(node)[written[0]]
    if len(written) > 1 or not isinstance(changed, fx.Node):
        raise _error(f"{target} changes several tensors in place", node, SHARED, "the same without in-place: y = f(x)")
    return changed


SHARED = "every other name of the tensor would have to change too"


def mark_views(graph: fx.GraphModule) -> None:
    """Set `views` of each op: the place among its arguments of the one that its result shares memory with, or None.

    While the traced values are at hand: a copy of a traced block has those of the block, not of its own arguments.
    """
    for node in graph.graph.nodes:
        if node.op == "call_function":
            viewed, given = _traced_view(node), _given(node)
            node.meta["views"] = None if viewed is None else given.index(viewed)


def _given(node: fx.Node) -> list[fx.Node]:
    return [v for v in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(v, fx.Node)]


def _viewed(node: fx.Node) -> fx.Node | None:
    """The operand that the node's result shares memory with."""
    if "views" not in node.meta:
        return _traced_view(node)
    place = node.meta["views"]
    return None if place is None else _given(node)[place]


def _traced_view(node: fx.Node) -> fx.Node | None:
    """As the traced values show it; dropout that drops nothing returns its input, which they do not show."""
    if node.target is aten.dropout.default and not (node.args[2] and node.args[1]):
        return node.all_input_nodes[0]
    mine = _storage(node)
    if mine is None or node.op != "call_function":
        return None
    return next((operand for operand in node.all_input_nodes if _storage(operand) == mine), None)


def _storage(node: fx.Node) -> int | None:
    """Which memory the traced value has; none of its own if it is several values in several memories."""
    value = node.meta.get("val")
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    found = {StorageWeakRef(v.untyped_storage()).cdata for v in values if isinstance(v, Tensor)}
    return found.pop() if len(found) == 1 else None


def _stopped(graph: fx.Graph, value: fx.Node) -> fx.Node:
    """The value without a gradient: a buffer carries none to the next step."""
    if value.op == "placeholder" or not carries(value):
        return value
    with graph.inserting_after(value):
        return Builder(graph, value)(aten.detach.default, value, sizes=value.meta["sizes"], dtype=value.meta["dtype"])


def _plain(value: fx.Node) -> fx.Node:
    """The value without what stops a gradient that it does not carry."""
    while value.target is aten.detach.default and not carries(value.all_input_nodes[0]):
        value = value.all_input_nodes[0]
    return value


def carries(value: fx.Node) -> bool:
    """Whether a gradient flows from the value to a parameter or an input."""
    pending, seen = [value], {value}
    while pending:
        node = pending.pop()
        if node.op == "placeholder" and node.meta.get("grad"):
            return True
        if passes_gradients(node):
            pending += [n for n in node.all_input_nodes if n not in seen]
            seen.update(node.all_input_nodes)
    return False


# ---- a change as a value -------------------------------------------------------------------------------------------


def _new_value(build: Builder, node: fx.Node, values: dict[fx.Node, fx.Node], buffer: str) -> fx.Node:
    """What the changed tensor is after the op; that of a buffer is called as the buffer."""
    before = values[_changed(node)]
    sizes, dtype = before.meta["sizes"], before.meta["dtype"]
    given: Any = fx.node.map_arg((node.args, node.kwargs), lambda name: values[name])
    args, kwargs = given
    write = WRITES.get(node.target)
    value = write(build, *args, **kwargs) if write else build(_counterpart(node), *args, sizes=sizes, **kwargs)
    value = build.cast(value, dtype)
    if buffer and value.op == "call_function":
        value.meta["called"] = buffer.rpartition(".")[2]
    if node.meta.get("no_grad") and carries(value):
        value = build(aten.detach.default, value, sizes=sizes, dtype=dtype)
    return value


def _counterpart(node: fx.Node) -> Any:
    """The op that gives the new value: `aten.add.Tensor` of `aten.add_.Tensor`."""
    target: Any = node.target
    name = str(target.overloadpacket).split(".")[-1]
    name = f"__{name[3:]}" if name.startswith("__i") else name.removesuffix("_")
    found = _taking_the_same(getattr(aten, name, None), target)
    resized = torch.Tag.inplace_view in target.tags
    if found is None or resized or found._schema.is_mutable or not str(target).startswith("aten."):
        raise _error(f"{target} has no counterpart that returns a new tensor", node, SHARED, "y = f(x)")
    return found


def _taking_the_same(packet: Any, target: Any) -> Any:
    """The overload that takes what an op takes, which may be called otherwise: `pow.Tensor_Scalar` of `pow_.Scalar`."""
    wanted = [str(argument.type) for argument in target._schema.arguments]
    overloads = [getattr(packet, name) for name in packet.overloads()] if packet is not None else []
    return next((o for o in overloads if [str(a.type) for a in o._schema.arguments] == wanted), None)


def _copied(build: Builder, before: fx.Node, source: fx.Node, non_blocking: bool = False) -> fx.Node:
    return build.expand(build.cast(source, before.meta["dtype"]), before.meta["sizes"])


def _filled(build: Builder, before: fx.Node, value: Any = 0) -> fx.Node:
    """The same number everywhere; a number in a tensor is cast and broadcast."""
    if isinstance(value, fx.Node):
        return _copied(build, before, value)
    return build.full(before.meta["sizes"], value, before.meta["dtype"])


def _drawn(target: Any, *defaults: float) -> Callable[..., fx.Node]:
    """By an op of another name, or without defaults."""

    def write(build: Builder, before: fx.Node, *given: Any, **kwargs: Any) -> fx.Node:
        about = dict(sizes=before.meta["sizes"], dtype=before.meta["dtype"])
        return build(target, before, *given, *defaults[len(given) :], **about, **kwargs)

    return write


def _placed(build: Builder, before: fx.Node, indices: Any, value: fx.Node, accumulate: bool = False) -> fx.Node:
    """`x[mask] = 0` is `where(mask, 0, x)`; anything else a mask would place has a size that values decide."""
    sizes, dtype = before.meta["sizes"], before.meta["dtype"]
    masks = [index for index in indices if index is not None and index.meta["dtype"] == torch.bool]
    if not masks:
        return build(aten.index_put.default, before, indices, value, accumulate, sizes=sizes, dtype=dtype)
    mask = masks[0]
    if len(indices) > 1 or accumulate or value.meta["sizes"] not in ((), (1,)):
        raise _error(
            "a mask says where several values go",
            build.origin,
            "which value goes where depends on the whole mask, of which a rank may hold a part",
            "torch.where(mask, y, x)",
        )
    aligned = (*mask.meta["sizes"], *[1] * (len(sizes) - len(mask.meta["sizes"])))
    if aligned != mask.meta["sizes"]:
        listed = [build.number(n) for n in aligned]
        mask = build(aten.reshape.default, mask, listed, sizes=aligned, dtype=torch.bool)
    return build(aten.where.self, mask, build.cast(value, dtype), before, sizes=sizes, dtype=dtype)


WRITES: dict[Any, Callable[..., fx.Node]] = {
    aten.copy_.default: _copied,
    aten.fill_.Scalar: _filled,
    aten.fill_.Tensor: _filled,
    aten.zero_.default: _filled,
    aten.normal_.default: _drawn(aten.normal_functional.default, 0.0, 1.0),
    aten.bernoulli_.float: _drawn(aten.bernoulli.p, 0.5),
    aten.index_put_.default: _placed,
}
"""Changes that are more than another op of the same name."""


# ---- a changed view in its whole -----------------------------------------------------------------------------------


def _put(build: Builder, view: fx.Node, whole: fx.Node, part: fx.Node) -> fx.Node:
    """The whole, with the part that a view names exchanged."""
    put = PUTS.get(view.target)
    kept = view.target in KEPT and part.meta["sizes"] == whole.meta["sizes"]
    if put is None and not kept:
        raise _error(
            f"a view by {view.target} is changed in place",
            build.origin,
            "there is no op that puts such a part back into the whole",
            "the same without in-place: y = f(x)",
        )
    return part if put is None else put(build, view, whole, part)


def _put_slice(build: Builder, view: fx.Node, whole: fx.Node, part: fx.Node) -> fx.Node:
    given = arguments(view)
    if view.meta["sizes"] == whole.meta["sizes"] and given["step"] == 1:
        return part
    start, end, step = given["start"], given["end"], given["step"]
    place = [given["dim"], start, None if isinstance(end, int) and end >= 1 << 62 else end, step]
    if step == 1:
        place = place[:2] if place[2] is None else place[:3]
    return _scattered(build, aten.slice_scatter.default, whole, part, *place)


def _put_narrow(build: Builder, view: fx.Node, whole: fx.Node, part: fx.Node) -> fx.Node:
    given = arguments(view)
    start, length = given["start"], given["length"]
    if not isinstance(start, int) or not isinstance(length, int):
        raise _error("a narrowed view of a symbolic length is changed in place", build.origin, SHARED, "a slice")
    return _scattered(build, aten.slice_scatter.default, whole, part, given["dim"], start, start + length)


def _put_select(build: Builder, view: fx.Node, whole: fx.Node, part: fx.Node) -> fx.Node:
    given = arguments(view)
    return _scattered(build, aten.select_scatter.default, whole, part, given["dim"], given["index"])


def _put_reshaped(build: Builder, view: fx.Node, whole: fx.Node, part: fx.Node) -> fx.Node:
    sizes = whole.meta["sizes"]
    return build(aten.reshape.default, part, [build.number(n) for n in sizes], sizes=sizes, dtype=part.meta["dtype"])


def _put_turned(build: Builder, view: fx.Node, whole: fx.Node, part: fx.Node) -> fx.Node:
    rank = len(whole.meta["sizes"])
    order = list(range(rank))
    given = arguments(view)
    if "dims" in given:
        order = [d % rank for d in given["dims"]]
    else:
        one, two = given.get("dim0", 0) % rank, given.get("dim1", rank - 1) % rank
        order[one], order[two] = order[two], order[one]
    back = [order.index(d) for d in range(rank)]
    return build(aten.permute.default, part, back, sizes=whole.meta["sizes"], dtype=part.meta["dtype"])


def _scattered(build: Builder, target: Any, whole: fx.Node, part: fx.Node, *place: Any) -> fx.Node:
    return build(target, whole, part, *place, sizes=whole.meta["sizes"], dtype=whole.meta["dtype"])


PUTS: dict[Any, Callable[[Builder, fx.Node, fx.Node, fx.Node], fx.Node]] = {
    aten.slice.Tensor: _put_slice,
    aten.narrow.default: _put_narrow,
    aten.select.int: _put_select,
    **dict.fromkeys(
        [aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten.unflatten.int, aten.squeeze.default],
        _put_reshaped,
    ),
    **dict.fromkeys([aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default], _put_reshaped),
    **dict.fromkeys((aten.transpose.int, aten.t.default, aten.permute.default), _put_turned),
}
"""How the part that a view names goes back."""

KEPT = frozenset(
    {aten.alias.default, aten.contiguous.default, aten.detach.default, aten.dropout.default, aten.expand.default}
    | {aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten.to.other, aten.type_as.default}
)
"""Views that are the whole, where they keep its sizes."""
