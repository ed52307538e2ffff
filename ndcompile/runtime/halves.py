"""Two halves of a batch in turn: while the collective of one travels, the other computes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ndcompile.placement import BY_NAME
from ndcompile.runtime.collectives import Along, back, begun, finished, shape_brought
from ndcompile.runtime.mesh import Ranks

Steps = Generator["Started | Once | Tensor | None", Tensor | None, Any]
"""A block's computation: what it yields is waited for by the time that it goes on, and sent to it."""


def in_halves(results: tuple[int | None, ...], /, **cut: int) -> Callable[[Callable[..., Steps]], Callable[..., Any]]:
    """A pure function `(w, *tensors)` that is a generator, run twice, in turn: on the first half of some arguments
    along the dims given by `cut`, and on the second. All other arguments are whole for both.

    `results` has the dim on which each result is put together; None: both halves have the same. At each `yield` the
    other half goes on, and `x = yield start(…)` waits for what was started only when it is this half's turn again. What
    both halves have is sent by the first: `x = yield once(…)` gives the second the first one's.
    """

    def decorated(steps: Callable[..., Steps]) -> Callable[..., Any]:
        dims = [cut.get(name) for name in inspect.signature(steps).parameters]

        @wraps(steps)
        def compute(*values: Any) -> Any:
            pairs = [
                (value, value) if dim is None else value.chunk(2, dim) for value, dim in zip(values, dims, strict=True)
            ]
            first, second = in_turn(steps(*[pair[0] for pair in pairs]), steps(*[pair[1] for pair in pairs]))
            if len(results) == 1:
                return _joined(first, second, results[0])
            return tuple(_joined(*both) for both in zip(first, second, results, strict=True))

        compute.halved = True  # type: ignore[attr-defined]
        return compute

    return decorated


def in_turn(first: Steps, second: Steps) -> tuple[Any, Any]:
    """What both return. The first is two turns ahead: while one is between two matmuls that a collective keeps apart,
    the other is in the middle of its own, which cover what is sent before and after.
    """
    shared: list[Tensor] = []
    taken = [0]
    done, a = _turn(first, None, shared, None)
    if not done:
        done, a = _turn(first, a, shared, None)
    over, b = _turn(second, None, shared, taken)
    while not over:
        if not done:
            done, a = _turn(first, a, shared, None)
        over, b = _turn(second, b, shared, taken)
    return a, b


def _turn(steps: Steps, brought: Any, shared: list[Tensor], taken: list[int] | None) -> tuple[bool, Any]:
    """The next thing that a half yields, or that it is over, with what it returns. `taken` counts what the second half
    has got of what the first has `shared`.
    """
    brought = brought.wait() if isinstance(brought, Started) else brought
    try:
        yielded = steps.send(brought)
        while isinstance(yielded, Once):
            if taken is None:
                shared.append(yielded.converted())
                yielded = steps.send(shared[-1])
            else:
                taken[0] += 1
                yielded = steps.send(shared[taken[0] - 1])
        return False, yielded
    except StopIteration as end:
        return True, end.args[0]


def _joined(first: Tensor, second: Tensor, dim: int | None) -> Tensor:
    return first if dim is None else torch.cat((first, second), dim)


@dataclass(frozen=True)
class Once:
    """A conversion of what both halves have."""

    conversion: Callable[..., Tensor]
    x: Tensor
    axis: Ranks
    options: dict[str, Any]

    def converted(self) -> Tensor:
        return self.conversion(self.x, self.axis, **self.options)


def once(conversion: Callable[..., Tensor], x: Tensor, axis: Ranks, **options: Any) -> Once:
    """What `conversion(x, axis, …)` is, for a tensor that both halves have: one of them sends it."""
    return Once(conversion, x, axis, options)


@dataclass(frozen=True)
class Started:
    """A conversion on its way. `token` stands for the tensor that was converted, in autograd alone."""

    raw: Tensor
    token: Tensor
    forward: str
    backward: str
    along: tuple[Any, ...]
    dtype: torch.dtype

    def wait(self) -> Tensor:
        """The converted tensor; in backward, this is where the conversion of its gradient starts."""
        return _Wait.apply(self.raw, self.token, self.forward, self.backward, self.dtype, self.along)


def start(
    conversion: Callable[..., Tensor],
    x: Tensor,
    axis: Ranks,
    *,
    dim: int = 0,
    source: int | None = None,
    target: int = 0,
    dtype: torch.dtype | None = None,
) -> Started | Tensor:
    """Start what `conversion(x, axis, …)` does, for even parts; in backward, this is where its gradient is waited for.

    On one rank nothing travels, and the result is `x`.
    """
    if axis.size == 1:
        return x
    row, dim = BY_NAME[conversion.__name__], dim if source is None else source
    along = axis.group, axis.size, axis.index, dim % x.dim(), target % x.dim(), None, None, "sum", dtype, False, False
    cut = {"chunk": dim, "reduce_scatter": dim, "all_to_all": target}.get(row.forward)
    if cut is not None and x.shape[cut] % axis.size:
        raise ValueError(
            f"dim {cut} of a tensor {tuple(x.shape)} does not divide by the {axis.size} ranks of '{axis.name}'\n"
            f"  why  only even parts are sent while another half computes\n"
            f"  try  {row.name}(…, size={x.shape[cut]})"
        )
    raw, token = _Start.apply(x, row.forward, row.backward, along)
    return Started(raw, token, row.forward, row.backward, along, x.dtype)


class _Start(torch.autograd.Function):
    """Starts a primitive; backward waits for that on the gradient. The second result gets the gradient on its way, and
    has its shape and dtype, since autograd compares these.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: str, backward: str, along: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        later = back(backward, along)
        ctx.later = backward, x.dtype, later
        raw = begun(forward, x, Along(*along))
        ctx.mark_non_differentiable(raw)
        after = Along(*later)
        reduced = after.dtype if backward in ("all_reduce", "reduce_scatter") and after.dtype is not None else x.dtype
        return raw, x.new_zeros((), dtype=reduced).expand(shape_brought(backward, x.shape, after))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor, raw: Tensor) -> tuple[Tensor | None, ...]:
        primitive, dtype, along = ctx.later
        return finished(primitive, raw, dtype, Along(*along)), None, None, None


class _Wait(torch.autograd.Function):
    """Waits for a primitive; backward starts the one on the gradient."""

    @staticmethod
    def forward(
        ctx: Any, raw: Tensor, token: Tensor, forward: str, backward: str, was: torch.dtype, along: tuple[Any, ...]
    ) -> Tensor:
        ctx.later = backward, back(backward, along)
        y = finished(forward, raw, was, Along(*along))
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        primitive, along = ctx.later
        return None, begun(primitive, gradient, Along(*along)), None, None, None, None
