"""Attention kernels that give the log-sum-exp of the scores, so that results over parts of the keys can be merged.

Each has a forward and a backward. All give and take `lse [b, h, s]`, minus infinity where a row may attend to nothing,
so that the backward of one fits the forward of another, and a backward over some keys the `lse` over all of them.
Keys and values may have fewer heads: cuDNN and flash take them so, to the others they are repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ndcompile.runtime import plain, private

Two = tuple[Tensor, Tensor]
Three = tuple[Tensor, Tensor, Tensor]
BLOCK = 512
"""Queries at a time, where there is a tensor of queries by keys."""

FAR = 1e30
"""A log-sum-exp that makes every share 0."""


@dataclass(frozen=True)
class Call:
    """What a kernel is told besides tensors: a lower triangle of as many queries as keys, or all pairs; the scale."""

    causal: bool
    scale: float


@dataclass(frozen=True)
class Kernel:
    """What tensors it takes, its forward, and its backward; `allowed` is bool and broadcasts to `[b, h, s, t]`."""

    name: str
    takes: Callable[[Tensor, Tensor, Tensor, Tensor | None], bool]
    forward: Callable[[Tensor, Tensor, Tensor, Tensor | None, Call], Two]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Call], Three]


def kernel_for(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None) -> Kernel:
    """The first of the table that takes these tensors, and that `torch.nn.attention.sdpa_kernel` lets through."""
    return next(kernel for kernel in TABLE if kernel.takes(q, k, v, allowed))


def is_plain(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether nothing but the written-out formula takes these tensors."""
    return kernel_for(q, k, v, None) is PLAIN


# ---- on CUDA ---------------------------------------------------------------------------------------------------------


def _on_gpu(x: Tensor) -> bool:
    """Also one without memory, which stands for it."""
    return x.is_cuda or x.is_meta


def _half(*tensors: Tensor, at_most: int) -> bool:
    """Whether these are 16-bit CUDA tensors, of head dims that kernels can read."""
    return all(
        _on_gpu(x) and x.dtype in (torch.bfloat16, torch.float16) and x.shape[-1] % 8 == 0 and x.shape[-1] <= at_most
        for x in tensors
    )


def _cudnn_takes(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None) -> bool:
    return allowed is None and _half(q, k, v, at_most=128) and _lets_through("cudnn")


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, call: Call) -> Two:
    op, _ = private.ATTENTION["cudnn"]
    out, lse = op(q, k, v, None, True, 0.0, call.causal, False, scale=call.scale)[:2]
    return out, lse.view(out.shape[:-1])


def _cudnn_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, allowed: Tensor | None, call: Call
) -> Three:
    _, op = private.ATTENTION["cudnn"]
    none, lengths = _no_random_state(q), (q.shape[2], k.shape[2])
    gradient, out, q = (_laid_out_like(x, q) for x in (gradient, out, q))
    of_q, of_k, of_v = op(
        gradient, q, k, v, out, lse.unsqueeze(-1), none, none, None, None, None, *lengths, 0.0, call.causal,
        scale=call.scale,
    )  # fmt: skip
    return of_q, of_k, of_v


def _laid_out_like(x: Tensor, q: Tensor) -> Tensor:
    """`x [b, h, s, e]` dense, its dims in the order of those of `q`, as the kernel gives its own results.

    torch finds a plan of cuDNN by the strides of `q`, `k` and `v` alone (aten, `cudnn/MHA.cpp`): one that was made for
    another layout of the result, its gradient or the log-sum-exp reads other memory. `q` is dense too, since whoever
    calls with a part of a longer one, as torch's own ring does, may call with parts of the others.
    """
    order = sorted(range(q.dim()), key=q.stride, reverse=True)
    return x.permute(order).contiguous().permute([order.index(dim) for dim in range(q.dim())])


