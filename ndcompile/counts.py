"""`bincount` of values that are known to be few: places that `topk`, a sort or `argmax` found along a dim.

What `bincount` gives is `minlength` long, or longer where the values are larger, so torch's tracer gives it another
size in each version. Here a call with `minlength` is traced as an op of that length. Where values are known to lie
below it, that op becomes a histogram; else it stays in the graph, and is refused.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, fx

from ndcompile import runtime

_LIBRARY = torch.library.Library("ndcompile", "FRAGMENT")


def _of_length(x: Tensor, minlength: int) -> Tensor:
    return torch.empty(minlength, dtype=torch.int64, device=x.device)


_LIBRARY.impl(_LIBRARY.define("bincount(Tensor x, int minlength) -> Tensor"), _of_length, "CompositeExplicitAutograd")
BINCOUNT = torch.ops.ndcompile.bincount.default
COUNTS = (BINCOUNT, torch.ops.aten.bincount.default)
"""The ops whose results may be longer than their shapes say."""

CALLS = (torch.bincount, Tensor.bincount)
_SIGNATURE = inspect.signature(lambda input, weights=None, minlength=0: None)

aten = torch.ops.aten
PLACES = {
    aten.topk.default: (1, 2), aten.sort.default: (1, 1), aten.sort.stable: (1, 2), aten.argsort.default: (None, 1),
    aten.argmax.default: (None, 1), aten.argmin.default: (None, 1),
    aten.max.dim: (1, 1), aten.min.dim: (1, 1),
}  # fmt: skip
"""Ops that find places along a dim: which of their results they are, and which argument is the dim."""
KEPT = frozenset(
    "view reshape flatten unflatten unsqueeze squeeze transpose t permute contiguous clone detach alias select slice "
    "expand".split()
)
"""Ops that only move values, or leave some out."""


def bincount(*args: Any, **kwargs: Any) -> Tensor:
    """`torch.bincount` while it is traced."""
    given = _SIGNATURE.bind(*args, **kwargs).arguments
    if given.get("weights") is not None or not given.get("minlength"):
        return torch.bincount(*args, **kwargs)
    counted: Tensor = BINCOUNT(given["input"], given["minlength"])
    return counted


def count_places(graph: fx.GraphModule) -> None:
    """Counts of values that are known to lie below their length become histograms."""
    for node in graph.graph.find_nodes(op="call_function", target=BINCOUNT):
        values, length = node.args
        below = _below(values)
        if isinstance(length, int) and below is not None and below <= length:
            node.target, node.args = runtime.histogram, (values, length, 0, length)
    graph.recompile()


def _below(value: fx.Node) -> int | None:
    """The size of the dim along which the values are places; None where that is not known."""
    which = None
    while value.op == "call_function":
        target: Any = value.target
        source = value.args[0] if value.args else None
        if not isinstance(source, fx.Node):
            return None
        if target in PLACES:
            result, position = PLACES[target]
            return _size(source, _dim(value, position)) if which == result else None
        if getattr(target, "__name__", "") == "getitem" and isinstance(value.args[1], int):
            which = value.args[1]
        elif getattr(target, "namespace", "") != "aten" or target.overloadpacket.__name__ not in KEPT:
            return None
        value = source
    return None


def _dim(node: fx.Node, position: int) -> Any:
    """The argument `dim`, or its default: None for `argmax`, which then counts all elements."""
    target: Any = node.target
    argument = target._schema.arguments[position]
    return node.args[position] if len(node.args) > position else node.kwargs.get(argument.name, argument.default_value)


def _size(source: fx.Node, dim: Any) -> int | None:
    shape = source.meta["val"].shape
    if not isinstance(dim, int) or not shape:
        return None
    return shape[dim] if isinstance(shape[dim], int) else None
