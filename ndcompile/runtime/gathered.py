"""Attention to keys and values that are gathered, and again in the backward: in between a rank keeps its own alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ndcompile.runtime import plain, private
from ndcompile.runtime.kernels import BLOCK, Three, Two, is_plain
from ndcompile.runtime.merged import Gradients, Merged
from ndcompile.runtime.mesh import Ranks
from ndcompile.runtime.packed import pack, unpack
from ndcompile.runtime.pieces import CAUSAL, Piece, between, chunks, whole_rows
from ndcompile.runtime.random import dropout
from ndcompile.runtime.shared import Shared, split
from ndcompile.runtime.wires import start_all_gather, start_reduce_scatter


@dataclass(frozen=True)
class Dropout:
    """Dropout on the probabilities, by their index in the whole `[b, h, s, t]`."""

    p: float
    key: Tensor | None
    site: int
    shards: Mapping[int, Ranks]
    sizes: Mapping[int, int]


def gathered_attention(
    q: Tensor, k: Tensor, v: Tensor, shared: Shared, dtype: torch.dtype | None, drop: Dropout | None
) -> Tensor:
    """`context_attention(how="gather")`."""
    mask, rows = split(shared.mask)
    key = None if drop is None else drop.key
    drop = None if drop is None else replace(drop, key=None)
    out: Tensor = Gathered.apply(q, k, v, *rows, key, replace(shared, mask=mask), dtype, drop)
    return out


class Gathered(torch.autograd.Function):
    """Attention to all keys and values; their gradients are reduce-scattered."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prefix: Tensor | None,
        padding: Tensor | None,
        documents: Tensor | None,
        key: Tensor | None,
        shared: Shared,
        dtype: torch.dtype | None,
        drop: Dropout | None,
    ) -> Tensor:
        work = _work(q, k, v, shared.with_rows((prefix, padding, documents)), drop, key)
        out, lse = work.forward()
        ctx.save_for_backward(q, k, v, prefix, padding, documents, key, out, lse)
        ctx.told = shared, dtype, drop
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *rows, key, out, lse = ctx.saved_tensors
        shared, dtype, drop = ctx.told
        work = _work(q, k, v, shared.with_rows(tuple(rows)), drop, key)
        of_q, of_k, of_v = work.backward(gradient.contiguous(), out, lse, dtype)
        return *(private.cast(*pair) for pair in ((of_q, q.dtype), (of_k, k.dtype), (of_v, v.dtype))), *(None,) * 7


@dataclass(frozen=True)
class Rows:
    """Attention by the written-out formula, each row to all of its keys at once: as one device computes it."""

    q: Tensor
    k: Tensor
    v: Tensor
    shared: Shared
    drop: Dropout | None = None

    def pieces(self) -> list[Piece]:
        return whole_rows(self.shared.mask, self.shared.own(self.q), self.shared.whole(self.k), BLOCK)

    def forward(self) -> tuple[Tensor, None]:
        k, v = finish(start(self.k, self.v, self.shared), self.k, self.v, self.shared)
        found = []
        for piece in self.pieces():
            q, keys, values = _of(self.q, piece.rows), _of(k, piece.cols), _of(v, piece.cols)
            found.append(plain.forward(q, keys, values, piece.allowed(q), self.shared.scale, self.dropper(piece))[0])
        return private.cast(torch.cat(found, 2), self.q.dtype), None

    def backward(self, gradient: Tensor, out: Tensor, lse: None, dtype: torch.dtype | None) -> Three:
        k, v = finish(start(self.k, self.v, self.shared, gradient), self.k, self.v, self.shared)
        of_q, of_k, of_v = [], plain.widened(torch.zeros_like(k)), plain.widened(torch.zeros_like(v))
        for piece in self.pieces():
            own, q, result = (_of(x, piece.rows) for x in (gradient, self.q, out))
            keys, values, allowed = _of(k, piece.cols), _of(v, piece.cols), piece.allowed(q)
            drop = self.dropper(piece)
            found = plain.backward(own, q, keys, values, result, None, allowed, self.shared.scale, drop)
            of_q.append(found[0])
            of_k[:, :, slice(*piece.cols)] += found[1]
            of_v[:, :, slice(*piece.cols)] += found[2]
        summed = private.wait(start_reduction(of_k, of_v, self.shared, dtype or self.k.dtype))
        return torch.cat(of_q, 2), *unpack(summed, self.k, self.v)

    def dropper(self, piece: Piece) -> plain.Drop | None:
        drop, shared = self.drop, self.shared
        if drop is None or drop.key is None:
            return None
        key = drop.key
        spans = {2: (piece.queries[0], shared.whole(self.q)), 3: (piece.keys[0], shared.whole(self.k))}
        return lambda shares: dropout(shares, drop.p, key, drop.site, drop.shards, drop.sizes, spans)


