"""Attention of a sequence that is sharded over ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ndcompile.runtime.attention import attention, attention_with_dropout
from ndcompile.runtime.collectives import all_to_all
from ndcompile.runtime.gathered import Dropout, gathered_attention
from ndcompile.runtime.masks import Mask
from ndcompile.runtime.mesh import Ranks
from ndcompile.runtime.plain import scale_of
from ndcompile.runtime.ring import ring_attention
from ndcompile.runtime.shared import Shared

HOW = ("gather", "ring", "heads")


def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axis: Ranks,
    *,
    causal: bool = False,
    window: int | None = None,
    chunk: int | None = None,
    prefix: Tensor | int | None = None,
    padding: Tensor | None = None,
    documents: Tensor | None = None,
    scale: float | None = None,
    how: str = "gather",
    balanced: bool = True,
    dtype: torch.dtype | None = None,
    dropout_p: float = 0.0,
    key: Tensor | None = None,
    site: int = 0,
    shards: Mapping[int, Ranks] | None = None,
    sizes: Mapping[int, int] | None = None,
) -> Tensor:
    """Attention `[b, h, s/c, e]` of this rank's queries `[b, h, s/c, d]` to the keys `[b, g, t/c, d]` of all c ranks.

    Values are `[b, g, t/c, e]`, and `g` divides `h`. Sequences lie head–tail, or in one part each (`balanced=False`).
    The parts of the mask are those of `Mask`, in positions of the whole sequence, and whole on every rank; all but
    `padding` need `s == t`. A query that may attend to nothing gives zeros.

    `how` is `gather` (keys and values are gathered, and again in the backward), `ring` (they go round, while each block
    is computed), or `heads` (heads are sharded in place of the sequence, see `heads_divide`). Gradients of keys and
    values are summed over the ranks in `dtype`; by default in that of the keys.

    Dropout on the probabilities is by their index in the whole `[b, h, s, t]`, of which `shards` and `sizes` say how
    dims 0 and 1 are sharded, and drops what `attention_with_dropout` drops; it always gathers.
    """
    mask = Mask(causal, window, chunk, prefix, padding, documents)
    if how not in HOW:
        raise ValueError(f"attention over '{axis.name}' has no way '{how}'\n  try  {', '.join(HOW)}")
    drop = Dropout(dropout_p, key, site, shards or {}, sizes or {}) if dropout_p and key is not None else None
    assert drop or not dropout_p, "dropout needs a key"
    assert mask.of_keys or q.shape[2] == k.shape[2], "queries and keys are the same tokens"
    if axis.size == 1:
        return _on_one_rank(q, k, v, mask, scale, drop)
    shared = Shared(axis, balanced, mask, scale_of(q, scale))
    if how == "gather" or drop:
        return gathered_attention(q, k, v, shared, dtype, drop)
    if how == "ring":
        return ring_attention(q, k, v, shared)
    return _by_heads(q, k, v, axis, mask, scale, balanced)


def heads_divide(heads: int, kv_heads: int, ranks: int) -> bool:
    """Whether `how="heads"` can shard these heads over the ranks: fewer heads of keys are repeated, if that is even."""
    return heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


def _by_heads(q: Tensor, k: Tensor, v: Tensor, axis: Ranks, mask: Mask, scale: float | None, balanced: bool) -> Tensor:
    heads, kv_heads = q.shape[1], k.shape[1]
    if not heads_divide(heads, kv_heads, axis.size):
        raise ValueError(
            f"{heads} heads of queries and {kv_heads} of keys do not divide by the {axis.size} ranks of '{axis.name}'\n"
            f"  why  each rank computes some heads for the whole sequence\n"
            f"  try  how='gather' or how='ring'"
        )
    if kv_heads % axis.size:
        k, v = (x.repeat_interleave(axis.size // kv_heads, 1) for x in (k, v))
    q, k, v = (all_to_all(x, axis, 2, 1, balanced=balanced) for x in (q, k, v))
    out = attention(q, k, v, **mask.parts, scale=scale)
    return all_to_all(out, axis, 1, 2, balanced_target=balanced)


def _on_one_rank(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, drop: Dropout | None) -> Tensor:
    if drop is None:
        return attention(q, k, v, **mask.parts, scale=scale)
    given = dict(shards=drop.shards, sizes=drop.sizes, scale=scale)
    return attention_with_dropout(q, k, v, None, drop.p, drop.key, drop.site, **mask.parts, **given)  # type: ignore[arg-type]
