"""The heads of attention: how many its keys and values have, and the matrices that make them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from operator import getitem

from torch import fx

from ndcompile.rules.layers import HEADS
from ndcompile.rules.notation import Signature
from ndcompile.rules.registry import op_name, operands, signature


@dataclass(frozen=True)
class Attention:
    """An attention op of `queries` heads over `keys` heads of keys and values.

    `matrices` are the parameters that make its keys or values and nothing else of it: not those that make queries too.
    """

    node: fx.Node
    queries: int
    keys: int
    matrices: frozenset[fx.Node]


def attentions(graph: fx.GraphModule) -> list[Attention]:
    """Every attention op that has a dim of heads. Reads `shape`."""
    nodes = (n for n in graph.graph.nodes if n.op == "call_function" and "attention" in op_name(n.target))
    return [_attention(node) for node in nodes if len(node.meta["shape"]) > 3]


def _attention(node: fx.Node) -> Attention:
    query, key, value = operands(node)[:3]
    made = frozenset(_makers(key)) | frozenset(_makers(value))
    keys = min(_heads(key), _heads(value))
    return Attention(node, node.meta["shape"][HEADS].coefficient, keys, made - frozenset(_makers(query)))


def _heads(value: fx.Node) -> int:
    """Heads before any is repeated: the sizes of the factors of the dim of heads that come from the farthest value."""
    dims = {len(value.meta["shape"]) + HEADS}
    count = _size(value, dims)
    while (step := _back(value, dims)) is not None:
        value, dims = step
        count = _size(value, dims)
    return count


def _size(value: fx.Node, dims: set[int]) -> int:
    return math.prod(value.meta["shape"][dim].coefficient for dim in dims)


def _back(value: fx.Node, dims: set[int]) -> tuple[fx.Node, set[int]] | None:
    """The operand that a value's dims come from, and their dims there (fewer where one is repeated).

    None where they are made, or are part of others.
    """
    if value.op != "call_function" or not dims:
        return None
    if value.target is getitem:
        return operands(value)[0], dims
    bound = signature(value)
    tracked = {factor for dim in dims for factor in bound.output[dim]}
    if not tracked & {factor for given in bound.operands for factors in given for factor in factors}:
        return value, set()
    for number, operand in enumerate(operands(value)):
        found = {dim for dim, factors in enumerate(bound.operands[number]) if tracked & set(factors)}
        kept = {factor for dim in found for factor in bound.operands[number][dim]}
        if operand.op == "call_function" and found and kept <= tracked - bound.whole:
            return operand, found
    return None


def _makers(value: fx.Node) -> Iterator[fx.Node]:
    """The matrices nearest to a value on the ways that lead to it."""
    seen, queue = {value}, [value]
    while queue:
        node = queue.pop()
        given = operands(node) if node.op == "call_function" else []
        matrices = [m for m in map(_parameter, given) if _is_matrix(m)] if _multiplies(node) else []
        yield from matrices
        more = [] if matrices else [o for o in given if o.meta["grad"] and o not in seen]
        seen.update(more)
        queue += more


def _parameter(node: fx.Node) -> fx.Node:
    """What a value is a view or a piece of."""
    while node.op == "call_function" and len(operands(node)) == 1:
        node = operands(node)[0]
    return node


def _is_matrix(node: fx.Node) -> bool:
    return node.meta.get("role") == "parameter" and len(node.meta["shape"]) > 1


def _multiplies(node: fx.Node) -> bool:
    """Whether an op is a sum of products of its operands, or a lookup in one of them."""
    if node.op != "call_function" or node.target is getitem:
        return False
    bound: Signature = signature(node)
    return any(len(term) > 1 for term in bound.terms or ())
