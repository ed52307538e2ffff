"""Attention under a named mask, and attention with dropout that any mesh can reproduce."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ndcompile.runtime.masks import Mask
from ndcompile.runtime.random import Shards, dropout

Span = tuple[int, int]
"""Positions from and up to."""

Attend = Callable[[Mask, Span, Span, Tensor, Tensor, Tensor], Tensor]

CAUSAL = frozenset({"causal"})
BLOCK = 512
"""Queries at a time, where the mask needs a tensor of queries by keys."""


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    chunk: int | None = None,
    prefix: Tensor | int | None = None,
    padding: Tensor | None = None,
    documents: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    block: int = BLOCK,
) -> Tensor:
    """Softmax attention `[b, h, s, e]` of queries `[b, h, s, d]` to keys `[b, g, t, d]`, values `[b, g, t, e]`.

    The parts of the mask are those of `Mask`; all but `padding` need `s == t`. What is computed is torch's
    `scaled_dot_product_attention` under that mask as a dense one; a query that may attend to nothing gives zeros. With
    fewer heads of keys than of queries, `g` divides `h`. Dropout is `attention_with_dropout`.
    """
    assert dropout_p == 0, "attention with dropout is lowered to attention_with_dropout"
    mask = Mask(causal, window, chunk, prefix, padding, documents)

    def attend(mask: Mask, queries: Span, keys: Span, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        is_causal = mask.names == CAUSAL and queries == keys
        allowed = None if is_causal else mask.allowed(queries, keys, q.device)
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, allowed, 0.0, is_causal, scale=scale, enable_gqa=grouped)

    return _by_blocks(attend, mask, q, k, v, block)


def attention_with_dropout(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    p: float,
    key: Tensor,
    site: int,
    causal: bool = False,
    scale: float | None = None,
    *,
    window: int | None = None,
    chunk: int | None = None,
    prefix: Tensor | int | None = None,
    padding: Tensor | None = None,
    documents: Tensor | None = None,
    shards: Shards | None = None,
    sizes: Mapping[int, int] | None = None,
    balanced: Collection[int] = (),
    block: int = BLOCK,
) -> Tensor:
    """The same with dropout on the probabilities, under a mask by name, a dense one, or both.

    `mask` is bool (true: attend) or is added to the scores. Probabilities are dropped by their global index in
    `[b, h, s, t]`; `shards`, `sizes` and `balanced` say how its dims are sharded. A row that sees nothing gives zeros.
    """
    wide = torch.float32 if q.dtype in (torch.bfloat16, torch.float16) else q.dtype
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    lengths, dims = (q.shape[-2], k.shape[-2]), q.dim()

    def attend(named: Mask, queries: Span, keys: Span, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if k.shape[:-2] != q.shape[:-2]:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = (q.to(wide) * factor) @ k.to(wide).transpose(-2, -1)
        for part in (named.allowed(queries, keys, q.device), None if mask is None else _cut(mask, queries, keys)):
            if part is not None:
                scores = scores.masked_fill(~part, -torch.inf) if part.dtype == torch.bool else scores + part
        nothing = (scores == -torch.inf).all(-1, keepdim=True)
        shares = scores.masked_fill(nothing, 0).softmax(-1).masked_fill(nothing, 0)
        spans = {dims - 2: (queries[0], lengths[0]), dims - 1: (keys[0], lengths[1])}
        return (dropout(shares, p, key, site, shards, sizes, spans, balanced) @ v.to(wide)).to(q.dtype)

    return _by_blocks(attend, Mask(causal, window, chunk, prefix, padding, documents), q, k, v, block, always=True)


def _by_blocks(attend: Attend, mask: Mask, q: Tensor, k: Tensor, v: Tensor, block: int, always: bool = False) -> Tensor:
    """`attend` for some queries at a time, to the keys in their reach.

    Blocks that need a mask of queries by keys (`always`: all) are computed again in the backward, where there are more
    than one: nothing of the size of queries by keys is kept.
    """
    length, others = q.shape[-2], k.shape[-2]
    mask = mask.on((0, length), (0, others))
    if length <= block or ((mask.of_keys or mask.names == CAUSAL) and not always):
        return attend(mask, (0, length), (0, others), q, k, v)
    assert length == others or mask.names <= {"causal", "padding"}, "queries and keys are the same tokens"
    step = mask.chunk if mask.chunk and mask.chunk > block and mask.names <= {"causal", "chunk"} else block
    found = []
    for start in range(0, length, step):
        queries = start, min(start + step, length)
        keys = mask.reach(*queries, others)
        part = mask.on(queries, keys)
        given = (part, queries, keys, q[..., slice(*queries), :], k[..., slice(*keys), :], v[..., slice(*keys), :])
        again = always or not (part.of_keys or (part.names == CAUSAL and queries == keys))
        found.append(checkpoint(attend, *given, use_reentrant=False) if again else attend(*given))
    return torch.cat(found, -2)


def _cut(mask: Tensor, queries: Span, keys: Span) -> Tensor:
    """The part of a dense mask, whose dims may be of size 1."""
    rows = mask[..., slice(*queries), :] if mask.shape[-2] > 1 else mask
    return rows[..., slice(*keys)] if mask.shape[-1] > 1 else rows