def _flash_takes(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None) -> bool:
    fits = allowed is None and _half(q, k, v, at_most=256) and q.shape[-1] == v.shape[-1]
    return fits and _lets_through("flash")


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, call: Call) -> Two:
    op, _ = private.ATTENTION["flash"]
    out, lse = op(q, k, v, 0.0, call.causal, False, scale=call.scale)[:2]
    return out, lse


def _flash_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, allowed: Tensor | None, call: Call
) -> Three:
    _, op = private.ATTENTION["flash"]
    none, lengths = _no_random_state(q), (q.shape[2], k.shape[2])
    of_q, of_k, of_v = op(
        gradient, q, k, v, out, lse, None, None, *lengths, 0.0, call.causal, none, none, scale=call.scale
    )
    return of_q, of_k, of_v


def _efficient_takes(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None) -> bool:
    aligned = all(_on_gpu(x) and x.shape[-1] % 8 == 0 and x.dtype != torch.float64 for x in (q, k, v))
    return aligned and _lets_through("efficient")


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, call: Call) -> Two:
    op, _ = private.ATTENTION["efficient"]
    bias = _bias(q, k, allowed, multiple=8)
    out, lse = op(q, *_repeated(q, k, v), bias, True, 0.0, call.causal, scale=call.scale)[:2]
    return _zeros_for_nothing(allowed, out, lse[..., : q.shape[2]])


def _efficient_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, allowed: Tensor | None, call: Call
) -> Three:
    _, op = private.ATTENTION["efficient"]
    bias, lse = _bias(q, k, allowed, multiple=8), _none_for_nothing(allowed, lse)
    lse = F.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)  # the kernel reads 32 at a time
    none = _no_random_state(q)
    out = out.transpose(1, 2).contiguous().transpose(1, 2)  # the kernel takes the heads of a token to be neighbours
    found = op(
        gradient, q, *_repeated(q, k, v), bias, out, lse, none, none, 0.0, [True, True, True, False], call.causal,
        scale=call.scale,
    )  # fmt: skip
    return found[0], *_of_groups(k, found[1], found[2])


# ---- on the CPU ------------------------------------------------------------------------------------------------------


def _cpu_takes(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None) -> bool:
    here = q.device.type == "cpu" and q.dtype != torch.float64
    return here and q.shape[-1] == v.shape[-1] and _lets_through("cpu")


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, call: Call) -> Two:
    op, _ = private.ATTENTION["cpu"]
    bias = _bias(q, k, allowed)
    out, lse = op(q, *_repeated(q, k, v), 0.0, call.causal, attn_mask=bias, scale=call.scale)
    return _zeros_for_nothing(allowed, out, lse)


def _cpu_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, allowed: Tensor | None, call: Call
) -> Three:
    _, op = private.ATTENTION["cpu"]
    bias, lse = _bias(q, k, allowed), _none_for_nothing(allowed, lse)
    found = op(gradient, q, *_repeated(q, k, v), out, lse, 0.0, call.causal, attn_mask=bias, scale=call.scale)
    return found[0], *_of_groups(k, found[1], found[2])


# ---- anywhere --------------------------------------------------------------------------------------------------------


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, call: Call) -> Two:
    found = []
    for start in range(0, max(q.shape[2], 1), BLOCK):
        rows, keys, mask = _rows(start, q, k, allowed, call)
        out, scores = plain.forward(q[:, :, rows], k[:, :, keys], v[:, :, keys], mask, call.scale)
        found.append((out, plain.log_sum_exp(scores)))
    return torch.cat([out for out, _ in found], 2), torch.cat([lse for _, lse in found], 2)


def _plain_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, allowed: Tensor | None, call: Call
) -> Three:
    of_q, of_k, of_v = [], plain.widened(torch.zeros_like(k)), plain.widened(torch.zeros_like(v))
    for start in range(0, max(q.shape[2], 1), BLOCK):
        rows, keys, mask = _rows(start, q, k, allowed, call)
        own = gradient[:, :, rows], q[:, :, rows]
        given = k[:, :, keys], v[:, :, keys], out[:, :, rows], lse[:, :, rows]
        block = plain.backward(*own, *given, mask, call.scale)
        of_q.append(block[0])
        of_k[:, :, keys] += block[1]
        of_v[:, :, keys] += block[2]
    return torch.cat(of_q, 2), of_k, of_v


