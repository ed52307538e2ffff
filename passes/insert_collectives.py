"""Put a conversion on each edge whose two ends disagree on a layout."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import sympy
import torch
from torch import fx

from ndcompile import runtime
from ndcompile.axes import KINDS, data_axes
from ndcompile.build import Builder
from ndcompile.fold import in_run
from ndcompile.mesh import GATHERED, MeshAxis, MeshSpec
from ndcompile.placement import IN_ORDER, I, Layout, Placement, R, S
from ndcompile.precision import Precision
from ndcompile.route import Move, route
from ndcompile.rules.registry import operands, results
from ndcompile.size import Size
from ndcompile.units import units_of


def insert_collectives(graph: fx.GraphModule, mesh: MeshSpec, precision: Precision) -> fx.GraphModule:
    """Convert each value from its layout to the one that a use wants, once for all uses in a segment.

    A parameter's way from where it lies to where compute takes it (`S→R`, `I→R`) is marked `bucket`: a segment's are
    one collective an axis. Each conversion says in which dtype each side communicates. Reads `layout`, `stored` and
    `wanted`. Afterwards `no_implicit_communication` holds.
    """
    inserter = _Inserter(graph, mesh, precision)
    for node in list(graph.graph.nodes):
        if node.op == "call_function" and "shape" in node.meta:
            _convert_operands(inserter, node)
    _convert_results(inserter, graph)
    graph.graph.lint()
    graph.recompile()
    return graph


@dataclass
class _Inserter:
    graph: fx.GraphModule
    mesh: MeshSpec
    precision: Precision
    made: dict[Any, fx.Node] = field(default_factory=dict)

    @property
    def sizes(self) -> dict[str, int]:
        return {axis.name: axis.size for axis in self.mesh.axes}

    @cached_property
    def units(self) -> dict[str, Size]:
        return units_of(self.graph, self.mesh)

    def converted(self, value: fx.Node, wanted: Layout, before: fx.Node) -> fx.Node:
        """The value in layout `wanted`, by nodes that stand before `before`'s segment first needs them."""
        if value.meta.get("role") == "parameter":
            value = self._entered(value, wanted, before)
        here = value.meta["layout"]
        if same(here, wanted, value.meta["grad"]):
            return value
        segment = _segment(value, before)
        key = (value, wanted, segment["segment"])
        if key not in self.made and (here.within or wanted.within):
            self.made[key] = self._apart(value, wanted, before, segment)
        elif key not in self.made:
            moves = route(here, wanted, self.sizes, value.meta["nbytes"], value.meta["grad"])
            self.made[key] = self._chain(value, moves, before, bucket=False)
            for node in _chain_of(self.made[key], value):
                node.meta |= segment
        return self.made[key]

    def _apart(self, value: fx.Node, wanted: Layout, before: fx.Node, segment: dict[str, Any]) -> fx.Node:
        """The value in another layout by a view in which the sequence that its dim joins is a dim of its own."""
        here = value.meta["layout"]
        [(axis, size)] = {*here.within, *wanted.within}
        dim = next(d for d, axes in enumerate((here if here.on(axis).within else wanted).dims) if axis in axes)
        major = self._global(size)
        sizes = value.meta["sizes"]
        apart = (*sizes[:dim], major, sympy.cancel(sizes[dim] / major), *sizes[dim + 1 :])
        view = self._view(value, apart, split(here, dim), before, segment)
        there = self.converted(view, split(wanted, dim), before)
        return self._view(there, sizes, wanted, before, segment)

    def _global(self, within: str) -> Any:
        """The size that a layout names, as a global one: its symbols are parts of the lengths (`units_of`)."""
        size = Size.read(within)
        symbols = [sympy.Symbol(name, positive=True, integer=True) for name in size.symbols]
        parts = math.prod(self.units[name].coefficient for name in size.symbols if name in self.units)
        return sympy.Rational(size.coefficient, parts) * sympy.prod(symbols)

    def _view(
        self, value: fx.Node, sizes: tuple[Any, ...], layout: Layout, before: fx.Node, segment: dict[str, Any]
    ) -> fx.Node:
        build = Builder(self.graph.graph, before)
        with self.graph.graph.inserting_before(before):
            listed = [build.number(size) for size in sizes]
            node = build(torch.ops.aten.reshape.default, value, listed, sizes=sizes, dtype=value.meta["dtype"])
        node.meta |= {k: value.meta[k] for k in ("nbytes", "grad")} | segment
        shape = tuple(Size.of(n, self.units) for n in sizes)
        node.meta |= dict(shape=shape, layout=layout, wanted=(value.meta["layout"],))
        return node

    def _entered(self, value: fx.Node, wanted: Layout, before: fx.Node) -> fx.Node:
        """The parameter as the segment's bucket gives it: gathered, and `R` where the use is and no shard is."""
        moves, layout = [], value.meta["stored"]
        for axis in reversed([a for a in self.mesh.names if self.mesh[a].kind in GATHERED]):
            if layout.on(axis) != R:
                moves.append(Move((axis,), layout.on(axis), R))
                layout = layout.replace(axis, R)
        for axis in self.mesh.names:
            if layout.on(axis) == I and wanted.on(axis) == R:
                moves.append(Move((axis,), I, R))
                layout = layout.replace(axis, R)
        key = (value, layout, before.meta["segment"], "bucket")
        if key not in self.made:
            start = self._chain(value, tuple(moves), before, bucket=True, layout=value.meta["stored"])
            self.made[key] = start
        return self.made[key]

    def in_order(self, value: fx.Node, before: fx.Node) -> fx.Node:
        """A result of which each rank holds one part, where it holds two chunks, head–tail."""
        layout = value.meta["layout"]
        for dim, axes in enumerate(layout.dims):
            for axis in axes:
                if _balanced(value, dim, (axis,), self.mesh):
                    start = value
                    inner, whole = axes[axes.index(axis) + 1 :], I if value.meta["grad"] else R
                    aside = [Move((a,), S(dim), whole) for a in reversed(inner)]
                    back = [Move((a,), whole, S(dim)) for a in inner]
                    turn = Move((axis,), S(dim), S(dim))
                    value = self._chain(value, (*aside, turn, *back), before, bucket=False)
                    for node in _chain_of(value, start):
                        node.meta |= {k: before.meta.get(k) for k in PLACE}
        return value

    def _chain(
        self,
        value: fx.Node,
        moves: tuple[Move, ...],
        before: fx.Node,
        bucket: bool,
        layout: Layout | None = None,
    ) -> fx.Node:
        layout = layout or value.meta["layout"]
        with self.graph.graph.inserting_before(before):
            for move in moves if bucket else one_by_one(moves, value, self.mesh):
                arguments = _arguments(value, move, layout, self.mesh)
                node = self.graph.graph.call_function(getattr(runtime, move.conversion.name), *arguments)
                layout = move.apply(layout)
                node.meta = _meta(value, before, move, layout, bucket, self.precision)
                value = node
        return value


