"""Softmax attention and its backward written out, for any dtype and device, in the order of torch's own formula."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Drop = Callable[[Tensor], Tensor]
Three = tuple[Tensor, Tensor, Tensor]


def scale_of(q: Tensor, scale: float | None) -> float:
    """The scale of the scores; it is torch's to the last bit."""
    return 1 / math.sqrt(q.shape[-1]) if scale is None else scale


def forward(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, scale: float, drop: Drop | None = None
) -> tuple[Tensor, Tensor]:
    """The result `[b, h, s, e]` and the scores `[b, g, h/g, s, t]`, both in the dtype that `widened` gives."""
    scores = _scores(q, k, allowed, scale, drop is not None)
    shares = _softmax(scores, allowed)
    found = (shares if drop is None else _dropped(shares, drop)) @ widened(v).unsqueeze(2)
    return found.flatten(1, 2), scores


def log_sum_exp(scores: Tensor) -> Tensor:
    """`[b, h, s]`; minus infinity for a row that may attend to nothing."""
    return scores.logsumexp(-1).flatten(1, 2)


def backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None,
    allowed: Tensor | None,
    scale: float,
    drop: Drop | None = None,
) -> Three:
    """The gradients of q, k and v, in the dtype that `widened` gives.

    Without `lse` the keys are all that the rows see; with it (`[b, h, s]`, over all keys) they may be some of them.
    """
    scores = _scores(q, k, allowed, scale, drop is not None)
    shares = _softmax(scores, allowed) if lse is None else _shares(scores, _grouped(lse, k))
    own, result = _grouped(widened(gradient), k), _grouped(widened(out), k)
    of_shares = own @ widened(v).unsqueeze(2).transpose(-2, -1)
    if drop is not None:
        of_shares = _dropped(of_shares, drop)
    of_scores = shares * (of_shares - (own * result).sum(-1, keepdim=True))
    first, second = _factors(scale, drop is not None)
    of_q = (of_scores @ (widened(k) * second).unsqueeze(2)) * first
    of_k = (of_scores.transpose(-2, -1) @ _grouped(widened(q) * first, k)).sum(2) * second
    of_v = ((shares if drop is None else _dropped(shares, drop)).transpose(-2, -1) @ own).sum(2)
    return of_q.flatten(1, 2), of_k, of_v


def widened(x: Tensor) -> Tensor:
    """float32 for a dtype below it."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _factors(scale: float, dropped: bool) -> tuple[float, float]:
    """What queries and keys are multiplied by: as torch does, and as `attention_with_dropout` does.

    Two roots are not their square in a prime field, where programs are verified.
    """
    return (scale, 1.0) if dropped else (math.sqrt(scale), math.sqrt(scale))


def _scores(q: Tensor, k: Tensor, allowed: Tensor | None, scale: float, dropped: bool) -> Tensor:
    first, second = _factors(scale, dropped)
    scores = _grouped(widened(q) * first, k) @ (widened(k) * second).unsqueeze(2).transpose(-2, -1)
    return scores if allowed is None else scores.masked_fill(~allowed.unsqueeze(2), -torch.inf)


def _softmax(scores: Tensor, allowed: Tensor | None) -> Tensor:
    if allowed is None:
        return scores.softmax(-1)
    nothing = ~allowed.any(-1, keepdim=True).unsqueeze(2)
    return scores.masked_fill(nothing, 0).softmax(-1).masked_fill(nothing, 0)


def _shares(scores: Tensor, lse: Tensor) -> Tensor:
    nothing = lse == -torch.inf
    return (scores - lse.masked_fill(nothing, 0).unsqueeze(-1)).exp().masked_fill(nothing.unsqueeze(-1), 0)


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """`[b, h, …] → [b, g, h/g, …]`, for the heads of `k [b, g, …]`."""
    return x.unflatten(1, (k.shape[1], x.shape[1] // k.shape[1]))


def _dropped(shares: Tensor, drop: Drop) -> Tensor:
    return drop(shares.flatten(1, 2)).view_as(shares)
