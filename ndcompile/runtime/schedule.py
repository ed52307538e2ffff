"""The order of a compiled block that computes two halves: what is to cover a collective stands behind its start.

Ops of the two halves do not depend on each other, and a compiler fuses across them what reads the same tensor, such as
the angles of rotary embeddings. Then one half waits for the other, and its collective travels beside nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import getitem
from typing import Any

import torch
from torch import fx

from ndcompile.runtime import overlap, private, wires
from ndcompile.runtime.overlap import join_products

_aten = torch.ops.aten
PRODUCTS = frozenset(op.default for op in (_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm))
"""What takes long enough to cover something; attention's kernels are told by `private.ATTENTION`."""

STARTS = frozenset({*private.COLLECTIVES.values(), *wires.STARTS.values()})
"""What starts a collective."""


def compile_options(given: Mapping[str, Any], halved: bool, copies: bool) -> dict[str, Any]:
    """The options of `torch.compile` for a function: the user's, and for inductor, where the function is `halved`, the
    order that is kept; where it exchanges by `copies`, what products do meanwhile.
    """
    if given.get("backend", "inductor") != "inductor" or not (halved or copies):
        return dict(given)
    options, mode = given.get("options") or {}, given.get("mode")
    if options and mode:
        return dict(given)  # torch says that it takes one of them
    if halved:
        own, what = private.inductor_options(mode, keep_order, __file__), "halves=True"
    else:
        own = private.inductor_options(mode, join_products, overlap.__file__, in_order=False)
        what = "transport='symmetric'"
    if taken := sorted(own.keys() & options.keys()):
        raise ValueError(
            f"compile(options={{'{taken[0]}': …}}) of a model with {what}\n"
            f"  why  {what} sets it, to decide what runs while a collective travels\n"
            f"  try  compile without it, or the model without {what}"
        )
    return {**{k: v for k, v in given.items() if k != "mode"}, "options": {**own, **options}}


def keep_order(graph: fx.Graph) -> None:
    """Keep each product, and each attention, between the same two starts of collectives as in the graph."""
    after: dict[fx.Node, list[fx.Node]] = {}
    last: fx.Node | None = None
    since: list[fx.Node] = []
    for node in graph.nodes:
        if node.target in STARTS:
            if since:
                after[node] = since
            last, since = node, []
        elif node.target in PRODUCTS:
            since.append(node)
            if last is not None:
                after[node] = [last]
        elif _attended(node):
            since.append(node)
    private.in_this_order(graph, after)


def _attended(node: fx.Node) -> bool:
    """A kernel of attention gives several tensors; the first stands for it."""
    kernels = {op for pair in private.ATTENTION.values() for op in pair}
    kernel = getattr(node.args[0], "target", None) if node.target is getitem else None
    return bool(kernel in kernels and node.args[1] == 0)
