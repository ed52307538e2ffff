"""The part of a graph that computes one value from sizes, small inputs and buffers, to be run at any sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import sympy
import torch
from torch import Tensor, fx

Sizes = Mapping[str, int]

MOST = 1000
"""More nodes than any mask takes: a value of the model's layers is no small computation."""

COMPARING = frozenset(
    "add sub rsub lt le gt ge eq ne floor_divide remainder tril triu logical_and logical_or".split()
)  # fmt: skip
"""Ops in which a number is only added to, or compared with, a position or an id."""


class NotSmall(ValueError):
    """Why a value cannot be computed on its own."""


@dataclass(frozen=True)
class Subgraph:
    """`nodes` in order end with `root`; `inputs` are the placeholders among them."""

    root: fx.Node
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]

    @classmethod
    def of(cls, root: fx.Node) -> Subgraph:
        """Raises `NotSmall` where a parameter or a floating input is among what computes the value."""
        found: dict[fx.Node, None] = {}
        pending = [root]
        while pending:
            node = pending.pop()
            if node in found:
                continue
            if len(found) > MOST:
                raise NotSmall("more than masks are made of computes it")
            found[node] = None
            if "size" not in node.meta:
                _require_small(node)
                pending += node.all_input_nodes
        inputs = tuple(node for node in found if node.op == "placeholder")
        return cls(root, tuple(sorted(found)), inputs)

    @property
    def symbols(self) -> frozenset[str]:
        """The names of the sizes that it depends on."""
        sizes = [size for node in self.nodes for size in (*node.meta.get("sizes", ()), node.meta.get("size", 0))]
        return frozenset(str(symbol) for size in sizes for symbol in sympy.sympify(size).free_symbols)

    def numbers(self) -> Iterator[tuple[str, int]]:
        """Every number among the arguments, with its op by the last name (`lt`), and those in sizes, with none.

        A number that is not whole is rounded down, and named without its op; so is one that multiplies (`alpha`).
        """
        for node in self.nodes:
            for size in (*node.meta.get("sizes", ()), node.meta.get("size", 0)):
                if isinstance(size, sympy.Expr):
                    yield from (("", int(number)) for number in size.atoms(sympy.Integer))
            if "size" not in node.meta:
                compared = "" if "alpha" in node.kwargs else base_name(node)
                for value in _leaves((node.args, node.kwargs)):
                    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
                        yield (compared if value == int(value) else ""), math.floor(value)

    def run(
        self, sizes: Sizes, given: Mapping[fx.Node, Tensor], number: Callable[[fx.Node, Any], Any] = lambda n, v: v
    ) -> dict[fx.Node, Any]:
        """The values of all nodes on the CPU; `number` may put another in the place of a number among the arguments."""
        values: dict[fx.Node, Any] = {}
        for node in self.nodes:
            if node.op == "placeholder":
                values[node] = given[node]
            elif "size" in node.meta:
                values[node] = value_of(node.meta["size"], sizes)
            else:
                args, kwargs = _replaced(node, values, number)
                target: Any = node.target
                values[node] = target(*args, **kwargs)
        return values


def base_name(node: fx.Node) -> str:
    """`lt` of `aten.lt.Scalar`; empty of what is no op of torch's."""
    return node.target._schema.name.split("::")[1] if isinstance(node.target, torch._ops.OpOverload) else ""


def value_of(expression: Any, sizes: Sizes) -> int:
    """A size as a number."""
    return expression if isinstance(expression, int) else _evaluated(expression, tuple(sorted(sizes.items())))


@lru_cache(maxsize=4096)
def _evaluated(expression: sympy.Expr, sizes: tuple[tuple[str, int], ...]) -> int:
    known = dict(sizes)
    return int(expression.subs({symbol: known[str(symbol)] for symbol in expression.free_symbols}))


def _require_small(node: fx.Node) -> None:
    if node.op == "call_function":
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise NotSmall("random numbers are among what computes it")
        return
    role, dtype = node.meta.get("role"), node.meta.get("dtype")
    if role == "input" and dtype is not None and not dtype.is_floating_point and not dtype.is_complex:
        return
    if role == "buffer":
        return
    raise NotSmall(f"it depends on {role} '{node.meta.get('name')}'")


def _replaced(
    node: fx.Node, values: Mapping[fx.Node, Any], number: Callable[[fx.Node, Any], Any]
) -> tuple[Any, dict[str, Any]]:
    def look(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return values[value]
        if isinstance(value, (list, tuple)):
            return [look(v) for v in value]
        return number(node, value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value

    kwargs = {key: look(value) for key, value in node.kwargs.items()}
    if "device" in kwargs:
        kwargs["device"] = "cpu"
    return [look(value) for value in node.args], kwargs


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))
    else:
        yield value
