"""The conversions between placements: each one function, named as its row of the table, right in both directions.

A dim that is `balanced` lies head–tail on the ranks (`sequence.py`); the whole of it is always in its natural order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ndcompile.placement import BY_NAME
from ndcompile.runtime import private
from ndcompile.runtime.mesh import Ranks
from ndcompile.runtime.sequence import dealt, exchange, natural, refuse_odd, spans
from ndcompile.runtime.wires import by_copies, start_all_gather, start_reduce_scatter


def replicate(x: Tensor, axis: Ranks, *, dtype: torch.dtype | None = None) -> Tensor:
    """I → R: nothing forward, the gradient is summed over the axis (in `dtype`)."""
    return _convert("replicate", x, axis, dtype=dtype)


def invariant(x: Tensor, axis: Ranks) -> Tensor:
    """R → I: nothing forward, the gradient is kept by the first rank only."""
    return _convert("invariant", x, axis)


def shard(x: Tensor, axis: Ranks, dim: int, *, size: int | None = None, balanced: bool = False) -> Tensor:
    """R → S(dim): own part forward, `[…, size, …] → […, part, …]`; the gradient is padded with zeros."""
    return _convert("shard", x, axis, dim, size=_whole(x, axis, dim, size), balanced=balanced)


def partial(x: Tensor, axis: Ranks) -> Tensor:
    """R → P: the first rank's tensor and zeros elsewhere, in both directions."""
    return _convert("partial", x, axis)


def shard_invariant(x: Tensor, axis: Ranks, dim: int, *, size: int | None = None, balanced: bool = False) -> Tensor:
    """I → S(dim): own part forward, `[…, size, …] → […, part, …]`; the gradient is gathered."""
    return _convert("shard_invariant", x, axis, dim, size=_whole(x, axis, dim, size), balanced=balanced)


def partial_invariant(x: Tensor, axis: Ranks) -> Tensor:
    """I → P: the first rank's tensor and zeros elsewhere; nothing on the gradient."""
    return _convert("partial_invariant", x, axis)


def all_gather(
    x: Tensor,
    axis: Ranks,
    dim: int,
    *,
    size: int | None = None,
    dtype: torch.dtype | None = None,
    balanced: bool = False,
) -> Tensor:
    """S(dim) → R: `[…, part, …] → […, size, …]`; the gradient is reduce-scattered (in `dtype`)."""
    return _convert("all_gather", x, axis, dim, size=size, dtype=dtype, balanced=balanced)


def all_gather_invariant(
    x: Tensor, axis: Ranks, dim: int, *, size: int | None = None, balanced: bool = False
) -> Tensor:
    """S(dim) → I: `[…, part, …] → […, size, …]`; the gradient's own part, without communication."""
    return _convert("all_gather_invariant", x, axis, dim, size=size, balanced=balanced)


def all_to_all(
    x: Tensor,
    axis: Ranks,
    source: int,
    target: int,
    *,
    size: int | None = None,
    balanced: bool = False,
    balanced_target: bool = False,
) -> Tensor:
    """S(source) → S(target), in both directions; `size` is the whole size of dim `source`.

    `[…, part of size, …, whole, …] → […, size, …, part of whole, …]`
    """
    other = x.shape[target] if x.shape[target] % axis.size else None
    return _convert(
        "all_to_all", x, axis, source, target=target, size=size, other=other,
        balanced=balanced, balanced_target=balanced_target,
    )  # fmt: skip


@torch.compiler.disable
def in_order(x: Tensor, axis: Ranks, dim: int) -> Tensor:
    """S(dim), head–tail → S(dim), in one part each: a rank's two chunks go where they stand in order, and back.

    It stands at results, outside of what is compiled.
    """
    return _convert("in_order", x, axis, dim, target=dim, balanced=True)


def pad(x: Tensor, axis: Ranks, dim: int, *, size: int | None = None, balanced: bool = False) -> Tensor:
    """S(dim) → P: own part among zeros, `[…, part, …] → […, size, …]`; the gradient's own part."""
    return _convert("pad", x, axis, dim, size=size, balanced=balanced)


