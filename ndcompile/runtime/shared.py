"""What the ways of attention over ranks have in common: who holds which positions, and the mask that they see."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ndcompile.runtime.masks import Mask
from ndcompile.runtime.mesh import Ranks
from ndcompile.runtime.pieces import Chunk, chunks
from ndcompile.runtime.sequence import Span, spans

ROWS = ("prefix", "padding", "documents")
"""The parts of a mask that may be tensors."""


@dataclass(frozen=True)
class Shared:
    """The ranks, the order of the sequence on them, the mask without its tensors, the scale of scores."""

    axis: Ranks
    balanced: bool
    mask: Mask
    scale: float

    def held(self, length: int, rank: int) -> list[Span]:
        """The positions of a rank, of a whole `length`."""
        return spans(length, replace(self.axis, index=rank), self.balanced)

    def own(self, x: Tensor) -> list[Chunk]:
        """The chunks that `x [b, h, part, d]` holds."""
        return chunks(self.held(self.whole(x), self.axis.index))

    def whole(self, x: Tensor) -> int:
        """The length of the whole sequence of `x [b, h, part, d]`."""
        return x.shape[2] * self.axis.size

    def with_rows(self, rows: tuple[Tensor | None, ...]) -> Shared:
        """The same with the tensors that `split` took from the mask."""
        given: dict[str, Any] = {name: x for name, x in zip(ROWS, rows, strict=True) if x is not None}
        return replace(self, mask=replace(self.mask, **given))


def split(mask: Mask) -> tuple[Mask, tuple[Tensor | None, ...]]:
    """A mask without its tensors, and these: an autograd function is given tensors one by one."""
    rows: dict[str, Any] = {name: getattr(mask, name) for name in ROWS}
    none: dict[str, Any] = {name: None for name, x in rows.items() if isinstance(x, Tensor)}
    return replace(mask, **none), tuple(rows[name] if name in none else None for name in ROWS)
