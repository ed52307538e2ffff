"""Attention as a sum over pieces: results over parts of the keys are merged by their log-sum-exp."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ndcompile.runtime import private
from ndcompile.runtime.kernels import Call, Three, Two, kernel_for
from ndcompile.runtime.pieces import Piece
from ndcompile.runtime.plain import widened


class Merged:
    """The result `[b, h, s, e]` and `lse [b, h, s]` of rows of queries, over all pieces that were added."""

    def __init__(self, q: Tensor, e: int, scale: float) -> None:
        self.q, self.e, self.scale = q, e, scale
        self.found: Two | None = None

    def add(self, pieces: Sequence[Piece], k: Tensor, v: Tensor) -> None:
        """Attend to some keys `[b, g, t, d]` and values `[b, g, t, e]`."""
        for piece in pieces:
            q, keys, values = _rows(self.q, piece.rows), _rows(k, piece.cols), _rows(v, piece.cols)
            allowed = piece.allowed(q)
            kernel = kernel_for(q, keys, values, allowed)
            out, lse = kernel.forward(q, keys, values, allowed, Call(piece.causal, self.scale))
            self._merge(piece, widened(out), widened(lse))

    def _merge(self, piece: Piece, out: Tensor, lse: Tensor) -> None:
        if self.found is None and piece.rows == (0, self.q.shape[2]):
            self.found = out, lse
            return
        own, before = (_rows(x, piece.rows) for x in self._so_far())
        self.found = tuple(  # type: ignore[assignment]
            _put(whole, piece.rows, part)
            for whole, part in zip(self._so_far(), merge(own, before, out, lse), strict=True)
        )

    def _so_far(self) -> Two:
        if self.found is None:
            rows = self.q.shape[:3]
            zeros = widened(self.q.new_zeros(*rows, self.e))
            self.found = zeros, zeros.new_full(rows, -torch.inf)
        return self.found

    @property
    def result(self) -> Two:
        """In the dtype of the queries, and float32 or wider."""
        out, lse = self._so_far()
        return private.cast(out, self.q.dtype), lse


class Gradients:
    """The gradients of queries, and of one set of keys and values after another."""

    def __init__(self, gradient: Tensor, q: Tensor, out: Tensor, lse: Tensor, scale: float) -> None:
        self.gradient, self.q, self.out, self.lse, self.scale = gradient, q, out, lse, scale
        self.of_q: Tensor | None = None

    def add(self, pieces: Sequence[Piece], k: Tensor, v: Tensor) -> Two:
        """The gradients of these keys and values, wide; that of the queries is added to."""
        of_k: Tensor | None = None
        of_v: Tensor | None = None
        for piece in pieces:
            own = self._of_piece(piece, k, v)
            self.of_q = _added(self.of_q, self.q, piece.rows, own[0])
            of_k, of_v = _added(of_k, k, piece.cols, own[1]), _added(of_v, v, piece.cols, own[2])
        return _or_zeros(of_k, k), _or_zeros(of_v, v)

    def _of_piece(self, piece: Piece, k: Tensor, v: Tensor) -> Three:
        gradient, q, out = (_rows(x, piece.rows) for x in (self.gradient, self.q, self.out))
        keys, values = _rows(k, piece.cols), _rows(v, piece.cols)
        lse = _rows(self.lse, piece.rows).contiguous()  # flash takes it for that
        allowed = piece.allowed(q)
        kernel = kernel_for(q, keys, values, allowed)
        return kernel.backward(gradient, q, keys, values, out, lse, allowed, Call(piece.causal, self.scale))

    @property
    def of_queries(self) -> Tensor:
        """In the dtype of the queries."""
        return private.cast(_or_zeros(self.of_q, self.q), self.q.dtype)


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> Two:
    """Attention over two sets of keys, from that over each; a set of which a row sees nothing has weight 0.

    >>> merge(torch.ones(1, 1), torch.zeros(1), torch.zeros(1, 1), torch.tensor([-torch.inf]))
    (tensor([[1.]]), tensor([0.]))
    """
    most = torch.maximum(lse, other_lse)
    most = most.masked_fill(most == -torch.inf, 0)
    own, others = (lse - most).exp(), (other_lse - most).exp()
    total = own + others
    share = (others / total.masked_fill(total == 0, 1)).unsqueeze(-1)
    return out + share * (other - out), most + total.log()


def _rows(x: Tensor, rows: tuple[int, int]) -> Tensor:
    return x if rows == (0, x.shape[2]) else x[:, :, slice(*rows)]


def _put(whole: Tensor, rows: tuple[int, int], part: Tensor) -> Tensor:
    """`whole` with some rows replaced, in place where others stay."""
    if rows == (0, whole.shape[2]):
        return part
    whole[:, :, slice(*rows)] = part
    return whole


def _added(whole: Tensor | None, like: Tensor, rows: tuple[int, int], part: Tensor) -> Tensor:
    """The sum, in float32 or wider."""
    if whole is None and rows == (0, like.shape[2]):
        return widened(part)
    whole = _or_zeros(whole, like)
    whole[:, :, slice(*rows)] += part
    return whole


def _or_zeros(x: Tensor | None, like: Tensor) -> Tensor:
    return widened(torch.zeros_like(like)) if x is None else x
