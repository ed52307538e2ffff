"""What to compute of attention: the rectangles of queries by keys in which a mask lets anything through."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ndcompile.runtime.masks import Mask
from ndcompile.runtime.sequence import Span

CAUSAL = frozenset({"causal"})
Chunk = tuple[int, Span]
"""Where a chunk begins in the tensor that holds it, and its positions in the whole sequence."""


@dataclass(frozen=True)
class Piece:
    """Some rows of queries and of keys, as a tensor holds them.

    All pairs are let through; or those of a lower triangle (`causal`: as many rows as keys); or those of `mask`, on the
    positions `queries` and `keys`. Pieces that were joined have no positions.
    """

    rows: Span
    cols: Span
    causal: bool = False
    mask: Mask | None = None
    queries: Span = (0, 0)
    keys: Span = (0, 0)

    def allowed(self, q: Tensor) -> Tensor | None:
        """Which pairs are let through, where that is neither all nor a lower triangle: bool `[b|1, 1, s|1, t]`."""
        found = None if self.mask is None else self.mask.allowed(self.queries, self.keys, q.device)
        return None if found is None else found[(None,) * (4 - found.dim())]

    @property
    def full(self) -> bool:
        return not self.causal and self.mask is None


def chunks(spans: Sequence[Span]) -> list[Chunk]:
    """Chunks that a tensor holds one after the other."""
    found, start = [], 0
    for span in spans:
        found.append((start, span))
        start += span[1] - span[0]
    return found


def whole_rows(mask: Mask, queries: Sequence[Chunk], length: int, block: int) -> list[Piece]:
    """One piece for each `block` queries, with all keys of `length` in their reach: every row is in one piece."""
    found = []
    for start, span in _cut(queries, block):
        keys = mask.reach(*span, length)
        found.append(_piece(mask, start, span, keys[0], keys))
    return found


def between(mask: Mask, queries: Sequence[Chunk], keys: Sequence[Chunk], block: int) -> list[Piece]:
    """The pieces of some chunks by others, as few as can be: most need no mask.

    Pieces with a mask have at most `block` queries, unless all queries see the same keys.
    """
    if mask.names == CAUSAL and queries == keys:
        length = sum(stop - start for _, (start, stop) in queries)
        return [Piece((0, length), (0, length), causal=True)]
    if mask.of_keys:
        queries = [(0, (0, sum(stop - start for _, (start, stop) in queries)))]
    found = [piece for own in queries for other in keys for piece in _pair(mask, own, other, block)]
    whole = _join(_join((p for p in found if p.full), "rows", "cols"), "cols", "rows")
    return whole + [p for p in found if not p.full]


def _pair(mask: Mask, own: Chunk, other: Chunk, block: int) -> list[Piece]:
    """The pieces of one chunk by another."""
    (row, queries), (col, keys) = own, other
    left = mask.on(queries, keys)
    if left.names == CAUSAL and queries == keys:
        return [Piece(_from(row, queries), _from(col, keys), causal=True)]
    found = []
    for start, span in [own] if left.of_keys else _cut([own], block):
        low, high = mask.reach(*span, keys[1])
        low = max(low, keys[0])
        if low < high and span[0] < span[1]:
            found.append(_piece(mask, start, span, col + low - keys[0], (low, high)))
    return found


def _piece(mask: Mask, row: int, queries: Span, col: int, keys: Span) -> Piece:
    left = mask.on(queries, keys)
    return Piece(_from(row, queries), _from(col, keys), False, left if left.parts else None, queries, keys)


def _cut(queries: Iterable[Chunk], block: int) -> list[Chunk]:
    """The chunks in blocks."""
    found = []
    for offset, (start, stop) in queries:
        for low in range(start, stop, block):
            found.append((offset + low - start, (low, min(low + block, stop))))
    return found


def _from(start: int, span: Span) -> Span:
    return start, start + span[1] - span[0]


def _join(pieces: Iterable[Piece], same: str, along: str) -> list[Piece]:
    """Pieces without a mask that are equal in one dim and touch in the other, as one."""
    found: list[Piece] = []
    for piece in sorted(pieces, key=lambda p: (getattr(p, same), getattr(p, along))):
        last = found[-1] if found else None
        if last and getattr(last, same) == getattr(piece, same) and getattr(last, along)[1] == getattr(piece, along)[0]:
            joined = getattr(last, along)[0], getattr(piece, along)[1]
            found[-1] = replace(last, rows=joined) if along == "rows" else replace(last, cols=joined)
        else:
            found.append(piece)
    return found