def split(layout: Layout, dim: int) -> Layout:
    """The layout of a view in which what is minor in a dim is the next one."""
    dims, inner = layout.dims, {axis for axis, _ in layout.within}
    own = tuple(a for a in dims[dim] if a not in inner), tuple(a for a in dims[dim] if a in inner)
    return Layout((*dims[:dim], *own, *dims[dim + 1 :]), layout.rest)


def _segment(value: fx.Node, before: fx.Node) -> dict[str, Any]:
    """Where a conversion stands: with its user; before a block's port, on the root's side of the border."""
    if not before.meta.get("port"):
        return {k: before.meta.get(k) for k in PLACE}
    if value.meta.get("block") == "" and not in_run(value):
        return {k: value.meta.get(k) for k in PLACE}
    return dict(segment=before.meta["segment"] - 0.5, block="", kind=None, place=before.meta.get("place"))


PLACE = ("segment", "block", "kind", "place")


def one_by_one(moves: tuple[Move, ...], value: fx.Node, mesh: MeshSpec) -> Iterator[Move]:
    """The same moves, but an axis on which a dim lies head–tail moves by itself: the last in first out."""
    for move in moves:
        dims = [p.dim for p in (move.source, move.target) if p.dim is not None]
        if any(_balanced(value, dim, (axis,), mesh) for axis in move.axes for dim in dims):
            leaving = move.source.kind == "S"
            yield from (Move((axis,), move.source, move.target) for axis in (move.axes[::-1] if leaving else move.axes))
        else:
            yield move


def _balanced(value: fx.Node, dim: int, axes: tuple[str, ...], mesh: MeshSpec) -> bool:
    """Whether the dim lies head–tail on the axes: a sequence, over the axis of a kind that shards those."""
    return KINDS[mesh[axes[0]].kind].attends and not value.meta["shape"][dim].constant


def _chain_of(last: fx.Node, start: fx.Node) -> list[fx.Node]:
    found = []
    while last is not start:
        found.append(last)
        last = last.all_input_nodes[0]
    return found


def same(here: Layout, there: Layout, grad: bool) -> bool:
    """Equal layouts; without a gradient both replicated placements are one."""
    if grad or here.dims != there.dims:
        return here == there
    rest = dict(there.rest)
    return all(p == rest[a] or (p.whole and rest[a].whole) for a, p in here.rest)


