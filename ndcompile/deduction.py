"""What placement an op gives, from those of its operands and its rule: the deduction of a type checker.

It shares no code with propagation, which enumerates rows and picks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from ndcompile.errors import CheckError
from ndcompile.mesh import HEAD_TAIL, kind_of
from ndcompile.placement import I, P, Placement, R, S
from ndcompile.size import ONE, Size, product

REPORT = "report this: a pass of the compiler is wrong; nd.compile(…, dump=FOLDER) writes the graph after each"
RULE = "the rule of this op, if you registered it (nd.register_rule); otherwise " + REPORT

aten = torch.ops.aten
ALIKE = frozenset({aten.full.default, aten.zeros.default, aten.ones.default})
"""Ops of which no element is told from another by its place."""

WRONG_GRADIENT = "an invariant operand mixed with another has the right value and a wrong gradient"
ONE_PARTIAL = "each term of a sum needs exactly one partial operand, where the op is linear"


def deduce(node: fx.Node, bound: Any, axis: str, given: list[Placement], grads: list[bool]) -> set[Placement]:
    """The output placements that an op may have: one, but dims that no operand has (of `arange`) may be born cut."""
    kinds = {p.kind for p, grad in zip(given, grads, strict=True) if grad}
    if "I" in kinds and kinds != {"I"}:
        raise _mix(node, given, axis, WRONG_GRADIENT)
    cuts: set[tuple[str, Size]] = set()
    for i, placement in enumerate(given):
        if placement.kind == "S":
            if placement.dim is None or not bound.operands[i][placement.dim]:
                raise _mix(node, given, axis, "an operand is sharded along a dim that the op broadcasts")
            cuts.add(_cut(node, bound, i, axis, given))
    if len(cuts) > 1 and {factor for factor, _ in cuts} == bound.together:
        return {_at_once(node, bound, axis, given)}
    if len(cuts) > 1:
        raise _mix(node, given, axis, "operands are sharded along dims that do not run together")
    for factor, major in cuts:
        return {_along(node, bound, axis, given, factor, major)}
    if any(p.kind == "P" for p in given):
        return {_partial(node, bound, axis, given)}
    known = {factor for dims in bound.operands for factors in dims for factor in factors}
    taken = node.meta.get("taken", {}).get(axis, {})
    born = {S(d) for d, dims in enumerate(bound.output) if dims and _uncut(bound, dims, taken) not in known}
    made = node.meta["layout"].on(axis)
    if made.within and S(made.dim) in born and node.target in ALIKE:
        born.add(made)
    return {I} if kinds == {"I"} else {R, *born}


def _cut(node: fx.Node, bound: Any, operand: int, axis: str, given: list[Placement]) -> tuple[str, Size]:
    """The factor that is cut in a dim of several, and within what part of it."""
    placement = given[operand]
    if kind_of(axis) not in HEAD_TAIL:
        return _leading(bound, operand, placement, node.meta.get("taken", {}).get(axis, {})), ONE
    within, before = Size.read(placement.within), ONE
    for factor in bound.operands[operand][placement.dim]:
        size = bound.sizes[factor]
        if before == within:
            return str(factor), ONE
        if before.gcd(within) == before and (rest := within // before) == rest.gcd(size) and rest != size:
            return str(factor), rest
        before = before * size
    raise _mix(node, given, axis, f"no factor of dim {placement.dim} begins within {within}")


def _at_once(node: fx.Node, bound: Any, axis: str, given: list[Placement]) -> Placement:
    """An algorithm that shards several factors needs each of them sharded wherever an operand has it."""
    for i, placement in enumerate(given):
        has = any(bound.together & set(factors) for factors in bound.operands[i])
        if has != (placement.kind == "S"):
            raise _mix(node, given, axis, "one operand is sharded along a dim, another that has the dim is not")
    return next(S(dim) for dim, factors in enumerate(bound.output) if bound.together & set(factors))


def _leading(bound: Any, operand: int, placement: Placement, taken: Mapping[str, int]) -> str:
    """The factor of an operand's dim that an axis cuts."""
    return _uncut(bound, bound.operands[operand][placement.dim], taken)


def _uncut(bound: Any, dims: tuple[str, ...], taken: Mapping[str, int]) -> str:
    """The factor that is cut in a dim of several: the first that is not yet cut to size 1 by major axes."""
    for factor in dims:
        size = bound.sizes[factor]
        if not size.constant or size.coefficient > taken.get(factor, 1):
            return str(factor)
    return str(dims[-1])


def _along(node: fx.Node, bound: Any, axis: str, given: list[Placement], factor: str, major: Size = ONE) -> Placement:
    if factor in bound.whole:
        raise _mix(node, given, axis, "the op acts along the sharded dim, which must be whole")
    if factor in bound.together and (bound.together != {factor} or kind_of(axis) not in HEAD_TAIL):
        raise _mix(node, given, axis, "the op needs an algorithm that shards all of its sequences")
    for i, placement in enumerate(given):
        has = any(factor in dim for dim in bound.operands[i])
        if has and placement.kind != "S":
            raise _mix(node, given, axis, "one operand is sharded along a dim, another that has the dim is not")
    for dim, factors in enumerate(bound.output):
        if factor in factors:
            if any(p.kind == "P" for p in given):
                raise _mix(node, given, axis, "partial and sharded operands do not mix here")
            if kind_of(axis) not in HEAD_TAIL:
                return S(dim)
            before = product(tuple(bound.sizes[f] for f in factors[: factors.index(factor)])) * major
            return S(dim, "" if before == ONE else str(before))
    if factor in bound.special:
        return I
    if bound.terms is None:
        raise _mix(node, given, axis, "a nonlinear op needs the sharded dim whole")
    for term in bound.terms:
        sharded = any(given[i].kind == "S" for i in term)
        partials = [i for i in term if given[i].kind == "P"]
        if not sharded and not partials:
            raise _mix(node, given, axis, f"the term that is not sharded would be counted once per {axis} rank")
        if (sharded and partials) or len(partials) > 1:
            raise _mix(node, given, axis, "a product of partial values is not the partial value of the product")
    return P()


def _partial(node: fx.Node, bound: Any, axis: str, given: list[Placement]) -> Placement:
    if bound.terms is None:
        raise _mix(node, given, axis, "a nonlinear op of a partial value is not the partial value of its result")
    for term in bound.terms:
        partials = [i for i in term if given[i].kind == "P"]
        if len(partials) != 1 or partials[0] not in bound.carriers:
            raise _mix(node, given, axis, ONE_PARTIAL)
    return next(p for p in given if p.kind == "P")


def broken(what: str, node: fx.Node, why: str, tries: str = REPORT) -> CheckError:
    module, source = node.meta.get("module") or "", node.meta.get("source")
    return CheckError(what, node=f"%{node.name}   {module}".rstrip(), source=source, why=why, tries=tries)


def _mix(node: fx.Node, given: list[Placement], axis: str, why: str) -> CheckError:
    name = getattr(node.target, "__name__", str(node.target)).split(".")[0]
    return broken(f"{name} cannot take {', '.join(map(str, given))} on axis '{axis}'", node, why, RULE)
