"""New nodes in a graph: each says of itself what a traced node does (sizes, dtype, module, source)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from ndcompile.size_nodes import size_node

AT = {"b": 6, "s": 10}
"""The sizes at which a dtype is found out by running an op on meta tensors."""


class Builder:
    """Makes nodes that carry the module and source of the node that they replace."""

    def __init__(self, graph: fx.Graph, origin: fx.Node) -> None:
        self.graph, self.origin, self.made = graph, origin, 0

    def __call__(
        self, target: Any, *args: Any, sizes: tuple[Any, ...], dtype: torch.dtype | None = None, called: str = "",
        **kwargs: Any,
    ) -> fx.Node:  # fmt: skip
        """A call with a result of these sizes; its dtype is the op's own where none is given.

        `called` is the name of its variable in the emitted text.
        """
        node = self.graph.call_function(target, args, kwargs)
        self.made += 1
        node.meta = stands_with(self.origin, str(target), self.made)
        node.meta |= dict(sizes=sizes, dtype=dtype or dtype_of(node)) | (dict(called=called) if called else {})
        return node

    def cast(self, value: fx.Node, dtype: torch.dtype) -> fx.Node:
        """The value in a dtype, without a node where it has it."""
        if value.meta["dtype"] == dtype:
            return value
        return self(torch.ops.aten.to.dtype, value, dtype, sizes=value.meta["sizes"], dtype=dtype)

    def expand(self, value: fx.Node, sizes: tuple[Any, ...]) -> fx.Node:
        """The value broadcast to these sizes."""
        if value.meta["sizes"] == sizes:
            return value
        listed = [self.number(size) for size in sizes]
        return self(torch.ops.aten.expand.default, value, listed, sizes=sizes, dtype=value.meta["dtype"])

    def full(self, sizes: tuple[Any, ...], value: Any, dtype: torch.dtype) -> fx.Node:
        """One number everywhere, on a device that `follow_device` says."""
        listed = [self.number(size) for size in sizes]
        node = self(torch.ops.aten.full.default, listed, value, sizes=sizes, dtype=dtype)
        node.kwargs = dict(dtype=dtype, device=torch.device("meta"))
        return node

    def number(self, size: Any) -> Any:
        """A global size as an argument: a number, or nodes that compute it."""
        return size_node(self.graph, sympy.sympify(size))

    def size(self, of: fx.Node, dims: Sequence[int], less: int = 0) -> Any:
        """The product of some dims' global sizes, less a number, as an argument: a number, or nodes that compute it."""
        number = self.number(math.prod(of.meta["sizes"][d] for d in dims) - less)
        if isinstance(number, fx.Node):
            number.meta |= dict(of=(of, tuple(dims)), less=less)
        return number


def lower(graph: fx.GraphModule, lowerings: Mapping[Any, Callable[[Builder, fx.Node], fx.Node | None]]) -> None:
    """Write each node that has a lowering as what that makes in its place; where it makes nothing, the node stays."""
    for node in list(graph.graph.nodes):
        if node.target not in lowerings:
            continue
        with graph.graph.inserting_before(node):
            result = lowerings[node.target](Builder(graph.graph, node), node)
        if result is not None:
            node.replace_all_uses_with(result)
            graph.graph.erase_node(node)


def stands_with(origin: fx.Node, *which: Any) -> dict[str, Any]:
    """What a new node takes over from one that stands where it shall; `which` tells several apart."""
    meta = {k: v for k, v in origin.meta.items() if k in ("module", "source", "no_grad", "place")}
    return meta | (dict(at=(*origin.meta["at"], *which)) if "at" in origin.meta else {})


def dtype_of(node: fx.Node) -> torch.dtype:
    """The dtype of the op's result, found by running it on meta tensors."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), _on_meta)
    with torch.no_grad(), torch.device("meta"):
        found = node.target(*args, **kwargs)  # type: ignore[operator]
    assert isinstance(found, Tensor), f"{node.target} gives one tensor"
    return found.dtype


def _on_meta(node: fx.Node) -> Any:
    if "size" in node.meta:
        return _at(node.meta["size"])
    return torch.empty([_at(size) for size in node.meta["sizes"]], dtype=node.meta["dtype"], device="meta")


def _at(size: Any) -> int:
    expression = sympy.sympify(size)
    return int(expression.subs({symbol: AT.get(str(symbol), 14) for symbol in expression.free_symbols}))
