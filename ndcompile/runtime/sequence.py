"""How a sequence lies on its ranks: in one part each, or head–tail, so that ranks have equal work under a causal mask.

Head–tail cuts a dim into `2 · ranks` equal chunks; rank r holds chunk r and then chunk `2 · ranks − 1 − r`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ndcompile.runtime.mesh import Ranks

Span = tuple[int, int]
"""Positions from and up to."""


def spans(size: int, axis: Ranks, balanced: bool = True) -> list[Span]:
    """The positions that this rank holds of a dim of `size`, in the order in which it holds them.

    Raises `ValueError` where a head–tail dim does not divide by `2 · ranks`.

    >>> spans(8, Ranks("cp", size=2, index=0, group="cp"))
    [(0, 2), (6, 8)]
    """
    if axis.size == 1:
        return [(0, size)]
    if not balanced:
        start = axis.start(size)
        return [(start, start + axis.part(size))]
    step = _step(size, axis.size)
    return [(chunk * step, (chunk + 1) * step) for chunk in (axis.index, 2 * axis.size - 1 - axis.index)]


def positions(size: int, axis: Ranks, *, balanced: bool = True, device: torch.device | str | None = None) -> Tensor:
    """The positions in the whole, of `size`, of what this rank holds: int64 `[part]`."""
    found = [torch.arange(*span, device=device) for span in spans(size, axis, balanced)]
    return found[0] if len(found) == 1 else torch.cat(found)


def dealt(x: Tensor, dim: int, ranks: int) -> Tensor:
    """A whole with its chunks as the ranks hold them, one rank after the other."""
    return _reorder(x, dim, held(ranks))


def natural(x: Tensor, dim: int, ranks: int) -> Tensor:
    """The inverse of `dealt`: the ranks' chunks, one rank after the other, in the order of their positions."""
    order = held(ranks)
    return _reorder(x, dim, [order.index(chunk) for chunk in range(2 * ranks)])


def held(ranks: int) -> list[int]:
    """The chunks that the ranks hold, one rank after the other: two each."""
    return [chunk for rank in range(ranks) for chunk in (rank, 2 * ranks - 1 - rank)]


def exchange(ranks: int, index: int, balanced: bool, balanced_target: bool) -> tuple[list[int], list[int]]:
    """Of the two chunks of rank `index` in one order, and of the two in another: with whom they are exchanged.

    First the ranks that get its chunks, then those that send it the other ones, as it holds them.

    >>> exchange(4, 3, True, False)
    ([1, 2], [1, 0])
    """
    orders = [held(ranks) if turned else list(range(2 * ranks)) for turned in (balanced, balanced_target)]
    here, there = orders
    places = range(2 * index, 2 * index + 2)
    return [there.index(here[i]) // 2 for i in places], [here.index(there[i]) // 2 for i in places]


def _reorder(x: Tensor, dim: int, order: list[int]) -> Tensor:
    step = _step(x.shape[dim], len(order) // 2)
    chunks = x.split(step, dim) if step else [x]
    return torch.cat([chunks[i] for i in order], dim) if step else x


def refuse_odd(size: int, ranks: int) -> None:
    """Raise `ValueError` where a dim of `size` does not divide into two chunks a rank."""
    if size % (2 * ranks):
        below = size - size % (2 * ranks)
        raise ValueError(
            f"a sequence of {size} does not divide into {2 * ranks} equal chunks\n"
            f"  why  each of {ranks} ranks holds two of them, an early one and a late one\n"
            f"  try  a length of {below or 2 * ranks} or {below + 2 * ranks}, or balanced=False"
        )


def _step(size: int, ranks: int) -> int:
    """The length of a chunk."""
    refuse_odd(size, ranks)
    return size // (2 * ranks)
