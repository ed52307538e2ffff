"""All rules by op, and the way from a graph node to its signature."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import fx

from ndcompile.errors import CompileError
from ndcompile.rules import contract, images, layers, pointwise, routing, views
from ndcompile.rules.notation import Call, Rule, RuleError, Signature, line
from ndcompile.size import Shape

RULES: dict[str, Rule] = {
    **views.RULES, **pointwise.RULES, **contract.RULES, **layers.RULES, **routing.RULES, **images.RULES
}  # fmt: skip
"""Every rule that is known. `register_rule` adds to it."""

_BUILT_IN = dict(RULES)
_GIVEN: dict[str, tuple[Rule, str]] = {}


BY_INDEX = frozenset({"runtime.dropout", "runtime.uniform", "runtime.attention_with_dropout"})
"""Ops whose random numbers are functions of an element's place in the whole value."""

STOPS_GRADIENTS = frozenset({"aten.detach.default", "runtime.moving_average"})


def passes_gradients(node: fx.Node) -> bool:
    """Whether a value hands a gradient on to its operands: its numbers are no whole ones, and nothing stops it here."""
    dtype = node.meta.get("dtype", torch.int64)
    stops = node.op == "call_function" and op_name(node.target) in STOPS_GRADIENTS
    return (dtype.is_floating_point or dtype.is_complex) and not stops


def op_name(target: Any) -> str:
    """`aten.add.Tensor`, `runtime.dropout`, or `namespace.op.overload` of a user's own op."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    module = getattr(target, "__module__", "") or ""
    prefix = "runtime" if module.startswith("ndcompile.runtime") else module
    return f"{prefix}.{getattr(target, '__name__', target)}"


def arguments(node: fx.Node) -> dict[str, Any]:
    """The node's arguments by the name that the op's schema gives them, defaults included."""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        named = {a.name: a.default_value for a in target._schema.arguments if a.has_default_value()}
        named |= {a.name: value for a, value in zip(target._schema.arguments, node.args, strict=False)}
        return named | dict(node.kwargs)
    bound = inspect.signature(target).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def operands(node: fx.Node) -> list[fx.Node]:
    """The node's tensor arguments in order, lists flattened; sizes are no operands."""
    found: list[fx.Node] = []

    def visit(value: Any) -> None:
        if isinstance(value, fx.Node) and "shape" in value.meta:
            found.append(value)
        elif isinstance(value, (list, tuple)):
            for item in value:
                visit(item)

    for value in (*node.args, *node.kwargs.values()):
        visit(value)
    return found


def results(graph: fx.GraphModule) -> list[Any]:
    """What the graph returns, in order: nodes, and constants among them."""
    given = graph.graph.output_node().args[0]
    assert isinstance(given, (list, tuple)), "a graph returns a flat list"
    return list(given)


def model_results(graph: fx.GraphModule) -> list[Any]:
    """What the model returns; what its buffers become stands after that."""
    every = results(graph)
    return every[: len(every) - len(graph.graph.output_node().meta["updates"])]


def updates(graph: fx.GraphModule) -> dict[str, fx.Node]:
    """The buffers that get a new value, by name, with that value."""
    names = graph.graph.output_node().meta["updates"]
    every = results(graph)
    return dict(zip(names, every[len(every) - len(names) :], strict=True))


def signature(node: fx.Node) -> Signature:
    """The node's rule, bound to its shapes. Raises `CompileError` where there is none or it does not fit."""
    name = op_name(node.target)
    rule = RULES.get(name)
    if rule is None:
        raise CompileError(
            f"no rule for {name}",
            node=describe(node),
            source=source_line(node),
            why="without one the compiler cannot know which of its dims may be sharded",
            tries=(f'nd.register_rule("{name}", "… -> …")', "write it with ops that have a rule"),
        )
    shapes: list[Shape] = [operand.meta["shape"] for operand in operands(node)]
    try:
        return rule(Call(name, tuple(shapes), node.meta["shape"], arguments(node)))
    except RuleError as error:
        raise CompileError(str(error), node=describe(node), source=source_line(node)) from error


def register_rule(op: Any, text: str) -> None:
    """Teach the compiler an op: `nd.register_rule(torch.ops.mylib.scale.default, "(* n)(n) -> * n")`, or by its name.

    The rule is tried on random tensors, each of its rows split against whole, forward and gradient, before it is taken;
    `RuleError` says what differed.
    """
    from ndcompile.rules.probe import probe

    rule = line(text)
    op = _op(op) if isinstance(op, str) else op
    probe(op, text)
    RULES[op_name(op)] = rule
    _GIVEN[op_name(op)] = rule, text


def given_rules() -> dict[str, str | None]:
    """The rules beside those that the package came with: by op, its text; None where a rule has none, or is gone."""
    changed = [op for op in {**_BUILT_IN, **RULES} if RULES.get(op) is not _BUILT_IN.get(op)]
    known = {op: _GIVEN[op][1] for op in changed if op in _GIVEN and _GIVEN[op][0] is RULES.get(op)}
    return {op: known.get(op) for op in sorted(changed)}


def _op(name: str) -> Any:
    """`mylib.scale.default` (or `mylib.scale`) as the op that it names."""
    parts = name.split(".")
    try:
        namespace, base, overload = (*parts, "default")[:3]
        return getattr(getattr(getattr(torch.ops, namespace), base), overload)
    except (AttributeError, ValueError) as error:
        raise RuleError(f"there is no op '{name}': a name is namespace.op.overload") from error


def describe(node: fx.Node) -> str:
    where = node.meta.get("module", "")
    return f"%{node.name} = {op_name(node.target)}" + (f"   {where}" if where else "")


def source_line(node: fx.Node) -> str | None:
    return node.meta.get("source")
