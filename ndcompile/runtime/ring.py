"""Ring attention: keys and values go round the ranks, while each computes with those that it has.

Liu, Zaharia and Abbeel, Ring Attention with Blockwise Transformers (2023), with head–tail order as Brandon et al.,
Striped Attention (2023), give a reason for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ndcompile.runtime import private
from ndcompile.runtime.kernels import BLOCK
from ndcompile.runtime.merged import Gradients, Merged
from ndcompile.runtime.mesh import Ranks
from ndcompile.runtime.packed import pack, unpack
from ndcompile.runtime.pieces import Piece, between, chunks
from ndcompile.runtime.shared import Shared, split


def ring_attention(q: Tensor, k: Tensor, v: Tensor, shared: Shared) -> Tensor:
    """`context_attention(how="ring")`. Gradients of keys and values are summed in float32 or wider."""
    mask, rows = split(shared.mask)
    out: Tensor = Ring.apply(q, k, v, *rows, replace(shared, mask=mask))
    return out


class Ring(torch.autograd.Function):
    """Attention to keys and values that go round; backward they go round again, and their gradients with them."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prefix: Tensor | None,
        padding: Tensor | None,
        documents: Tensor | None,
        shared: Shared,
    ) -> Tensor:
        ctx.shared, shared = shared, shared.with_rows((prefix, padding, documents))
        axis, merged, kv = shared.axis, Merged(q, v.shape[-1], shared.scale), pack(k, v)
        for step in range(axis.size):
            coming = _start(kv, axis) if step < axis.size - 1 else kv
            merged.add(pieces(shared, q, k, step), *unpack(kv, k, v))
            kv = private.wait(coming) if step < axis.size - 1 else kv
        out, lse = merged.result
        ctx.save_for_backward(q, k, v, prefix, padding, documents, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *rows, out, lse = ctx.saved_tensors
        shared: Shared = ctx.shared.with_rows(tuple(rows))
        axis, kv = shared.axis, pack(k, v, gradient)
        gradients, going = Gradients(gradient.contiguous(), q, out, lse, shared.scale), None
        for step in range(axis.size):
            coming = _start(kv, axis) if step < axis.size - 1 else kv
            own = pack(*gradients.add(pieces(shared, q, k, step), *unpack(kv, k, v)))
            going = _start(own if going is None else own + private.wait(going), axis)
            kv = private.wait(coming) if step < axis.size - 1 else kv
        assert going is not None, "a ring has ranks"
        of_k, of_v = unpack(private.wait(going), k, v)
        return gradients.of_queries, private.cast(of_k, k.dtype), private.cast(of_v, v.dtype), *(None,) * 4


def pieces(shared: Shared, q: Tensor, k: Tensor, step: int) -> list[Piece]:
    """What to compute with the keys of the rank that is `step` before this one."""
    source = (shared.axis.index - step) % shared.axis.size
    return between(shared.mask, shared.own(q), chunks(shared.held(shared.whole(k), source)), BLOCK)


def _start(x: Tensor, axis: Ranks) -> Tensor:
    return private.start_shift(x, axis.size, axis.index, axis.group)
