"""Errors that every rank raises together, so that none is left waiting in a collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from ndcompile.runtime import private

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


def said(key: str, value: str, before: str = "") -> list[str]:
    """Say `value` under a key that every rank uses once, wait until all have said theirs, and return it and another if
    there is one: not as a collective, since a rank may be missing. All ranks have done with the key `before`.

    Raises `Disagreement` where a rank says nothing until the timeout of the process group.
    """
    store = private.store()
    first = store.compare_set(key, "", value).decode()
    if first != value:
        store.set(f"{key} other", value)
    if store.add(f"{key} ranks", 1) == dist.get_world_size():
        store.set(f"{key} all", "")
    try:
        store.wait([f"{key} all"])
    except RuntimeError as error:
        raise Disagreement("some rank has said nothing") from error
    if before and dist.get_rank() == 0:
        for part in ("", " ranks", " all"):
            store.delete_key(before + part)
    return [first, store.get(f"{key} other").decode()] if store.check([f"{key} other"]) else [first]


def alike(values: Sequence[Any], what: str, why: str, tries: str) -> None:
    """Raise `Disagreement` on every rank if the ranks' values are not all equal; the odd ones are named."""
    odd = [rank for rank, value in enumerate(values) if value != values[0]]
    if odd:
        shown = "\n".join(f"  rank {rank:<3} {values[rank]}" for rank in [0, *odd[:4]])
        ranks = ", ".join(map(str, odd))
        raise Disagreement(f"{what} differ between ranks 0 and {ranks}\n{shown}\n  why  {why}\n  try  {tries}")
