"""Element by element: each rule's rows, split against whole."""

from __future__ import annotations

import torch

from ndcompile.size import Size
from tests.rules.case import Case, bools, case, each, every_row_holds, f, ints, positive

B = Size(12, ("b",))
UNARY = (
    "neg relu gelu silu tanh sigmoid exp sin cos abs erf softplus leaky_relu elu hardtanh mish hardswish relu6 sign "
    "square expm1 floor isnan isinf ceil round trunc exp2 tan atan sinh cosh log_sigmoid selu celu hardsigmoid "
    "nan_to_num"
).split()
OF_POSITIVE = "log sqrt rsqrt reciprocal log1p log2".split()
COMPARISONS = "eq ne lt le gt ge".split()

CASES: list[Case] = [
    *(case(f"aten.{name}.default", f(6, 5)) for name in UNARY),
    *(case(f"aten.{name}.default", positive(6, 5)) for name in OF_POSITIVE),
    *(case(f"aten.{name}.Scalar", ints(6, 5, high=4), 2) for name in COMPARISONS),
    *(case(f"aten.{name}.Tensor", ints(6, 5, high=4), ints(5, high=4)) for name in COMPARISONS),
    *(case(f"aten.{name}.Scalar", f(6, 5), 3) for name in ("mul", "div", "add", "sub", "rsub", "remainder")),
    *(case(f"aten.{name}.Tensor", f(6, 5), 0.5) for name in ("mul", "add", "sub", "div")),
    *(case(f"aten.{name}.Tensor", f(4, 6, 5), f(6, 5)) for name in ("mul", "add", "sub")),
    *(case(f"aten.{name}.Tensor", f(6, 1), f(1, 5)) for name in ("mul", "add", "sub")),
    *(case(f"aten.{name}.Tensor", f(4, 6), f()) for name in ("mul", "add", "sub")),
    *(case(f"aten.{name}.Tensor", f(B, 5), f(5)) for name in ("mul", "add")),
    case("aten.add.Tensor", f(6, 5), f(6, 5), alpha=2),
    case("aten.sub.Tensor", f(5), f(6, 5), alpha=-3),
    case("aten.div.Tensor", f(6, 5), positive(6, 5)),
    case("aten.div.Tensor", f(6, 5), positive()),
    case("aten.div.Tensor", f(5), positive(6, 1)),
    case("aten.div.Tensor", f(6), ints(6, low=1, high=9)),
    case("aten.pow.Tensor_Scalar", positive(6, 5), 3),
    case("aten.pow.Scalar", 2.0, f(6, 5)),
    case("aten.pow.Tensor_Tensor", positive(6, 5), f(5)),
    case("aten.clamp.default", f(6, 5), -0.5, 0.5),
    case("aten.clamp_min.default", f(6, 5), 0),
    case("aten.clamp_max.default", f(6, 5), 0.1),
    case("aten.logical_not.default", bools(6, 5)),
    case("aten.bitwise_not.default", bools(6, 5)),
    case("aten.logical_and.default", bools(6, 5), bools(5)),
    case("aten.logical_or.default", bools(6, 5), bools(6, 1)),
    case("aten.bitwise_and.Tensor", bools(6, 5), bools(5)),
    case("aten.bitwise_or.Tensor", bools(6, 5), bools()),
    case("aten.__and__.Tensor", bools(6, 5), bools(5)),
    case("aten.__or__.Tensor", bools(5), bools(6, 5)),
    case("aten.maximum.default", f(6, 5), f(5)),
    case("aten.min.other", f(6, 5), f(5)),
    case("aten.max.other", f(6, 1), f(6, 5)),
    case("aten.lerp.Scalar", f(6, 5), f(6, 5), 0.3),
    case("aten.minimum.default", f(6, 1), f(5)),
    case("aten.floor_divide.default", ints(6, 5, high=9), ints(5, low=1, high=4)),
    case("aten.remainder.Tensor", ints(6, 5, high=9), ints(5, low=1, high=4)),
    case("aten.polar.default", f(6, 5), f(5)),
    case("aten.max.other", f(6, 5), f(5)),
    case("aten.min.other", ints(6, 5, high=9), ints(high=9)),
    case("aten.clamp_min.Tensor", f(6, 5), f(5)),
    case("aten.clamp_max.Tensor", f(6, 5), f()),
    case("aten.atan2.default", f(6, 5), positive(5)),
    case("aten.fmod.Scalar", f(6, 5), 3),
    case("aten.fmod.Tensor", ints(6, 5, high=9), ints(5, low=1, high=4)),
    case("aten.bitwise_xor.Tensor", bools(6, 5), bools(5)),
    case("aten.logical_xor.default", bools(6, 5), bools(6, 1)),
    case("aten.div.Tensor_mode", ints(6, 5, high=9), ints(5, low=1, high=4), rounding_mode="floor"),
    case("aten.div.Scalar_mode", ints(6, 5, high=9), 2, rounding_mode="trunc"),
    case("aten.masked_fill.Scalar", f(4, 6, 5), bools(6, 5), -1.0),
    case("aten.masked_fill.Scalar", f(6, 5), bools(6, 1), 0.0),
    case("aten.masked_fill.Tensor", f(6, 5), bools(5), f()),
    case("aten.where.self", bools(6, 5), f(6, 5), f(6, 5)),
    case("aten.where.self", bools(6, 1), f(5), f()),
    case("aten.where.self", bools(6, 5), f(6, 5), f(grad=False)),
    case("aten.where.ScalarOther", bools(6, 5), f(5), 0.0),
    case("aten.where.ScalarSelf", bools(5), 1.0, f(6, 5)),
    case("aten.to.dtype", f(6, 5), torch.float64),
    case("aten.to.dtype", bools(6, 5), torch.float64),
    case("aten.to.device", f(6, 5), torch.device("cpu"), torch.float64),
    case("aten.to.dtype_layout", ints(6, 5, high=3), dtype=torch.float64),
    case("aten._to_copy.default", f(6, 5), dtype=torch.float64),
    case("aten.to.other", ints(6, 5, high=3), f(5)),
    case("aten.to.other", f(6, 5), f(6, 5)),
    case("aten.type_as.default", ints(6, 5, high=3), f()),
    case("aten.type_as.default", f(6, 5), f(6, 5)),
]


@each(CASES)
def test_rows_hold(given: Case) -> None:
    every_row_holds(given)
