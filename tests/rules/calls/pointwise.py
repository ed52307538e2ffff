"""Element by element: calls of each rule's op, drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

from tests.rules.case import Case, Spec, above_one, below_one, bools, case, f, ints, positive
from tests.rules.draw import Calls, Draw, calls, chance, pair, sizes, smaller

Maker = Callable[..., Spec]
SCALARS = st.sampled_from([0.5, 2, -3, 0.1])


def few(*shape: Any) -> Spec:
    """Small integers, of which many are equal."""
    return ints(*shape, high=4)


def divisors(*shape: Any) -> Spec:
    return ints(*shape, low=1, high=5)


def unary(draw: Draw, op: str, make: Maker) -> Case:
    return case(op, make(*sizes(draw)))


def with_number(draw: Draw, op: str, make: Maker, *given: Any) -> Case:
    """With the numbers given, or one that is drawn."""
    return case(op, make(*sizes(draw)), *(given or [draw(SCALARS)]))


def after_number(draw: Draw, op: str) -> Case:
    return case(op, 2.0, f(*sizes(draw)))


def binary(draw: Draw, op: str, first: Maker, second: Maker) -> Case:
    a, b = pair(draw)
    return case(op, first(*a), second(*b))


def clamped(draw: Draw, op: str) -> Case:
    """By a tensor from below, from above, or both; torch has no gradient where a bound has more dims than the input."""
    whole = sizes(draw)
    x, low, high = f(*whole), f(*smaller(draw, whole)), f(*smaller(draw, whole))
    return case(op, x, **draw(st.sampled_from([dict(min=low), dict(max=high), dict(min=low, max=high)])))


def arithmetic(draw: Draw, op: str, second: Maker, scaled: bool = False) -> Case:
    """Two tensors, or one and a number."""
    if chance(draw, 5):
        return case(op, f(*sizes(draw)), draw(SCALARS))
    a, b = pair(draw)
    return case(op, f(*a), second(*b), **(dict(alpha=draw(SCALARS)) if scaled and draw(st.booleans()) else {}))


def quotient(draw: Draw, op: str) -> Case:
    return arithmetic(draw, op, draw(st.sampled_from([positive, divisors])))


def lerp(draw: Draw, op: str) -> Case:
    a, b = pair(draw)
    return case(op, f(*a), f(*b), draw(SCALARS))


def rounded(draw: Draw, op: str, second: Maker | None) -> Case:
    mode = draw(st.sampled_from(["floor", "trunc"]))
    a, b = pair(draw)
    return case(op, ints(*a, high=9), second(*b) if second else 2, rounding_mode=mode)


def filled(draw: Draw, op: str) -> Case:
    a, b = pair(draw)
    value = f() if op.endswith("Tensor") else draw(SCALARS)
    return case(op, f(*a), bools(*b), value)


def where(draw: Draw, op: str) -> Case:
    whole = sizes(draw)
    condition, a, b = (smaller(draw, whole) for _ in range(3))
    first: Any = draw(SCALARS) if op.endswith("ScalarSelf") else f(*a, grad=not chance(draw, 4))
    second: Any = draw(SCALARS) if op.endswith("ScalarOther") else f(*b)
    return case(op, bools(*condition), first, second)


def cast(draw: Draw, op: str, *before: Any, **named: Any) -> Case:
    return case(op, draw(st.sampled_from([f, bools, few]))(*sizes(draw)), *before, **named)


def cast_by_name(draw: Draw, op: str) -> Case:
    return cast(draw, op, dtype=torch.float64)


def cast_like(draw: Draw, op: str) -> Case:
    shape = sizes(draw)
    other = shape if draw(st.booleans()) else sizes(draw)
    return case(op, draw(st.sampled_from([f, few]))(*shape), f(*other))


def default(names: str) -> str:
    return " ".join(f"{name}.default" for name in names.split())


COMPARISONS = "eq ne lt le gt ge".split()

CALLS: Calls = {
    **calls(
        default(
            "neg relu gelu silu tanh sigmoid exp sin cos abs erf softplus leaky_relu elu hardtanh mish hardswish relu6 "
            "sign square expm1 floor isnan isinf ceil round trunc exp2 tan atan sinh cosh log_sigmoid selu celu "
            "hardsigmoid nan_to_num asinh erfc"
        ),
        unary,
        f,
    ),
    **calls(default("log sqrt rsqrt reciprocal log1p log2"), unary, positive),
    **calls(default("acos asin atanh"), unary, below_one),
    **calls("acosh.default", unary, above_one),
    **calls(default("logical_not bitwise_not"), unary, bools),
    **calls(" ".join(f"{name}.Scalar" for name in COMPARISONS), with_number, few, 2),
    **calls(" ".join(f"{name}.Tensor" for name in COMPARISONS), binary, few, few),
    **calls("mul.Scalar div.Scalar add.Scalar sub.Scalar rsub.Scalar remainder.Scalar fmod.Scalar", with_number, f),
    **calls("pow.Tensor_Scalar", with_number, positive, 3),
    **calls("pow.Scalar", after_number),
    **calls("clamp.default", with_number, f, -0.5, 0.5),
    **calls(default("clamp_min clamp_max"), with_number, f, 0.1),
    **calls("add.Tensor sub.Tensor", arithmetic, f, True),
    **calls("mul.Tensor", arithmetic, f),
    **calls("div.Tensor", quotient),
    **calls("lerp.Scalar", lerp),
    **calls("pow.Tensor_Tensor", binary, positive, f),
    **calls(
        "logical_and.default logical_or.default logical_xor.default bitwise_and.Tensor bitwise_or.Tensor "
        "bitwise_xor.Tensor __and__.Tensor __or__.Tensor",
        binary,
        bools,
        bools,
    ),
    **calls("maximum.default minimum.default max.other min.other", binary, f, f),
    **calls("clamp.Tensor", clamped),
    **calls("clamp_min.Tensor clamp_max.Tensor polar.default", binary, f, f),
    **calls("atan2.default xlogy.Tensor", binary, f, positive),
    **calls("floor_divide.default remainder.Tensor fmod.Tensor", binary, few, divisors),
    **calls("div.Tensor_mode", rounded, divisors),
    **calls("div.Scalar_mode", rounded, None),
    **calls("masked_fill.Scalar masked_fill.Tensor", filled),
    **calls("where.self where.ScalarOther where.ScalarSelf", where),
    **calls("to.dtype", cast, torch.float64),
    **calls("to.device", cast, torch.device("cpu"), torch.float64),
    **calls("to.dtype_layout _to_copy.default", cast_by_name),
    **calls("to.other type_as.default", cast_like),
}