def all_reduce(x: Tensor, axis: Ranks, op: str = "sum", *, dtype: torch.dtype | None = None) -> Tensor:
    """P(op) → R: reduced over the axis, and so is the gradient; max and min carry no gradient."""
    return _reduce("all_reduce", x, axis, op, dtype)


def all_reduce_invariant(x: Tensor, axis: Ranks, op: str = "sum", *, dtype: torch.dtype | None = None) -> Tensor:
    """P(op) → I: reduced over the axis; nothing on the gradient; max and min carry none."""
    return _reduce("all_reduce_invariant", x, axis, op, dtype)


def reduce_scatter(
    x: Tensor,
    axis: Ranks,
    dim: int,
    *,
    size: int | None = None,
    dtype: torch.dtype | None = None,
    balanced: bool = False,
) -> Tensor:
    """P → S(dim): summed, own part kept, `[…, size, …] → […, part, …]`; the gradient is gathered."""
    return _convert("reduce_scatter", x, axis, dim, size=_whole(x, axis, dim, size), dtype=dtype, balanced=balanced)


@dataclass(frozen=True)
class Along:
    """What a primitive needs to know: the ranks, the dim (and `target`), its whole size where uneven, dtype, orders."""

    group: str
    ranks: int
    index: int
    dim: int
    target: int
    size: int | None
    other: int | None
    op: str
    dtype: torch.dtype | None
    balanced: bool = False
    balanced_target: bool = False

    @property
    def axis(self) -> Ranks:
        return Ranks(self.group, self.ranks, self.index, self.group)


def _convert(
    name: str,
    x: Tensor,
    axis: Ranks,
    dim: int = 0,
    *,
    target: int = 0,
    size: int | None = None,
    other: int | None = None,
    dtype: torch.dtype | None = None,
    balanced: bool = False,
    balanced_target: bool = False,
) -> Tensor:
    if axis.size == 1:
        return x
    row, dims = BY_NAME[name], max(x.dim(), 1)
    places = dim % dims, target % dims, size, other
    along = axis.group, axis.size, axis.index, *places, "sum", dtype, balanced, balanced_target
    return Convert.apply(x, row.forward, row.backward, along)


def _reduce(name: str, x: Tensor, axis: Ranks, op: str, dtype: torch.dtype | None) -> Tensor:
    if op == "sum":
        return _convert(name, x, axis, dtype=dtype)
    if op not in ("max", "min"):
        raise ValueError(f"cannot reduce by '{op}' on axis '{axis.name}'\n  try  sum, max or min")
    x = x.detach()
    if axis.size == 1:
        return x
    return _perform("all_reduce", x, Along(axis.group, axis.size, axis.index, 0, 0, None, None, op, dtype))


def _whole(x: Tensor, axis: Ranks, dim: int, size: int | None) -> int | None:
    """`size`, after a check that dim `dim` of `x` has it, or divides by the axis where none is given."""
    if size is None and x.shape[dim] % axis.size:
        raise ValueError(
            f"dim {dim} of a tensor {tuple(x.shape)} does not divide by the {axis.size} ranks of '{axis.name}'\n"
            f"  why  without a size, equal parts are meant\n"
            f"  try  size={x.shape[dim]}, for parts as torch.chunk makes them"
        )
    if size is not None and x.shape[dim] != size:
        raise ValueError(f"dim {dim} of a tensor {tuple(x.shape)} has size {x.shape[dim]}, but size={size} was given")
    return size


