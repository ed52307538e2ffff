"""Choose what a sequence that is too short is lengthened with, so that it changes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from torch import fx

from ndcompile.errors import CompileError
from ndcompile.fold import unfold
from ndcompile.pads import Followed, end_of, follow, refused
from ndcompile.rules.registry import arguments, model_results, op_name, operands

MOST = 16
"""Combinations of pads that are tried."""


def pad_inputs(graph: fx.GraphModule, symbols: frozenset[str]) -> fx.GraphModule:
    """Set `pad`, a number, on each input that has one of these lengths, and `limits` and `ends` on the graph's output.

    What the loss takes as its targets gets the number that it ignores, all else 0; where that changes something, a
    number that the model itself compares the input with. `limits` is how long a sequence may become; `ends` has for
    each result its dims that become longer, with the symbol and what is added to it. Raises `CompileError` at the
    first op that pads would change. Reads `shape`; changes no node.
    """
    whole = unfold(graph)
    inputs = {n.meta["name"]: n for n in whole.graph.find_nodes(op="placeholder") if n.meta["role"] == "input"}
    long = {name: n for name, n in inputs.items() if Followed(symbols).lengthened(n)}
    followed, given = _first_harmless(whole, symbols, {name: _candidates(node) for name, node in long.items()})
    for node in graph.graph.find_nodes(op="placeholder"):
        if node.meta["role"] == "input" and node.meta["name"] in given:
            node.meta["pad"] = given[node.meta["name"]]
    graph.graph.output_node().meta |= dict(limits=followed.limits, ends=[_ends(r, followed) for r in model_results(whole)])
    return graph


def _first_harmless(
    graph: fx.GraphModule, symbols: frozenset[str], candidates: Mapping[str, list[float]]
) -> tuple[Followed, dict[str, float]]:
    """The first combination of pads that changes nothing; else the complaint about the very first."""
    complaint: CompileError | None = None
    for numbers in itertools.islice(itertools.product(*candidates.values()), MOST):
        given = dict(zip(candidates, numbers, strict=True))
        try:
            return follow(graph, symbols, given), given
        except CompileError as error:
            complaint = complaint or error
    assert complaint is not None, "there is one combination"
    raise complaint


def _candidates(node: fx.Node) -> list[float]:
    """The number that a loss ignores, if the input is its target; else 0, then what the input is compared with."""
    ignored, compared = list[float](), list[float]()
    for value in _handed_on(node):
        for user in value.users:
            name = op_name(user.target) if user.op == "call_function" else ""
            if name == "runtime.cross_entropy" and arguments(user)["target"] is value:
                ignored.append(arguments(user)["ignore_index"])
            elif name in ("aten.ne.Scalar", "aten.eq.Scalar"):
                compared.append(float(arguments(user)["other"]))
    return list(dict.fromkeys(ignored)) or list(dict.fromkeys([0.0, *compared]))


HANDS_ON = frozenset(
    "view reshape _unsafe_view flatten unsqueeze squeeze alias slice to contiguous clone pad select detach".split()
)


def _handed_on(node: fx.Node) -> Iterator[fx.Node]:
    """The value, and what has the same numbers."""
    pending = [node]
    while pending:
        value = pending.pop()
        yield value
        pending += [
            user for user in value.users
            if user.op == "call_function" and "shape" in user.meta and operands(user)[0] is value
            and op_name(user.target).split(".")[1] in HANDS_ON
        ]  # fmt: skip


def _ends(value: Any, followed: Followed) -> dict[int, tuple[str, int]]:
    """The dims of a result that become longer, each with its symbol and what is added to it."""
    found = {}
    for dim in followed.lengthened(value) if isinstance(value, fx.Node) else ():
        end = end_of(value.meta["sizes"][dim])
        if end is None:
            raise refused(value, f"dim {dim} of a result is {value.meta['sizes'][dim]} long, of which pads are no end")
        found[dim] = end
    return found


