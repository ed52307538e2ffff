"""What each ATen op is in a prime field, forward and backward: one entry an op."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ndcompile.verify.domain import NotInDomain

if TYPE_CHECKING:
    from ndcompile.verify.field import Field

LONGEST = 1 << 13
"""The longest contraction that is exact in one piece, since a product of two residues is below 2⁴⁰."""

MOVES = frozenset(
    "view _unsafe_view reshape alias detach clone t transpose permute movedim unsqueeze squeeze expand slice select "
    "narrow split split_with_sizes unsafe_split unsafe_split_with_sizes chunk unbind as_strided as_strided_ cat stack "
    "copy_ copy _foreach_copy_ lift_fresh_copy contiguous embedding index_select index gather take_along_dim "
    "masked_fill_zero slice_backward select_backward slice_scatter select_scatter unfold diagonal flip roll repeat "
    "zeros_like empty_like new_empty new_zeros empty_strided zero_ new_empty_strided tril triu _reshape_alias view_as "
    "constant_pad_nd_zero masked_select resize_ isinf isnan diagonal_backward ones_like "
    "new_ones view_as_real view_as_complex complex diag_embed diagonal_copy index_copy im2col upsample_nearest1d "
    "upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d "
    "_upsample_nearest_exact3d reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d "
    "replication_pad3d max_unpool2d max_unpool3d transpose_ squeeze_ unsqueeze_".split()
)
"""Ops that move elements, or make zeros and ones: torch's own do that to residues as well."""

SUMS = (
    "unfold_backward col2im upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward "
    "_upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward _upsample_nearest_exact3d_backward "
    "reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward replication_pad1d_backward "
    "replication_pad2d_backward replication_pad3d_backward trace nansum"
).split()
"""Ops that add up elements that they move."""

CONSTANTS = frozenset("full_like new_full fill_ lift_fresh scalar_tensor empty full eye".split())
"""Ops that bring in true numbers."""


def _add(d: Field, a: Any, b: Any, alpha: Any = 1) -> Tensor:
    b = d.element(b)
    return d.mod(d.element(a) + (b if alpha == 1 else d.number(alpha) * b))


def _sub(d: Field, a: Any, b: Any, alpha: Any = 1) -> Tensor:
    return _add(d, a, b, -alpha)


def _rsub(d: Field, a: Any, b: Any, alpha: Any = 1) -> Tensor:
    return _add(d, b, a, -alpha) if isinstance(b, Tensor) else d.mod(d.number(b) - d.number(alpha) * a)


def _mul(d: Field, a: Any, b: Any) -> Tensor:
    return d.mod(d.element(a) * d.element(b))


def _div(d: Field, a: Any, b: Any, rounding_mode: str | None = None) -> Tensor:
    if rounding_mode is not None:
        raise NotInDomain("a division that rounds has no meaning in the prime field")
    return d.mod(d.element(a) * d.inverse(d.element(b)))


def _pow(d: Field, x: Tensor, exponent: Any) -> Tensor:
    if not isinstance(x, Tensor):
        return d.function(("power of", x), exponent)
    if isinstance(exponent, Tensor):
        raise NotInDomain("a power to a tensor has no meaning in the prime field")
    if exponent != int(exponent) or abs(exponent) > 16:
        return d.function("sqrt" if exponent == 0.5 else "rsqrt" if exponent == -0.5 else ("pow", exponent), x)
    factor = x if exponent >= 0 else d.inverse(x)
    result = torch.ones_like(x)
    for _ in range(abs(int(exponent))):
        result = d.mod(result * factor)
    return result


