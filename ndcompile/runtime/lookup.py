"""Embedding lookup, also from a table whose rows are sharded."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ndcompile.runtime.mesh import Ranks


def embedding(
    ids: Tensor, weight: Tensor, padding_idx: int = -1, axis: Ranks | None = None, size: int | None = None
) -> Tensor:
    """Rows of `weight` `[rows, d]` by `ids` `[…]`: `[…, d]`; row `padding_idx` gets no gradient.

    With `axis`, `weight` is this rank's part of a table of `size` rows (default: equal parts), `ids` and `padding_idx`
    count in the whole table, and the result is partial: zeros where the row is another rank's. An id that the whole
    table lacks raises `IndexError` on CPU; on CUDA it fails when the kernel runs.
    """
    if axis is None or axis.size == 1:
        return F.embedding(ids, weight, padding_idx if padding_idx >= 0 else None)
    rows = weight.shape[0]
    size = rows * axis.size if size is None else size
    start = axis.start(size)
    mine = (ids >= start) & (ids < start + rows)
    if rows == 0:  # an uneven table may leave this rank nothing, and a lookup needs a row
        weight = F.pad(weight, (0, 0, 0, 1))
    known = (ids >= 0) & (ids < size)
    here = torch.where(mine, ids - start, torch.where(known, 0, weight.shape[0]))
    padding = padding_idx - start if start <= padding_idx < start + rows else None
    return F.embedding(here, weight, padding).masked_fill(~mine.unsqueeze(-1), 0)
