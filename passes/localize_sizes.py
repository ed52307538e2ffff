"""Turn the sizes in shape arguments into those of one rank's tensors, so that the parallel graph runs as it stands."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import fx

from ndcompile import runtime
from ndcompile.mesh import HEAD_TAIL, MeshAxis, MeshSpec, kind_of
from ndcompile.rules.over_ranks import over_ranks
from ndcompile.rules.registry import BY_INDEX, arguments, op_name
from ndcompile.size_nodes import size_node

aten = torch.ops.aten
SHAPED = {
    aten.reshape.default: 1, aten.expand.default: 1, aten._unsafe_view.default: 1,
    aten.zeros.default: 0, aten.ones.default: 0, aten.full.default: 0,
    runtime.uniform: 0,
}  # fmt: skip
"""Ops that take a whole shape, with its place among their arguments."""

ALONG = (runtime.convolve, runtime.running_sum)
"""Ops that look along a sequence."""


def localize_sizes(graph: fx.GraphModule, mesh: MeshSpec) -> fx.GraphModule:
    """Write every shape argument for this rank, and hand sharded axes to the ops that work over them.

    Global sizes elsewhere (the count of a mean) stay global: the inputs' local sizes are multiplied up. Reads `layout`.
    """
    localizer = _Localizer(graph, mesh)
    for node in list(graph.graph.nodes):
        if node.op == "call_function" and node.meta.get("layout") is not None:
            localizer.localize(node)
    for node in graph.graph.nodes:
        if node.target is aten.sym_size.int:
            localizer.globalize(node)
    graph.graph.eliminate_dead_code()
    graph.graph.lint()
    graph.recompile()
    return graph


class _Localizer:
    def __init__(self, graph: fx.GraphModule, mesh: MeshSpec) -> None:
        self.graph, self.mesh = graph.graph, mesh

    def localize(self, node: fx.Node) -> None:
        if node.target in SHAPED:
            place = SHAPED[node.target]
            node.args = (*node.args[:place], self.shape(node), *node.args[place + 1 :])
        elif node.target is aten.unflatten.int:
            given = arguments(node)
            dim = given["dim"] % len(given["self"].meta["shape"])
            node.args = (given["self"], dim, self.shape(node)[dim : dim + len(given["sizes"])])
        elif node.target in (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims):
            node.target, node.args = aten.reshape.default, (node.args[0], self.shape(node))
        elif str(node.target).startswith("aten.arange") and node.meta["layout"].dims[0]:
            given = arguments(node)
            axis = self.axis(node.meta["layout"].dims[0])
            node.args = (given.get("start", 0), given["end"], given.get("step", 1), axis)
            node.target, node.kwargs = runtime.arange, dict(dtype=node.meta["dtype"])
        elif node.meta.get("algorithm_axes"):
            self.algorithm(node)
        if op_name(node.target) in BY_INDEX and "how" not in node.meta:
            self.by_index(node)

    def by_index(self, node: fx.Node) -> None:
        """Say where in the whole value a rank's part of it lies."""
        sharded = {d: axes for d, axes in enumerate(node.meta["layout"].dims) if axes}
        shape, ranks = node.meta["shape"], self.mesh.size
        odd = {d: shape[d].coefficient for d, axes in sharded.items() if not shape[d].divides_by(ranks(*axes))}
        own: dict[str, Any] = dict(shards={d: self.ranks(axes) for d, axes in sharded.items()}, sizes=odd)
        balanced = tuple(d for d, axes in sharded.items() if kind_of(axes[0]) in HEAD_TAIL)
        node.kwargs = {**node.kwargs, **own, **(dict(balanced=balanced) if balanced else {})}

    def ranks(self, axes: Sequence[str]) -> Any:
        """The axes as one; where the first holds two chunks, each by itself, major first."""
        alone = len(axes) > 1 and kind_of(axes[0]) in HEAD_TAIL
        return tuple(self.axis([axis]) for axis in axes) if alone else self.axis(axes)

    def axis(self, names: Sequence[str]) -> Any:
        """An argument of a kind that fx's types do not name."""
        return MeshAxis(tuple(names))

    def algorithm(self, node: fx.Node) -> None:
        """A lookup in a sharded table, or a loss over sharded classes."""
        if node.target in ALONG:
            node.kwargs = {**node.kwargs, "axis": self.axis([a for a, _ in node.meta["algorithm_axes"]])}
            return
        if "how" in node.meta:
            named = over_ranks(node)
            sharded = {d: axes for d, axes in enumerate(node.meta["layout"].dims[:2]) if axes and "dropout_p" in named}
            node.kwargs = named | (dict(shards={d: self.axis(a) for d, a in sharded.items()}) if sharded else {})
            node.args = (*node.args[:3], self.axis([node.meta["algorithm_axes"][0][0]]))
            node.target = runtime.context_attention
            return
        axis, given = self.axis([a for a, _ in node.meta["algorithm_axes"]]), arguments(node)
        if node.target is aten.embedding.default:
            size = given["weight"].meta["shape"][0].coefficient
            node.args = (given["indices"], given["weight"], given["padding_idx"], axis, size)
            node.target, node.kwargs = runtime.embedding, {}
        else:
            size = given["logits"].meta["shape"][1].coefficient
            node.args = (given["logits"], given["target"], axis, size, given["ignore_index"], given["label_smoothing"])

    def shape(self, node: fx.Node) -> list[Any]:
        """The node's local shape: numbers, and nodes where sizes are symbolic or parts differ between ranks."""
        return [self.size(node, dim) for dim in range(len(node.meta["shape"]))]

    def size(self, node: fx.Node, dim: int) -> Any:
        axes, size = node.meta["layout"].dims[dim], node.meta["shape"][dim]
        ranks = self.mesh.size(*axes)
        if not size.divides_by(ranks):
            return self.number(node, part, self.axis(axes), size.coefficient)
        total: Any = size.coefficient // ranks
        for symbol in size.symbols:
            total = self.number(node, operator.mul, self.measure(node, symbol), total)
        return total

    def measure(self, before: fx.Node, symbol: str) -> Any:
        """A local symbol (`b`: this rank's batch, `s`: this rank's part of the sequence) from an input's size."""
        for node in self.graph.find_nodes(op="placeholder"):
            for dim, size in enumerate(node.meta.get("shape", ())):
                if size.symbols == (symbol,):
                    local = self.number(before, aten.sym_size.int, node, dim)
                    local.meta["local"] = True
                    ranks = size.coefficient // self.mesh.size(*node.meta["layout"].dims[dim])
                    return local if ranks == 1 else self.number(before, operator.floordiv, local, ranks)
        with self.graph.inserting_before(before):
            return size_node(self.graph, sympy.sympify(symbol))

    def number(self, before: fx.Node, target: Any, *args: Any) -> fx.Node:
        with self.graph.inserting_before(before):
            node = self.graph.call_function(target, args)
        node.meta = dict(module="", source=None)
        return node

    def globalize(self, node: fx.Node) -> None:
        """A size that the model asked for means the global one; an input's own is this rank's."""
        value = node.args[0]
        assert isinstance(value, fx.Node)
        ranks = self.mesh.size(*value.meta["layout"].dims[arguments(node)["dim"]])
        if node.meta.get("local") or ranks == 1:
            return
        with self.graph.inserting_after(node):
            whole = self.graph.call_function(operator.mul, (node, ranks))
        whole.meta = dict(node.meta)
        node.replace_all_uses_with(whole, delete_user_cb=lambda user: user is not whole)


def part(axis: Any, size: int) -> int:
    """This rank's part of a dim."""
    return int(axis.part(size))