@dataclass(frozen=True)
class Kernels:
    """Attention by torch's kernels. Under a causal mask they start with own keys, while the others come."""

    q: Tensor
    k: Tensor
    v: Tensor
    shared: Shared

    def pieces(self) -> tuple[list[Piece], list[Piece]]:
        """With own keys, and with all."""
        mask, own, length = self.shared.mask, self.shared.own(self.q), self.shared.whole(self.k)
        if mask.names != CAUSAL:
            return [], between(mask, own, [(0, (0, length))], BLOCK)
        mine = [span for _, span in own]
        others = [span for rank in range(self.shared.axis.size) for span in self.shared.held(length, rank)]
        return between(mask, own, own, BLOCK), between(mask, own, [(s[0], s) for s in others if s not in mine], BLOCK)

    def forward(self) -> Two:
        started = start(self.k, self.v, self.shared)
        merged, (mine, others) = Merged(self.q, self.v.shape[-1], self.shared.scale), self.pieces()
        merged.add(mine, self.k, self.v)
        merged.add(others, *finish(started, self.k, self.v, self.shared))
        return merged.result

    def backward(self, gradient: Tensor, out: Tensor, lse: Tensor, dtype: torch.dtype | None) -> Three:
        mine, others = self.pieces()
        gradients = Gradients(gradient, self.q, out, lse, self.shared.scale)
        k, v = finish(start(self.k, self.v, self.shared, gradient), self.k, self.v, self.shared)
        going = start_reduction(*gradients.add(others, k, v), self.shared, dtype or self.k.dtype)
        own = gradients.add(mine, self.k, self.v) if mine else None  # while the others' are summed
        summed = unpack(private.wait(going), self.k, self.v)
        found = summed if own is None else tuple(a + b for a, b in zip(own, summed, strict=True))
        return gradients.of_queries, found[0], found[1]


def _work(q: Tensor, k: Tensor, v: Tensor, shared: Shared, drop: Dropout | None, key: Tensor | None) -> Rows | Kernels:
    if drop is not None:
        return Rows(q, k, v, shared, replace(drop, key=key))
    return Rows(q, k, v, shared) if is_plain(q, k, v) else Kernels(q, k, v, shared)


# ---- communication ---------------------------------------------------------------------------------------------------


def start(k: Tensor, v: Tensor, shared: Shared, gradient: Tensor | None = None) -> Tensor:
    """Start to gather keys and values; in a backward, with its gradient."""
    return start_all_gather(pack(k, v, gradient), 0, shared.axis.size, shared.axis.group)


def finish(started: Tensor, k: Tensor, v: Tensor, shared: Shared) -> Two:
    """All keys and values, in the order of their positions."""
    k, v = unpack(private.wait(started).unflatten(0, (shared.axis.size, -1)), k, v)
    return _in_order(k, shared), _in_order(v, shared)


def _in_order(x: Tensor, shared: Shared) -> Tensor:
    """`[ranks, b, g, part, d] → [b, g, t, d]`."""
    found = {}
    for rank, own in enumerate(x.unbind(0)):
        for start, (low, high) in chunks(shared.held(shared.whole(own), rank)):
            found[low] = own[:, :, start : start + high - low]
    return torch.cat([found[low] for low in sorted(found)], 2)


def start_reduction(k: Tensor, v: Tensor, shared: Shared, dtype: torch.dtype) -> Tensor:
    """Start to sum two wholes `[b, g, t, …]` over the ranks, each of which keeps its part."""
    ranks = range(shared.axis.size)
    rows = torch.cat([pack(_part(k, shared, rank), _part(v, shared, rank)).to(dtype) for rank in ranks])
    return start_reduce_scatter(rows, 0, shared.axis.size, shared.axis.group)


def _part(whole: Tensor, shared: Shared, rank: int) -> Tensor:
    return torch.cat([whole[:, :, low:high] for low, high in shared.held(whole.shape[2], rank)], 2)


def _of(x: Tensor, rows: tuple[int, int]) -> Tensor:
    return x[:, :, slice(*rows)]
