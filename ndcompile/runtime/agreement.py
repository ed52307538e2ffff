"""Errors that every rank raises together, so that none is left waiting in a collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class Disagreement(ValueError):
    """Ranks that must be alike are not, or one of them failed where the others did not."""


def together(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run `action` on every rank; if it raises a ValueError on any, all raise (that one's text, if not their own)."""
    try:
        result = action()
    except ValueError as error:
        everyones(str(error), group)
        raise
    for rank, text in enumerate(everyones(None, group)):
        if text is not None:
            raise Disagreement(f"rank {rank} failed: {text}")
    return result


def everyones(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What every rank of a group (the world's) gives, in rank order."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def alike(values: Sequence[Any], what: str, why: str, tries: str) -> None:
    """Raise `Disagreement` on every rank if the ranks' values are not all equal; the odd ones are named."""
    odd = [rank for rank, value in enumerate(values) if value != values[0]]
    if odd:
        shown = "\n".join(f"  rank {rank:<3} {values[rank]}" for rank in [0, *odd[:4]])
        ranks = ", ".join(map(str, odd))
        raise Disagreement(f"{what} differ between ranks 0 and {ranks}\n{shown}\n  why  {why}\n  try  {tries}")
