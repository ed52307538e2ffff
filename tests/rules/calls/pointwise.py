"""Element by element: calls of each rule's op, drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

from tests.rules.case import Case, Spec, above_one, below_one, bools, case, complexes, f, ints, positive
from tests.rules.draw import Calls, Draw, calls, chance, pair, sizes, smaller

Maker = Callable[..., Spec]
SCALARS = st.sampled_from([0.5, 2, -3, 0.1])


def few(*shape: Any) -> Spec:
    """Small integers, of which many are equal."""
    return ints(*shape, high=4)


def below_one_and_positive(*shape: Any) -> Spec:
    return Spec(shape, lambda given: 0.8 * torch.rand(given, dtype=torch.float64) + 0.1)


def still(*shape: Any) -> Spec:
    return f(*shape, grad=False)


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


def alike(draw: Draw, op: str, first: Maker, second: Maker) -> Case:
    shape = sizes(draw)
    return case(op, first(*shape), second(*shape))


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


def polygamma(draw: Draw, op: str) -> Case:
    return case(op, draw(st.integers(1, 2)), positive(*sizes(draw)))


def of_three(draw: Draw, op: str) -> Case:
    """Three tensors of shapes that broadcast; a clamp may lack its upper end."""
    whole = sizes(draw)
    a, b, c = (smaller(draw, whole) for _ in range(3))
    last = positive(*c) if op.startswith("aten.addcdiv") else f(*c)
    more = [] if op.startswith("aten.clamp") and draw(st.booleans()) else [last]
    scale = dict(value=draw(SCALARS)) if op.startswith("aten.addc") and draw(st.booleans()) else {}
    return case(op, f(*a), f(*b), *more, **scale)


def bucketized(draw: Draw, op: str) -> Case:
    ends = Spec((draw(st.integers(1, 5)),), lambda shape: torch.randn(shape, dtype=torch.float64).sort().values, False)
    return case(op, f(*sizes(draw), grad=False), ends, right=draw(st.booleans()))


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
            "hardsigmoid nan_to_num asinh erfc frac sinc hardshrink softshrink signbit i0 deg2rad rad2deg"
        ),
        unary,
        f,
    ),
    **calls(default("log sqrt rsqrt reciprocal log1p log2 lgamma digamma"), unary, positive),
    **calls(default("acos asin atanh erfinv"), unary, below_one),
    **calls("logit.default", unary, below_one_and_positive),
    **calls(default("_conj conj_physical resolve_conj angle"), unary, complexes),
    **calls("threshold.default", with_number, f, 0.1, 0.5),
    **calls("polygamma.default", polygamma),
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
    **calls("__xor__.Tensor", binary, bools, bools),
    **calls("bitwise_left_shift.Tensor bitwise_right_shift.Tensor", binary, few, few),
    **calls(
        "__lshift__.Scalar __rshift__.Scalar bitwise_left_shift.Tensor_Scalar bitwise_right_shift.Tensor_Scalar "
        "bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar __and__.Scalar __or__.Scalar __xor__.Scalar",
        with_number,
        few,
        2,
    ),
    **calls("hypot.default copysign.Tensor", binary, f, positive),
    **calls("heaviside.default", binary, still, still),
    **calls("logaddexp.default logaddexp2.default complex.default _prelu_kernel.default", binary, f, f),
    **calls("lerp.Tensor clamp.Tensor addcmul.default addcdiv.default", of_three),
    **calls("bucketize.Tensor", bucketized),
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
    **calls("runtime.with_gradient_of", alike, still, f),
}
