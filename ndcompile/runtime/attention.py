"""Attention with dropout on its probabilities that any mesh can reproduce."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ndcompile.runtime.mesh import Ranks
from ndcompile.runtime.random import dropout


def attention_with_dropout(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    p: float,
    key: Tensor,
    site: int,
    is_causal: bool = False,
    scale: float | None = None,
    shards: Mapping[int, Ranks] | None = None,
    sizes: Mapping[int, int] | None = None,
) -> Tensor:
    """Softmax attention `[b, h, s, d]` from queries `[b, h, s, d]` and keys and values `[b, h, t, d]`, or fewer.

    `mask` is bool (true: attend) or is added to the scores. Probabilities are dropped by their global index in
    `[b, h, s, t]`; `shards` and `sizes` say how its dims are sharded. A row that may attend to nothing gives zeros.
    """
    if k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    wide = torch.float32 if q.dtype in (torch.bfloat16, torch.float16) else q.dtype
    scores = (q.to(wide) * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.to(wide).transpose(-2, -1)
    if is_causal:
        scores = scores.masked_fill(~scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    nothing = (scores == -torch.inf).all(-1, keepdim=True)
    shares = scores.masked_fill(nothing, 0).softmax(-1).masked_fill(nothing, 0)
    return (dropout(shares, p, key, site, shards, sizes) @ v.to(wide)).to(q.dtype)