def _arguments(value: fx.Node, move: Move, layout: Layout, mesh: MeshSpec) -> tuple[tuple[Any, ...], dict[str, Any]]:
    axis = MeshAxis(move.axes)
    source, target = move.source, move.target
    if move.conversion == IN_ORDER:
        return (value, axis), dict(dim=source.dim)
    if source.dim is not None and target.dim is not None:
        orders = dict(balanced=source.dim, balanced_target=target.dim)
        given = {name: True for name, d in orders.items() if _balanced(value, d, move.axes, mesh)}
        return (value, axis), dict(source=source.dim, target=target.dim, **given)
    if source.kind == "P" and source.op != "sum":
        return (value, axis), dict(op=source.op)
    dim = source.dim if source.kind == "S" else target.dim
    if dim is None:
        return (value, axis), {}
    others = mesh.size(*(a for a in layout.dims[dim] if a not in move.axes))
    size = value.meta["shape"][dim]
    if size.divides_by(others * mesh.size(*move.axes)):
        balanced = _balanced(value, dim, move.axes, mesh)
        return (value, axis), dict(dim=dim) | (dict(balanced=True) if balanced else {})
    assert size.divides_by(others), "only one axis may cut a dim unevenly"
    return (value, axis), dict(dim=dim, size=size.coefficient // others)


KEPT = ("shape", "sizes", "nbytes", "dtype", "grad")


def _meta(
    value: fx.Node, before: fx.Node, move: Move, layout: Layout, bucket: bool, precision: Precision
) -> dict[str, Any]:
    meta = {k: value.meta[k] for k in KEPT}
    meta |= {k: before.meta.get(k) for k in PLACE}
    meta |= {k: before.meta.get(k) or value.meta.get(k) for k in ("module", "source")}
    dtype: torch.dtype = value.meta["dtype"]
    reduced = (precision.reduce or dtype) if bucket else dtype
    backward = reduced if move.conversion.backward in ("all_reduce", "reduce_scatter") else dtype
    name = value.meta.get("parameter") or (value.meta["name"] if value.meta.get("role") == "parameter" else None)
    natural = move.conversion == IN_ORDER or value.meta.get("natural", False)
    return meta | dict(
        natural=natural,
        layout=layout,
        move=move,
        bucket=bucket,
        parameter=name,
        forward_dtype=dtype,
        backward_dtype=backward,
    )


def _convert_operands(inserter: _Inserter, node: fx.Node) -> None:
    """Each operand as the node wants it there; `x @ x.T` as an einsum takes one value twice, in two layouts."""
    pairs = list(zip(operands(node), node.meta["wanted"], strict=True))
    new = {pair: inserter.converted(*pair, node) for pair in dict.fromkeys(pairs)}
    taken = iter(new[pair] for pair in pairs)

    def exchange(value: fx.Node) -> fx.Node:
        return next(taken) if "shape" in value.meta else value

    node.args = fx.node.map_arg(node.args, exchange)
    node.kwargs = fx.node.map_arg(node.kwargs, exchange)


def _convert_results(inserter: _Inserter, graph: fx.GraphModule) -> None:
    """Results in the layouts of the contract; one sharded on its batch takes outside gradients as a mean of ranks."""
    output, mesh = graph.graph.output_node(), inserter.mesh
    cut = [n for n in graph.graph.nodes if n.meta.get("segment") is not None]
    ends = {n.meta["segment"]: bool(n.meta["block"]) or in_run(n) for n in cut}
    last = max(ends, default=0)
    last += 0.5 if ends.get(last) else 0  # a block or a run at the end is left before its results are converted
    output.meta |= dict(segment=last, block="", kind=None, module="", source=None)
    data = data_axes(mesh)
    layouts = iter(output.meta["wanted"])
    converted: list[Any] = []
    for value in results(graph):
        if not isinstance(value, fx.Node):
            converted.append(value)
            continue
        new = inserter.in_order(inserter.converted(value, next(layouts), output), output)
        if data and new.meta["grad"] and _sharded(new.meta["layout"].on(data[0])):
            with graph.graph.inserting_before(output):
                scaled = graph.graph.call_function(runtime.scale_gradient, (new, 1 / mesh.size(*data)))
            scaled.meta = {k: new.meta[k] for k in (*KEPT, "layout")} | dict(segment=last, block="", data_axes=data)
            scaled.meta |= dict(module="", source=None, natural=new.meta.get("natural", False))
            new = scaled
        converted.append(new)
    output.args = (tuple(converted),)


def _sharded(placement: Placement) -> bool:
    return placement.kind == "S"