def _sum(d: Field, x: Tensor, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    return d.mod(torch.sum(x, _dims(x, dim), keepdim))


def _mean(d: Field, x: Tensor, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    dims = _dims(x, dim)
    count = math.prod(x.shape[i] for i in dims)
    return d.mod(_sum(d, x, dims, keepdim) * d.inverse(float(count)))


def _dims(x: Tensor, dim: Any) -> list[int]:
    listed = [dim] if isinstance(dim, int) else list(dim or [])
    return [i % max(x.dim(), 1) for i in listed] if x.dim() and listed else list(range(x.dim()))


def _variance(
    d: Field, x: Tensor, dim: Any = None, correction: Any = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    dims = _dims(x, dim)
    count = math.prod(x.shape[i] for i in dims)
    mean = _mean(d, x, dims, True)
    squares = _sum(d, _mul(d, off := _sub(d, x, mean), off), dims, keepdim)
    left = count - (1 if correction is None else int(correction))
    return d.mod(squares * d.inverse(float(left))), mean if keepdim else mean.squeeze(dims)


def _var(d: Field, x: Tensor, dim: Any = None, correction: Any = None, keepdim: bool = False) -> Tensor:
    return _variance(d, x, dim, correction, keepdim)[0]


def _matmul(d: Field, a: Tensor, b: Tensor) -> Tensor:
    """`[…, n, k] @ […, k, m]`, the contraction in pieces that are exact."""
    pieces = zip(a.split(LONGEST, -1), b.split(LONGEST, -2 if b.dim() > 1 else 0), strict=True)
    total = None
    for one, two in pieces:
        part = d.mod(one @ two)
        total = part if total is None else d.mod(total + part)
    return total if total is not None else a @ b


def _addmm(d: Field, bias: Tensor, a: Tensor, b: Tensor, beta: Any = 1, alpha: Any = 1) -> Tensor:
    return _add(d, _mul(d, bias, beta), _matmul(d, a, b), alpha)


def _addbmm(d: Field, bias: Tensor, a: Tensor, b: Tensor, beta: Any = 1, alpha: Any = 1) -> Tensor:
    return _add(d, _mul(d, bias, beta), _sum(d, _matmul(d, a, b), 0), alpha)


def _addcmul(d: Field, x: Tensor, a: Tensor, b: Tensor, value: Any = 1) -> Tensor:
    return _add(d, x, _mul(d, a, b), value)


def _addcdiv(d: Field, x: Tensor, a: Tensor, b: Tensor, value: Any = 1) -> Tensor:
    return _add(d, x, _div(d, a, b), value)


def _lerp(d: Field, a: Tensor, b: Tensor, weight: Any) -> Tensor:
    return _add(d, a, _mul(d, _sub(d, b, a), weight))


def _cumsum(d: Field, x: Tensor, dim: int, dtype: Any = None) -> Tensor:
    return d.mod(x.cumsum(dim))


def _norm(d: Field, x: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    if ord == 1:
        return _sum(d, d.function("abs", x), dim, keepdim)
    if ord != 2:
        raise NotInDomain(f"the norm of order {ord} has no meaning in the prime field")
    return d.function("sqrt", _sum(d, _mul(d, x, x), dim, keepdim))


def _softmax(d: Field, x: Tensor, dim: int, half_to_float: Any = None) -> Tensor:
    powers = d.function("exp", x)
    return _div(d, powers, _sum(d, powers, [dim], True))


def _safe_softmax(d: Field, x: Tensor, dim: int, dtype: Any = None) -> Tensor:
    """A row that is minus infinity everywhere gives zeros."""
    powers, nothing = d.function("exp", x), (x == -math.inf).all(dim, keepdim=True)
    total = _sum(d, powers, [dim], True).masked_fill(nothing, 1)
    return _div(d, powers, total)


def _softmax_backward(d: Field, gradient: Tensor, out: Tensor, dim: int, dtype: Any = None) -> Tensor:
    return _mul(d, out, _sub(d, gradient, _sum(d, _mul(d, gradient, out), [dim], True)))


def _log_softmax(d: Field, x: Tensor, dim: int, half_to_float: Any = None) -> Tensor:
    return _sub(d, x, d.function("log", _sum(d, d.function("exp", x), [dim], True)))


def _log_softmax_backward(d: Field, gradient: Tensor, out: Tensor, dim: int, dtype: Any = None) -> Tensor:
    return _sub(d, gradient, _mul(d, d.function("exp", out), _sum(d, gradient, [dim], True)))


def _layer_norm(
    d: Field, x: Tensor, shape: Sequence[int], weight: Any, bias: Any, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dims = list(range(x.dim() - len(shape), x.dim()))
    variance, mean = _variance(d, x, dims, 0, True)
    rstd = d.function("rsqrt", _add(d, variance, eps))
    y = _mul(d, _sub(d, x, mean), rstd)
    y = y if weight is None else _mul(d, y, weight)
    return (y if bias is None else _add(d, y, bias)), mean, rstd


def _layer_norm_backward(
    d: Field, gradient: Tensor, x: Tensor, shape: Sequence[int], mean: Tensor, rstd: Tensor, weight: Any, bias: Any,
    mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    own, others = list(range(x.dim() - len(shape), x.dim())), list(range(x.dim() - len(shape)))
    normed = _mul(d, _sub(d, x, mean), rstd)
    inner = gradient if weight is None else _mul(d, gradient, weight)
    along = _mul(d, normed, _mean(d, _mul(d, inner, normed), own, True))
    found = _mul(d, rstd, _sub(d, _sub(d, inner, _mean(d, inner, own, True)), along))
    of_weight, of_bias = _mul(d, gradient, normed), gradient
    if others:
        of_weight, of_bias = _sum(d, of_weight, others), _sum(d, of_bias, others)
    return found if mask[0] else None, of_weight if mask[1] else None, of_bias.clone() if mask[2] else None


def _rms_norm(d: Field, x: Tensor, shape: Sequence[int], weight: Any, eps: float | None) -> tuple[Tensor, Tensor]:
    dims = list(range(x.dim() - len(shape), x.dim()))
    squares = _mean(d, _mul(d, x, x), dims, True)
    rstd = d.function("rsqrt", _add(d, squares, torch.finfo(torch.float64).eps if eps is None else eps))
    y = _mul(d, x, rstd)
    return (y if weight is None else _mul(d, y, weight)), rstd


def _rms_norm_backward(
    d: Field, gradient: Tensor, x: Tensor, shape: Sequence[int], rstd: Tensor, weight: Any, mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    own, others = list(range(x.dim() - len(shape), x.dim())), list(range(x.dim() - len(shape)))
    normed = _mul(d, x, rstd)
    inner = gradient if weight is None else _mul(d, gradient, weight)
    found = _mul(d, rstd, _sub(d, inner, _mul(d, normed, _mean(d, _mul(d, inner, normed), own, True))))
    of_weight = _mul(d, gradient, normed)
    return found if mask[0] else None, (_sum(d, of_weight, others) if others else of_weight) if mask[1] else None


def _embedding_backward(
    d: Field, gradient: Tensor, ids: Tensor, rows: int, padding: int, scale_by_frequency: bool
) -> Tensor:
    if scale_by_frequency:
        raise NotInDomain("an embedding whose gradient is scaled by frequency")
    found = gradient.new_zeros(rows, gradient.shape[-1])
    found.index_add_(0, ids.flatten(), gradient.reshape(-1, gradient.shape[-1]))
    if padding >= 0:
        found[padding] = 0
    return d.mod(found)


def _scattered(method: str) -> Callable[..., Tensor]:
    def run(d: Field, x: Tensor, dim: int, index: Tensor, source: Any, **kwargs: Any) -> Tensor:
        return d.mod(getattr(x, method)(dim, index, d.element(source), **kwargs))

    return run


def _scatter_reduce(
    d: Field, x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """Sums and means, and the largest or smallest by the random order; products of many have no short form."""
    if reduce in ("amax", "amin"):
        ordered = (d.order(each) for each in (x, source))
        places = torch.scatter_reduce(next(ordered), dim, index, next(ordered), reduce, include_self=include_self)
        if not include_self:  # what nothing is written to stays
            written = torch.zeros_like(x).scatter(dim, index, 1.0).bool()
            places = torch.where(written, places, d.order(x))
        return d.elements_in_order()[places.long()]
    if reduce not in ("sum", "mean"):
        raise NotInDomain(f"a scatter that takes the {reduce} has no meaning in the prime field")
    total = d.mod(x.scatter_reduce(dim, index, source, "sum", include_self=include_self))
    if reduce == "sum":
        return total
    counts = torch.full_like(x, float(include_self)).scatter_add(dim, index, torch.ones_like(source)).clamp(min=1)
    return _div(d, total, counts)


def _index_reduce(
    d: Field, x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    shape = [-1 if i == dim % x.dim() else 1 for i in range(x.dim())]
    places = index.view(shape).expand(source.shape)
    return _scatter_reduce(d, x, dim, places, source, reduce, include_self=include_self)


def _index_put(d: Field, x: Tensor, indices: Any, values: Tensor, accumulate: bool = False, *_: Any) -> Tensor:
    return d.mod(torch.ops.aten.index_put(x, indices, d.element(values), accumulate))


def _index_fill(d: Field, x: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
    return x.index_fill(dim, index, value if isinstance(value, Tensor) else d.number(value))


def _masked_fill(d: Field, x: Tensor, mask: Tensor, value: Any) -> Tensor:
    return x.masked_fill(mask, value if isinstance(value, Tensor) else d.number(value))


def _where(d: Field, condition: Tensor, a: Any, b: Any) -> Tensor:
    return torch.where(condition, d.element(a), d.element(b))


def _pad(d: Field, x: Tensor, pad: Sequence[int], value: Any = 0) -> Tensor:
    return torch.constant_pad_nd(x, pad, d.number(value))


def _cast(d: Field, x: Tensor, **kwargs: Any) -> Tensor:
    dtype, x = kwargs.get("dtype"), x.to(kwargs.get("device") or x.device)
    if dtype is None or dtype.is_floating_point:
        return x.clone()
    if dtype.is_complex:
        return x.to(torch.complex128, copy=True)
    if dtype == torch.bool:
        return x != 0
    true = d.known.value(x)  # the smallest of known numbers is another in the field's order
    return (_whole(x, f"a cast to {dtype}") if true is None else true).to(dtype)


def _whole(x: Tensor, what: str) -> Tensor:
    """Counts, and other whole numbers as long as they are small, are themselves in the field; nothing else is."""
    if not bool((x < 1000).all()):
        raise NotInDomain(f"{what} of computed numbers has no meaning in the prime field")
    return x


def _item(d: Field, x: Tensor) -> float:
    return float(_whole(x, "a look of Python at one"))


def _histc(d: Field, x: Tensor, bins: int = 100, min: Any = 0, max: Any = 0) -> Tensor:
    return torch.histc(_whole(x, "a histogram"), bins, min, max)


def _compare(by: Callable[[Tensor, Tensor], Tensor], ordered: bool = True) -> Callable[..., Tensor]:
    def run(d: Field, a: Any, b: Any) -> Tensor:
        one, two = (torch.as_tensor(d.element(v), dtype=torch.float64, device=d.device) for v in (a, b))
        return by(d.order(one), d.order(two)) if ordered else by(one, two)

    return run


def _extreme(name: str) -> Callable[..., Tensor]:
    def run(d: Field, x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
        dims = sorted(_dims(x, dim))
        for i in reversed(dims):
            x = x.gather(i, getattr(d.order(x), f"arg{name}")(i, keepdim=True))
        return x if keepdim else x.squeeze(dims)

    return run


def _extreme_with_index(name: str) -> Callable[..., Any]:
    def run(d: Field, x: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
        if dim is None:
            return _extreme(name)(d, x)
        index = getattr(d.order(x), f"arg{name}")(dim, keepdim=True)
        value = x.gather(dim, index)
        return (value, index) if keepdim else (value.squeeze(dim), index.squeeze(dim))

    return run


def _in_order(name: str) -> Callable[..., Any]:
    """An op that picks elements by their order, and says where: `median`, `kthvalue`, `cummax`."""

    def run(d: Field, x: Tensor, *args: Any) -> Any:
        if not args:
            return x.flatten()[d.order(x).flatten().median(0).indices]
        index = getattr(d.order(x), name)(*args).indices
        dim = args[1] if name == "kthvalue" and len(args) > 1 else -1 if name == "kthvalue" else args[0]
        kept = index if index.dim() == x.dim() else index.unsqueeze(dim)
        return x.gather(dim, kept).reshape(index.shape), index

    return run


def _both_extremes(d: Field, x: Tensor, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    smallest, largest = (_extreme(name)(d, x, dim, keepdim) for name in ("min", "max"))
    return smallest, largest


def _argument(name: str) -> Callable[..., Tensor]:
    def run(d: Field, x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
        found: Tensor = getattr(d.order(x), name)(dim, keepdim)
        return found

    return run


def _pick(larger: bool) -> Callable[..., Tensor]:
    def run(d: Field, a: Tensor, b: Tensor) -> Tensor:
        return torch.where((d.order(a) >= d.order(b)) == larger, a, b)

    return run


def _clamped(name: str) -> Callable[..., Tensor]:
    """By numbers a random function, by tensors their larger or smaller one."""
    number = _function(name)

    def run(d: Field, x: Tensor, min: Any = None, max: Any = None) -> Tensor:
        if not isinstance(min, Tensor) and not isinstance(max, Tensor):
            return number(d, x, min, max)
        for bound, larger in ((min, True), (max, False)):
            x = x if bound is None else _pick(larger)(d, x, bound)
        return x

    return run


def _topk(d: Field, x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    index = d.order(x).topk(k, dim, largest, True).indices
    return x.gather(dim, index), index


def _sort(d: Field, x: Tensor, dim: int = -1, descending: bool = False, stable: bool | None = None) -> Any:
    index = d.order(x).sort(dim=dim, descending=descending, stable=True).indices
    return x.gather(dim, index), index


def _function(name: str) -> Callable[..., Tensor]:
    """A nonlinear op: a random function of the element, another one for other parameters."""

    def run(d: Field, x: Tensor, *parameters: Any, **named: Any) -> Tensor:
        if any(isinstance(p, Tensor) for p in (*parameters, *named.values())):
            raise NotInDomain(f"{name} with a tensor as a parameter")
        key = (name, *parameters, *sorted(named.items()))
        return d.function(key if len(key) > 1 else name, x)

    return run


def _slope(name: str) -> Callable[..., Tensor]:
    """The backward of a nonlinear op: the gradient times a random function of what was saved."""

    def run(d: Field, gradient: Tensor, x: Tensor, *parameters: Any, **named: Any) -> Tensor:
        return _mul(d, gradient, _function(f"{name}_backward")(d, x, *parameters, **named))

    return run


def _elu_backward(d: Field, gradient: Tensor, alpha: Any, scale: Any, inner: Any, is_result: Any, x: Tensor) -> Tensor:
    return _slope("elu")(d, gradient, x, alpha, scale, inner, is_result)


def _tanh_backward(d: Field, gradient: Tensor, out: Tensor) -> Tensor:
    return _mul(d, gradient, _rsub(d, _mul(d, out, out), 1))


def _sigmoid_backward(d: Field, gradient: Tensor, out: Tensor) -> Tensor:
    return _mul(d, gradient, _mul(d, out, _rsub(d, out, 1)))


def _log_sigmoid(d: Field, x: Tensor) -> tuple[Tensor, Tensor]:
    """With what a CPU keeps for backward, which is nothing here."""
    return d.function("log_sigmoid", x), x.new_zeros(0)


def _log_sigmoid_backward(d: Field, gradient: Tensor, x: Tensor, kept: Tensor) -> Tensor:
    return _mul(d, gradient, d.function("log_sigmoid_backward", x))


def _positive(d: Field, x: Tensor) -> Tensor:
    return d.order(x) > d.order(torch.zeros_like(x))


def _prelu(d: Field, x: Tensor, weight: Tensor) -> Tensor:
    return torch.where(_positive(d, x), x, _mul(d, weight, x))


def _prelu_backward(d: Field, gradient: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    positive = _positive(d, x)
    to_weight = _mul(d, gradient, x).masked_fill(positive, 0)
    return torch.where(positive, gradient, _mul(d, weight, gradient)), to_weight


def _distances(d: Field, a: Tensor, b: Tensor, p: float, mode: int | None = None) -> Tensor:
    if p != 2:
        raise NotInDomain(f"distances of order {p} have no meaning in the prime field")
    apart = _sub(d, a.unsqueeze(-2), b.unsqueeze(-3))
    return d.function("sqrt", _sum(d, _mul(d, apart, apart), [-1]))


def _distances_backward(d: Field, gradient: Tensor, a: Tensor, b: Tensor, p: float, made: Tensor) -> Tensor:
    slope = _mul(d, gradient, d.function("inverse distance", made)).unsqueeze(-1)
    return _sum(d, _mul(d, slope, _sub(d, a.unsqueeze(-2), b.unsqueeze(-3))), [-2])


def _angle_in_degrees(factor: float) -> Callable[..., Tensor]:
    return lambda d, x: _mul(d, x, factor)


def _added_up(name: str) -> Callable[..., Tensor]:
    op = getattr(torch.ops.aten, name)
    return lambda d, *args, **named: d.mod(op(*args, **named))


def _polar(d: Field, length: Tensor, angle: Tensor) -> Tensor:
    return torch.complex(*(_mul(d, length, d.function(name, angle)) for name in ("cos", "sin")))


def _conj(d: Field, x: Tensor) -> Tensor:
    real, imaginary = torch.view_as_real(x).unbind(-1)
    return torch.complex(real, d.mod(-imaginary))


def _added_channels(weight: Tensor, dim: int, groups: int) -> int:
    """How many channels along a dim of a kernel are added up at a time, so that the sum is exact."""
    taps, added = math.prod(weight.shape[2:]), weight.shape[dim] if dim else weight.shape[0] // groups
    if taps * added <= LONGEST:
        return weight.shape[dim]
    if groups > 1 or taps > LONGEST:
        raise NotInDomain(f"a convolution of {taps * added} products an element, of {groups} groups")
    return LONGEST // taps


def _in_pieces(x: Tensor, weight: Tensor, dim: int, groups: int) -> list[tuple[Tensor, Tensor]]:
    """A tensor of channels and the kernel that they are multiplied with, as many channels as are added up at a time."""
    channels = _added_channels(weight, dim, groups)
    if channels == weight.shape[dim]:
        return [(x, weight)]
    return list(zip(x.split(channels, 1), weight.split(channels, dim), strict=True))


def _total(d: Field, parts: Sequence[Tensor]) -> Tensor:
    return d.mod(torch.stack([d.mod(part) for part in parts]).sum(0))


def _convolution(d: Field, x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any) -> Tensor:
    transposed, groups = args[3], args[5]
    pieces = _in_pieces(x, weight, 0 if transposed else 1, groups)
    y = _total(d, [torch.ops.aten.convolution(part, kernel, None, *args) for part, kernel in pieces])
    return y if bias is None else _add(d, y, bias.view(-1, *[1] * (x.dim() - 2)))


def _convolution_backward(
    d: Field, gradient: Tensor, x: Tensor, weight: Tensor, bias: Any, *args: Any
) -> tuple[Tensor | None, ...]:
    """Some samples and some channels at a time, so that no sum of products is longer than what is exact."""
    transposed, groups = args[3], args[5]
    places = math.prod((x if transposed else gradient).shape[2:])
    if places > LONGEST:
        raise NotInDomain(f"a convolution at {places} places of a sample")
    dim = 1 if transposed else 0
    found = []
    for g, kernel in _in_pieces(gradient, weight, dim, groups):
        own = None if bias is None else [g.shape[1]]
        samples = zip(g.split(LONGEST // places), x.split(LONGEST // places), strict=True)
        found.append([torch.ops.aten.convolution_backward(s, part, kernel, own, *args) for s, part in samples])
    whole: list[Callable[[int], Tensor]] = [
        lambda i: _total(d, [torch.cat([d.mod(part[i]) for part in parts]) for parts in found]),
        lambda i: torch.cat([_total(d, [part[i] for part in parts]) for parts in found], dim),
        lambda i: torch.cat([_total(d, [part[i] for part in parts]) for parts in found]),
    ]
    return tuple(None if found[0][0][i] is None else make(i) for i, make in enumerate(whole))


def _nll_loss(d: Field, x: Tensor, target: Tensor, weight: Any, reduction: int, ignore: int) -> tuple[Tensor, Tensor]:
    if weight is not None:
        raise NotInDomain("a loss with weights for classes")
    counted = target != ignore
    picked = x.gather(1, target.where(counted, 0).unsqueeze(1)).squeeze(1)
    each = d.mod(-picked).masked_fill(~counted, 0)
    count = torch.tensor(float(counted.sum()), dtype=torch.float64, device=x.device)
    if reduction == 0:
        return each, torch.zeros((), dtype=torch.float64, device=x.device)
    return (_div(d, each.sum(), count) if reduction == 1 else d.mod(each.sum())), count


def _nll_loss_backward(
    d: Field, gradient: Tensor, x: Tensor, target: Tensor, weight: Any, reduction: int, ignore: int, count: Tensor
) -> Tensor:
    counted = target != ignore
    slope = d.mod(-(_div(d, gradient, count) if reduction == 1 else gradient)).expand(target.shape)
    slope = slope.masked_fill(~counted, 0).unsqueeze(1)
    return torch.zeros_like(x).scatter_(1, target.where(counted, 0).unsqueeze(1), slope)


def _mse(d: Field, a: Tensor, b: Tensor, reduction: int = 1) -> Tensor:
    squares = _mul(d, off := _sub(d, a, b), off)
    return squares if reduction == 0 else (_mean, _sum)[reduction - 1](d, squares)


def _mse_backward(d: Field, gradient: Tensor, a: Tensor, b: Tensor, reduction: int) -> Tensor:
    found = _mul(d, _mul(d, gradient, 2), _sub(d, a, b))
    return _div(d, found, a.numel()) if reduction == 1 else found


FUNCTIONS = (
    "gelu silu relu exp expm1 exp2 log log1p log2 sqrt rsqrt tanh sigmoid sin cos erf abs sgn sign floor ceil round "
    "softplus leaky_relu elu hardtanh mish hardswish hardsigmoid log_sigmoid clamp clamp_min clamp_max relu6 "
    "atan sinh cosh acos asin acosh asinh atanh erfc frac sinc erfinv lgamma digamma logit hardshrink softshrink "
    "threshold i0 special_i1"
).split()
SLOPES = (
    "logit hardshrink softshrink gelu silu threshold softplus leaky_relu hardtanh hardswish hardsigmoid mish".split()
)

OPS: dict[str, Callable[..., Any]] = {
    **{name: _function(name) for name in FUNCTIONS},
    **{f"{name}_backward": _slope(name) for name in SLOPES},
    **{name: _added_up(name) for name in SUMS},
    "log_sigmoid_forward": _log_sigmoid, "log_sigmoid_backward": _log_sigmoid_backward,
    "_prelu_kernel": _prelu, "_prelu_kernel_backward": _prelu_backward,
    "polygamma": lambda d, n, x: d.function(("polygamma", n), x),
    "deg2rad": _angle_in_degrees(math.pi / 180), "rad2deg": _angle_in_degrees(180 / math.pi),
    "hypot": lambda d, x, y: d.function("sqrt", _add(d, _mul(d, x, x), _mul(d, y, y))),
    "logaddexp": lambda d, x, y: d.function("log", _add(d, d.function("exp", x), d.function("exp", y))),
    "logcumsumexp": lambda d, x, dim: d.function("log", _cumsum(d, d.function("exp", x), dim)),
    "_cdist_forward": _distances, "_cdist_backward": _distances_backward, "addbmm": _addbmm,
    "scatter_reduce": _scatter_reduce, "index_reduce": _index_reduce, "index_fill": _index_fill,
    "median": _in_order("median"), "kthvalue": _in_order("kthvalue"), "cummax": _in_order("cummax"),
    "cummin": _in_order("cummin"), "aminmax": _both_extremes,
    "elu_backward": _elu_backward, "tanh_backward": _tanh_backward, "sigmoid_backward": _sigmoid_backward,
    "add": _add, "sub": _sub, "rsub": _rsub, "mul": _mul, "div": _div, "pow": _pow,
    "true_divide": _div, "neg": lambda d, x: d.mod(-x), "square": lambda d, x: _mul(d, x, x),
    "reciprocal": lambda d, x: d.inverse(x),
    "sum": _sum, "mean": _mean, "var": _var, "var_mean": _variance, "cumsum": _cumsum, "linalg_vector_norm": _norm,
    "std_mean": lambda d, *a, **k: (d.function("sqrt", _var(d, *a, **k)), _variance(d, *a, **k)[1]),
    "norm": _norm, "xlogy": lambda d, x, y: _mul(d, x, d.function("log", y)),
    "std": lambda d, *a, **k: d.function("sqrt", _var(d, *a, **k)),
    "mm": _matmul, "bmm": _matmul, "mv": _matmul, "dot": _matmul, "matmul": _matmul,
    "addmm": _addmm, "baddbmm": _addmm, "addmv": _addmm,
    "polar": _polar, "_conj": _conj, "conj_physical": _conj,
    "addcmul": _addcmul, "addcdiv": _addcdiv, "lerp": _lerp,
    "_softmax": _softmax, "_safe_softmax": _safe_softmax, "_log_softmax": _log_softmax,
    "_softmax_backward_data": _softmax_backward, "_log_softmax_backward_data": _log_softmax_backward,
    "native_layer_norm": _layer_norm, "native_layer_norm_backward": _layer_norm_backward,
    "_fused_rms_norm": _rms_norm, "_fused_rms_norm_backward": _rms_norm_backward,
    "embedding_dense_backward": _embedding_backward,
    "scatter_add": _scattered("scatter_add"), "index_add": _scattered("index_add"), "scatter": _scattered("scatter"),
    "index_put": _index_put,
    "masked_fill": _masked_fill, "where": _where, "constant_pad_nd": _pad, "_to_copy": _cast,
    "_local_scalar_dense": _item, "histc": _histc,
    "eq": _compare(torch.eq, False), "ne": _compare(torch.ne, False),
    "gt": _compare(torch.gt), "lt": _compare(torch.lt), "ge": _compare(torch.ge), "le": _compare(torch.le),
    "amax": _extreme("max"), "amin": _extreme("min"), "max": _extreme_with_index("max"),
    "min": _extreme_with_index("min"), "argmax": _argument("argmax"), "argmin": _argument("argmin"),
    "clamp": _clamped("clamp"), "maximum": _pick(True), "minimum": _pick(False), "topk": _topk, "sort": _sort,
    "convolution": _convolution, "convolution_backward": _convolution_backward,
    "nll_loss_forward": _nll_loss, "nll_loss_backward": _nll_loss_backward,
    "mse_loss": _mse, "mse_loss_backward": _mse_backward,
}  # fmt: skip
"""By the op's name without its overload; the in-place form is the same op and a copy."""
