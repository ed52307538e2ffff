"""Sorting, picking and counting along a dim, and rows that each choose a matrix: what routers and experts do."""

from __future__ import annotations

from ndcompile.rules.contract import reduction
from ndcompile.rules.notation import Call, Rule, RuleError, Signature, line
from ndcompile.rules.views import along
from ndcompile.size import ONE, Size

SORTED = along(default=-1, linear=False)
"""Order is of the whole dim, so that dim is whole."""

PICKED = reduction(linear=False)


def scattered(call: Call) -> Signature:
    """`scatter_add(x, dim, index, src)`: whole along `dim` of `x`, where each part of `src` adds its own share.

    Another dim is tied to that of `x` only where they are of one size: a shorter index leaves a part of `x`.
    """
    x, index = _scattered(call, along="j")
    return line(f"({x}) + ({index})({index}) -> {x}")(call)


def overwritten(call: Call) -> Signature:
    """`scatter(x, dim, index, value)` with a number or a tensor: the last to write wins, so `dim` is whole in all."""
    x, index = _scattered(call, along="j!")
    return line(f"f({', '.join([x, index, index][: len(call.operands)])}) -> {x}")(call)


def reduced(call: Call) -> Signature:
    """`scatter_reduce`: a sum that starts from `x` is `scatter_add`; else `dim` is whole in all."""
    if call.arguments["reduce"] == "sum" and call.arguments["include_self"]:
        return scattered(call)
    return overwritten(call)


def _scattered(call: Call, along: str) -> tuple[str, str]:
    """The dims of `x`, and those of the index and of the tensor that is written, which are of one shape."""
    target, index, *source = call.operands
    if source and source[0] != index:
        raise RuleError(
            f"{call.name} with an index that is shorter than its source has no rule, nor a gradient in torch"
        )
    at = call.arguments["dim"] % len(target)
    tied = [n == m and d != at for d, (n, m) in enumerate(zip(target, index, strict=True))]
    x = " ".join(f"d{d}" if same else f"x{d}!" for d, same in enumerate(tied))
    i = " ".join(along if d == at else f"d{d}" if same else f"i{d}!" for d, same in enumerate(tied))
    return x, i


def added(call: Call) -> Signature:
    """`index_add(x, dim, index, src)`: as `scatter_add`, with one index for each slice of `src`."""
    rank = len(call.operands[0])
    at = call.arguments["dim"] % rank if rank else 0
    x = " ".join("x!" if d == at else f"d{d}" for d in range(rank))
    s = " ".join("j" if d == at else f"d{d}" for d in range(rank))
    return line(f"({x}) + (j)({s}) -> {x}")(call)


def put(linear: bool) -> Rule:
    """One index for each slice that takes the place of what is there, or is reduced with it: `dim` is whole in all."""

    def rule(call: Call) -> Signature:
        rank = len(call.operands[0])
        at = call.arguments["dim"] % rank if rank else 0
        x, s = (" ".join(other if d == at else f"d{d}" for d in range(rank)) for other in ("x!", "j!"))
        x, i, *more = [x, "j!", s][: len(call.operands)]
        return line(f"({x}) + ({i})({more[0]}) -> {x}" if linear else f"f({', '.join([x, i, *more])}) -> {x}")(call)

    return rule


def taken(call: Call) -> Signature:
    """`index_select(x, dim, index)`: linear in `x`, which is whole along `dim`."""
    rank = len(call.operands[0])
    at = call.arguments["dim"] % rank
    x = " ".join("x!" if d == at else f"d{d}" for d in range(rank))
    y = " ".join("j" if d == at else f"d{d}" for d in range(rank))
    return line(f"({x})(j) -> {y}")(call)


def searched(call: Call) -> Signature:
    """`searchsorted(sorted, x)`: what is sorted is whole; of several rows each has its own."""
    return line("f(b!, *) -> *" if len(call.operands[0]) == 1 else "f(* b!, * n) -> * n")(call)


def counted(call: Call) -> Signature:
    """A histogram: ranks count the elements they hold, and the sum is of all; the count is linear in nothing."""
    names = [f"d{i}" for i in range(len(call.operands[0]))]
    sizes: dict[str, Size] = dict(zip(names, call.operands[0], strict=True)) | {"bins": call.output[0]}
    given = tuple((name,) if sizes[name] != ONE else () for name in names)
    return Signature((given,), (("bins",),), sizes, ((0,),), frozenset(), frozenset({"bins"}))


def repeated(call: Call) -> Signature:
    """`repeat_interleave(x, n, dim)`: a dim becomes that dim times n; without `dim`, all dims times n become one.

    The repetitions are whole: each rank makes all of its own elements.
    """
    if call.arguments.get("output_size") is not None:
        raise RuleError("repeat_interleave with output_size= has no rule: it counts the elements of all ranks")
    shape, dim = call.operands[0], call.arguments.get("dim")
    names = [f"d{i}" for i in range(len(shape))]
    sizes = dict(zip(names, shape, strict=True)) | {"n": Size(call.arguments["repeats"])}
    given = tuple((name,) if sizes[name] != ONE else () for name in names)
    new = ("n",) if sizes["n"] != ONE else ()
    if dim is None:
        output: tuple[tuple[str, ...], ...] = (tuple(f for dims in given for f in dims) + new,)
    else:
        output = tuple(dims + new * (d == dim % len(shape)) for d, dims in enumerate(given))
    return Signature((given,), output, sizes, ((0,),), frozenset({0}), frozenset({"n"}))


def grouped(call: Call) -> Signature:
    """`grouped_linear(x, weight, ids)`: a product that contracts k, with the matrix that each row chooses."""
    matrices = "e! k n" if call.arguments["transposed"] else "e! n k"
    return line(f"(s k)({matrices})(s) -> s n")(call)


RULES: dict[str, Rule] = {
    "aten.topk.default": SORTED,
    "aten.sort.default": SORTED,
    "aten.sort.stable": SORTED,
    "aten.argsort.default": SORTED,
    "aten.argsort.stable": SORTED,
    "aten.median.dim": PICKED,
    "aten.mode.default": PICKED,
    "aten.kthvalue.default": PICKED,
    "aten.max.dim": PICKED,
    "aten.min.dim": PICKED,
    "aten.scatter_add.default": scattered,
    "aten.scatter_reduce.two": reduced,
    "aten.scatter.src": overwritten,
    "aten.scatter.value": overwritten,
    "aten.index_add.default": added,
    "aten.index_copy.default": put(linear=True),
    "aten.index_reduce.default": put(linear=False),
    "aten.index_fill.int_Scalar": put(linear=False),
    "aten.index_select.default": taken,
    "aten.searchsorted.Tensor": searched,
    "aten.one_hot.default": line("f(*) -> * c!"),
    "runtime.histogram": counted,
    "aten.repeat_interleave.self_int": repeated,
    "runtime.grouped_linear": grouped,
}
