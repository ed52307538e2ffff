"""Choose what a sequence that is too short is lengthened with, so that it changes nothing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from operator import getitem
from typing import Any

import sympy
from torch import fx

from ndcompile.errors import CompileError
from ndcompile.fold import unfold
from ndcompile.pad_rules import (
    ATTENTION,
    along,
    born,
    refuse_length,
    require_mask,
    require_nothing,
    value_at_pads,
)
from ndcompile.pads import ANY, Followed, Pad, Pads, end_of, refused
from ndcompile.rules.notation import Signature
from ndcompile.rules.registry import arguments, model_results, op_name, operands, signature

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
    graph.graph.output_node().meta |= dict(
        limits=followed.limits, ends=[_ends(r, followed) for r in model_results(whole)]
    )
    return graph


def follow(graph: fx.GraphModule, symbols: frozenset[str], given: Mapping[str, float]) -> Followed:
    """Follow pads through a graph, whose inputs have the numbers `given` at them. Raises `CompileError` at the op that
    they would change.
    """
    found = Followed(symbols)
    for node in graph.graph.nodes:
        if node.op == "placeholder" and "sizes" in node.meta:
            own = found.lengthened(node)
            found.pads[node] = {d: Pad(given[node.meta["name"]]) for d in own}
        elif node.op == "call_function" and "shape" in node.meta:
            found.pads[node] = _followed(node, found)
    return found


def _followed(node: fx.Node, found: Followed) -> Pads:
    if node.target is getitem:
        taken = found.pads[operands(node)[0]]
        return {d: taken.get(d, ANY) for d in found.lengthened(node)}
    refuse_length(node, found)
    name = op_name(node.target)
    base = name.split(".")[1]
    bound, given = signature(node), operands(node)
    if base in ATTENTION:
        require_mask(node, found, bound)
    by_factor = _by_factor(bound, given, found)
    pads = {}
    for dim in found.lengthened(node):
        own = next((f for f in bound.output[dim] if f in by_factor), None)
        if own is None:
            pads[dim] = born(node, base, dim, found)
        elif own in bound.whole | bound.masked | bound.special or (own in bound.together and base not in ATTENTION):
            pads[dim] = along(node, base, dim, by_factor[own], found)
        else:
            pads[dim] = value_at_pads(node, name, bound, by_factor[own], found)
    kept = {f for dim in pads for f in bound.output[dim]}
    for factor, taken in by_factor.items():
        if factor not in kept and not (base in ATTENTION and factor in bound.together | bound.whole):
            require_nothing(node, base, bound, factor, taken)
    for dim, pad in pads.items():
        if pad.number is not None and (math.isnan(pad.number) or pad.number == math.inf):
            raise refused(node, f"pads become {pad.number} at dim {dim}")
    return pads


def _by_factor(bound: Signature, given: list[fx.Node], found: Followed) -> dict[str, dict[int, Pad]]:
    """For each factor that has pads, what stands there in each operand that has the factor."""
    by_factor: dict[str, dict[int, Pad]] = {}
    for number, value in enumerate(given):
        for dim, pad in found.pads.get(value, {}).items():
            factors = bound.operands[number][dim]
            long = [f for f in factors if set(bound.sizes[f].symbols) & _names(value.meta["sizes"][dim])] or factors
            for factor in long:
                by_factor.setdefault(factor, {})[number] = pad
    return by_factor


def _names(size: Any) -> set[str]:
    """The names that a size of this expression has in `Size`: its symbols but the batch, and itself as one."""
    expression = sympy.sympify(size)
    return {str(symbol) for symbol in expression.free_symbols} - {"b"} | {str(expression)}


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