class Convert(torch.autograd.Function):
    """A primitive on the value forward, and one on its gradient backward; `along` is an `Along`, which dynamo knows as
    a tuple.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: str, backward: str, along: tuple[Any, ...]) -> Tensor:
        ctx.later = backward, back(backward, along)
        return _perform(forward, x, Along(*along))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        primitive, along = ctx.later
        return _perform(primitive, gradient, Along(*along)), None, None, None


def back(primitive: str, along: tuple[Any, ...]) -> tuple[Any, ...]:
    """For the primitive on the gradient: an exchange goes the other way."""
    if primitive != "all_to_all":
        return along
    group, ranks, index, dim, target, size, other, op, dtype, balanced, balanced_target = along
    return group, ranks, index, target, dim, other, size, op, dtype, balanced_target, balanced


def _perform(primitive: str, x: Tensor, along: Along) -> Tensor:
    """A primitive. Its ranks hold a balanced dim head–tail: a whole is put in that order before it is cut, and back."""
    if primitive == "all_to_all" and along.dim == along.target:
        return _reordered(x, along)
    if along.balanced and primitive == "chunk":
        own = spans(x.shape[along.dim], along.axis)
        return torch.cat([x.narrow(along.dim, start, stop - start) for start, stop in own], along.dim)
    if along.balanced and primitive == "reduce_scatter":
        x = dealt(x, along.dim, along.ranks)
    if along.balanced_target and primitive == "all_to_all":
        x = dealt(x, along.target, along.ranks)
    y = finished(primitive, begun(primitive, x, along), x.dtype, along)
    back = along.balanced and primitive in ("all_gather", "all_to_all", "pad")
    return natural(y, along.dim, along.ranks) if back else y


def begun(primitive: str, x: Tensor, along: Along) -> Tensor:
    """The primitive's result, or of a collective what it brings once it is waited for."""
    return LOCAL[primitive](x, along) if primitive in LOCAL else SENT[primitive](x, along)


def shape_brought(primitive: str, shape: Sequence[int], along: Along) -> list[int]:
    """The shape of what begins a primitive, where its result has this one: what exchanges bring is joined later."""
    found, dim = list(shape), along.dim
    if primitive == "all_to_all" or (primitive == "all_gather" and not by_copies(along.group)):
        found[dim] //= along.ranks
        found[0] *= along.ranks
    return found


def finished(primitive: str, y: Tensor, dtype: torch.dtype, along: Along) -> Tensor:
    """The primitive's result, of what began it on a tensor of this dtype."""
    return y if primitive in LOCAL else RECEIVED[primitive](private.wait(y), dtype, along)


def _identity(x: Tensor, along: Along) -> Tensor:
    return x.view_as(x)


def _first(x: Tensor, along: Along) -> Tensor:
    return x.view_as(x) if along.index == 0 else torch.zeros_like(x)


def _chunk(x: Tensor, along: Along) -> Tensor:
    if along.size is None:
        part = x.shape[along.dim] // along.ranks
        return x.narrow(along.dim, along.index * part, part)
    return x.narrow(along.dim, along.axis.start(along.size), along.axis.part(along.size))


def _pad(x: Tensor, along: Along) -> Tensor:
    part = x.shape[along.dim]
    before = along.index * part if along.size is None else along.axis.start(along.size)
    whole = along.ranks * part if along.size is None else along.size
    return torch.cat((_zeros(x, along.dim, before), x, _zeros(x, along.dim, whole - before - part)), along.dim)


def _send_all_reduce(x: Tensor, along: Along) -> Tensor:
    return private.start_all_reduce(private.cast(x, along.dtype).contiguous(), along.op, along.group)


def _of_all_reduce(y: Tensor, dtype: torch.dtype, along: Along) -> Tensor:
    y = private.cast(y, dtype)
    return y.view_as(y)  # what was waited for is no result by itself: dynamo 2.11 would drop its gradient


def _send_all_gather(x: Tensor, along: Along) -> Tensor:
    x = _lengthen(x, along.dim, _step(along.size, along.ranks))
    return start_all_gather(x, along.dim, along.ranks, along.group)


