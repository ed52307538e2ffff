"""Where in the model a node stands, and how many nodes of the whole graph it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx


@dataclass(frozen=True)
class Place:
    """Where in the model a node stands: in a call of a block, or in a run's stretch between two (`block` is empty)."""

    number: int
    """Of the call or stretch, in order."""
    block: str
    stands_for: tuple[str, ...] = ()
    """The blocks that this call stands for: itself, or in a run's second round one for each later round."""
    run: int | None = None
    round: int = 0
    position: int = 0
    """In the round."""

    @property
    def repeat(self) -> int:
        return max(len(self.stands_for), 1)


def repeat_of(node: fx.Node) -> int:
    """How many nodes of the whole graph this one stands for."""
    place = node.meta.get("place")
    return len(node.meta.get("stands_for", ())) or (1 if place is None else place.repeat)


def in_run(node: fx.Node) -> bool:
    """Whether a node is one of a run's rounds."""
    place = node.meta.get("place")
    return place is not None and place.run is not None


def pins_in(pinned: Mapping[str, str], block: str) -> tuple[tuple[str, str], ...]:
    """The pins of a block, by the names in it."""
    return tuple(sorted((name[len(block) :], pin) for name, pin in pinned.items() if inside(name, block)))


def inside(name: str, block: str) -> bool:
    """Whether a parameter or module is a block's own."""
    return bool(block) and (name == block or name.startswith(block + "."))
