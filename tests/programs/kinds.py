"""What a statement may be: each kind is a function that writes one to a builder, in a table as often as it comes."""

from __future__ import annotations

from collections.abc import Callable

from tests.programs.builder import Builder

Kind = Callable[[Builder], object]

KINDS: list[Kind] = []
"""Each as often as its weight."""

IN_BLOCKS: list[Kind] = []
"""Those that a block may hold."""


def kind(weight: int, in_blocks: bool = True) -> Callable[[Kind], Kind]:
    def register(function: Kind) -> Kind:
        KINDS.extend([function] * weight)
        IN_BLOCKS.extend([function] * weight if in_blocks else [])
        return function

    return register