def _rows(start: int, q: Tensor, k: Tensor, allowed: Tensor | None, call: Call) -> tuple[slice, slice, Tensor | None]:
    """A block of queries, the keys that it may see, and which of those each query may see."""
    stop = min(start + BLOCK, q.shape[2])
    rows = slice(start, stop)
    if call.causal:
        queries, keys = torch.arange(start, stop, device=q.device), torch.arange(stop, device=q.device)
        return rows, slice(0, stop), (keys <= queries[:, None])[None, None]
    if allowed is not None and allowed.shape[2] > 1:
        allowed = allowed[:, :, rows]
    return rows, slice(0, k.shape[2]), allowed


# ---- what kernels share ----------------------------------------------------------------------------------------------


@torch.compiler.assume_constant_result  # dynamo 2.11 cannot ask
def _lets_through(name: str) -> bool:
    """Whether `sdpa_kernel` lets a kernel through, and this GPU has it."""
    backends = torch.backends.cuda
    if name == "cpu":
        return backends.flash_sdp_enabled()
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    if name == "cudnn":
        return backends.cudnn_sdp_enabled() and capability >= (9, 0)
    return (
        backends.flash_sdp_enabled() and capability >= (8, 0)
        if name == "flash"
        else backends.mem_efficient_sdp_enabled()
    )


def _repeated(q: Tensor, k: Tensor, v: Tensor) -> Two:
    """Keys and values with as many heads as the queries."""
    times = q.shape[1] // k.shape[1]
    return (k, v) if times == 1 else (k.repeat_interleave(times, 1), v.repeat_interleave(times, 1))


def _of_groups(k: Tensor, *gradients: Tensor) -> tuple[Tensor, ...]:
    """The gradients of keys and values, from those of repeated ones."""
    heads = k.shape[1]
    return tuple(g if g.shape[1] == heads else g.unflatten(1, (heads, -1)).sum(2) for g in gradients)


def _bias(q: Tensor, k: Tensor, allowed: Tensor | None, multiple: int = 1) -> Tensor | None:
    """0 and minus infinity, `[b, h, s, t]`."""
    if allowed is None:
        return None
    bias, length = torch.zeros_like(allowed, dtype=q.dtype).masked_fill(~allowed, -torch.inf), allowed.shape[-1]
    bias = F.pad(bias, (0, -length % multiple))[..., :length]
    return bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


def _zeros_for_nothing(allowed: Tensor | None, out: Tensor, lse: Tensor) -> Two:
    """Rows that see nothing are zeros, whatever the kernel made of them."""
    if allowed is None:
        return out, lse
    nothing = ~allowed.any(-1, keepdim=True)
    return out.masked_fill(nothing, 0), lse.masked_fill(nothing.squeeze(-1), -torch.inf)


def _none_for_nothing(allowed: Tensor | None, lse: Tensor) -> Tensor:
    """No gradient comes from rows that see nothing of these keys."""
    if allowed is None:
        return lse
    return lse.masked_fill(~allowed.any(-1) | (lse == -torch.inf), FAR)


def _no_random_state(q: Tensor) -> Tensor:
    """In the place of the state of the kernel's dropout, which is not used."""
    return torch.zeros((), dtype=torch.int64, device=q.device)


PLAIN = Kernel("plain", lambda q, k, v, allowed: True, _plain_forward, _plain_backward)

TABLE = (
    Kernel("cudnn", _cudnn_takes, _cudnn_forward, _cudnn_backward),
    Kernel("flash", _flash_takes, _flash_forward, _flash_backward),
    Kernel("efficient", _efficient_takes, _efficient_forward, _efficient_backward),
    Kernel("cpu", _cpu_takes, _cpu_forward, _cpu_backward),
    PLAIN,
)
"""In the order in which they are asked."""