def _of_all_gather(y: Tensor, dtype: torch.dtype, along: Along) -> Tensor:
    if by_copies(along.group):
        y = y.view_as(y)
    else:
        y = _join(torch.unflatten(y, 0, (along.ranks, y.shape[0] // along.ranks)), along.dim)
    return y if along.size is None else y.narrow(along.dim, 0, along.size)


def _send_reduce_scatter(x: Tensor, along: Along) -> Tensor:
    x = private.cast(x, along.dtype)
    if by_copies(along.group):
        x = _even(x, along.dim, along.ranks, along.size)
    else:
        x = _split(x, along.dim, along.ranks, along.size).flatten(0, 1)
    return start_reduce_scatter(x, along.dim, along.ranks, along.group)


def _of_reduce_scatter(y: Tensor, dtype: torch.dtype, along: Along) -> Tensor:
    y = private.cast(y, dtype)
    return y.view_as(y) if along.size is None else y.narrow(along.dim, 0, along.axis.part(along.size))


def _send_all_to_all(x: Tensor, along: Along) -> Tensor:
    x = _lengthen(x, along.dim, _step(along.size, along.ranks))
    x = _split(x, along.target, along.ranks, along.other)
    return private.start_all_to_all(x.flatten(0, 1), along.ranks, along.group)


def _of_all_to_all(y: Tensor, dtype: torch.dtype, along: Along) -> Tensor:
    y = _join(torch.unflatten(y, 0, (along.ranks, y.shape[0] // along.ranks)), along.dim)
    if along.size is not None:
        y = y.narrow(along.dim, 0, along.size)
    return y if along.other is None else y.narrow(along.target, 0, along.axis.part(along.other))


def _reordered(x: Tensor, along: Along) -> Tensor:
    """Between two orders of one dim: a rank's two chunks of it, copied at most once before and once after."""
    refuse_odd(x.shape[along.dim] * along.ranks, along.ranks)
    to, by = exchange(along.ranks, along.index, along.balanced, along.balanced_target)
    y = torch.unflatten(x, along.dim, (2, x.shape[along.dim] // 2)).movedim(along.dim, 0)
    y = torch.cat((y[1:], y[:1])) if to[0] > to[1] else y.contiguous()  # by rank, as they are sent
    sent, received = ([ranks.count(rank) for rank in range(along.ranks)] for ranks in (to, by))
    y = private.wait(private.start_exchange(y, sent, received, along.group))
    return torch.cat((y[1], y[0]), along.dim) if by[0] > by[1] else _join(y, along.dim)


LOCAL: dict[str, Callable[[Tensor, Along], Tensor]] = {
    "identity": _identity,
    "first": _first,
    "chunk": _chunk,
    "pad": _pad,
}
"""The primitives that send nothing, by the name that the table gives them."""

SENT: dict[str, Callable[[Tensor, Along], Tensor]] = {
    "all_reduce": _send_all_reduce,
    "all_gather": _send_all_gather,
    "reduce_scatter": _send_reduce_scatter,
    "all_to_all": _send_all_to_all,
}
"""How the others begin: from a tensor to what a collective brings, which must be waited for."""

RECEIVED: dict[str, Callable[[Tensor, torch.dtype, Along], Tensor]] = {
    "all_reduce": _of_all_reduce,
    "all_gather": _of_all_gather,
    "reduce_scatter": _of_reduce_scatter,
    "all_to_all": _of_all_to_all,
}
"""And how they end: from what it has brought to the result, in the dtype that the tensor had."""


def _step(size: int | None, ranks: int) -> int | None:
    """The length of the first rank's part of an uneven dim, to which all are padded."""
    return None if size is None else -(-size // ranks)


def _zeros(x: Tensor, dim: int, length: int) -> Tensor:
    return x.new_zeros((*x.shape[:dim], length, *x.shape[dim + 1 :]))


def _lengthen(x: Tensor, dim: int, length: int | None) -> Tensor:
    """`x` with zeros at the end of `dim`, up to `length`."""
    if length is None or x.shape[dim] == length:
        return x
    return torch.cat((x, _zeros(x, dim, length - x.shape[dim])), dim)


def _even(x: Tensor, dim: int, ranks: int, size: int | None) -> Tensor:
    """`x` with zeros at the end of `dim`, of which it has `size`, so that all parts are as long as the first."""
    return x if size is None else _lengthen(x, dim, ranks * -(-size // ranks))


def _split(x: Tensor, dim: int, ranks: int, size: int | None) -> Tensor:
    """`[…, ranks · n, …] → [ranks, …, n, …]`, contiguous: one block for each rank."""
    x = _even(x, dim, ranks, size)
    return torch.unflatten(x, dim, (ranks, x.shape[dim] // ranks)).movedim(dim, 0).contiguous()


def _join(x: Tensor, dim: int) -> Tensor:
    """`[ranks, …, n, …] → […, ranks · n, …]`."""
    return x.movedim(0, dim).flatten(dim, dim + 1)
