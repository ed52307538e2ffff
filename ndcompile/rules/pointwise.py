"""Element by element: one line each; what is not said to be linear is not."""

from __future__ import annotations

from ndcompile.rules.notation import Call, Rule, Signature, line

UNARY = line("f(*) -> *")
BINARY = line("f(*) -> *", "f(*, *) -> *")
LINEAR = line("* -> *")
SUM = line("f(*) -> *", "* + * -> *")
PRODUCT = line("* -> *", "(*)(*) -> *")
QUOTIENT = line("* -> *", "(*)/(*) -> *")


def where(call: Call) -> Signature:
    """`c·a + (1 - c)·b`: linear in both branches, if both are tensors."""
    bound = line("f(*) -> *", "f(*, *) -> *", "f(*, *, *) -> *")(call)
    if len(call.operands) < 3:
        return bound
    return Signature(bound.operands, bound.output, bound.sizes, ((0, 1), (0, 2)), frozenset({1, 2}))


def mixed(call: Call) -> Signature:
    """`lerp` with a weight for each element: `(1 - w)·a + w·b`, linear in both ends."""
    bound = line("f(*, *, *) -> *")(call)
    return Signature(bound.operands, bound.output, bound.sizes, ((0, 2), (1, 2)), frozenset({0, 1}))


def cast_like(call: Call) -> Signature:
    """The second operand lends its dtype alone: sharded with the first where their shapes agree, else whole."""
    first, second = call.operands
    if first == second:
        return BINARY(call)
    lent = " ".join(f"w{d}!" for d in range(len(second)))
    return line(f"f(*, {lent}) -> *")(call)


def _named(rule: Rule, names: str) -> dict[str, Rule]:
    return {f"aten.{name}": rule for name in names.split()}


RULES: dict[str, Rule] = {
    **_named(
        LINEAR,
        "neg.default mul.Scalar div.Scalar deg2rad.default rad2deg.default _conj.default conj_physical.default "
        "resolve_conj.default",
    ),
    **_named(SUM, "complex.default lerp.Scalar add.Tensor sub.Tensor add.Scalar sub.Scalar rsub.Scalar"),
    **_named(PRODUCT, "mul.Tensor"),
    **_named(QUOTIENT, "div.Tensor"),
    **_named(
        UNARY,
        "relu.default gelu.default silu.default tanh.default sigmoid.default exp.default log.default sqrt.default "
        "rsqrt.default reciprocal.default sin.default cos.default abs.default erf.default softplus.default "
        "leaky_relu.default elu.default hardtanh.default mish.default hardswish.default relu6.default sign.default "
        "pow.Tensor_Scalar pow.Scalar square.default clamp.default clamp_min.default clamp_max.default "
        "acos.default asin.default acosh.default asinh.default atanh.default erfc.default "
        "logical_not.default bitwise_not.default isnan.default isinf.default "
        "eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar log1p.default expm1.default floor.default "
        "ceil.default round.default trunc.default log2.default exp2.default tan.default atan.default sinh.default "
        "cosh.default log_sigmoid.default selu.default celu.default hardsigmoid.default nan_to_num.default "
        "frac.default sinc.default erfinv.default lgamma.default digamma.default polygamma.default logit.default "
        "hardshrink.default softshrink.default threshold.default signbit.default i0.default angle.default "
        "__lshift__.Scalar __rshift__.Scalar bitwise_left_shift.Tensor_Scalar bitwise_right_shift.Tensor_Scalar "
        "bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar __and__.Scalar __or__.Scalar __xor__.Scalar "
        "to.dtype to.device to.dtype_layout _to_copy.default",
    ),
    **_named(
        BINARY,
        "eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor logical_and.default logical_or.default "
        "bitwise_and.Tensor bitwise_or.Tensor __and__.Tensor __or__.Tensor maximum.default minimum.default "
        "pow.Tensor_Tensor floor_divide.default remainder.Scalar remainder.Tensor masked_fill.Scalar "
        "max.other min.other polar.default clamp_min.Tensor clamp_max.Tensor atan2.default fmod.Scalar fmod.Tensor "
        "hypot.default heaviside.default copysign.Tensor logaddexp.default logaddexp2.default __xor__.Tensor "
        "bitwise_left_shift.Tensor bitwise_right_shift.Tensor _prelu_kernel.default "
        "bitwise_xor.Tensor logical_xor.default div.Tensor_mode div.Scalar_mode xlogy.Tensor",
    ),
    "runtime.with_gradient_of": SUM,  # x.detach() + (y - y.detach())
    "aten.lerp.Tensor": mixed,
    "aten.clamp.Tensor": line("f(*) -> *", "f(*, *) -> *", "f(*, *, *) -> *"),
    "aten.addcmul.default": line("* + (*)(*) -> *"),
    "aten.addcdiv.default": line("* + (*)/(*) -> *"),
    "aten.bucketize.Tensor": line("f(*, b!) -> *"),
    "aten.to.other": cast_like,
    "aten.type_as.default": cast_like,
    "aten.masked_fill.Tensor": line("f(*, *, ) -> *"),
    "aten.where.self": where,
    "aten.where.ScalarOther": where,
    "aten.where.ScalarSelf": where,
}
