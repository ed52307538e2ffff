"""What tokens behind the end of a sequence do to each value of a graph: nothing, or it is said why not.

A sequence that is too short for a mesh gets *pads* at its end. They change nothing if every value has at its true
places what it has without them. That is followed op by op: most ops take each place by itself; what adds up places
needs zeros at the pads, attention needs a mask that keeps them out, and what looks from the end is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import sympy
from torch import fx

from ndcompile.errors import CompileError
from ndcompile.rules.registry import describe, source_line


@dataclass(frozen=True)
class Pad:
    """What stands at the pads of a dim: one `number`; with `on` what a longer sequence has there, whatever the inputs
    (positions); else some finite number.
    """

    number: float | None = None
    on: bool = False


ANY, ON, ZERO = Pad(), Pad(on=True), Pad(0)
Pads = dict[int, Pad]
"""By dim."""


@dataclass
class Followed:
    """The pads of every value, and how long a sequence may become, by its symbol, with the table that ends there."""

    symbols: frozenset[str]
    pads: dict[fx.Node, Pads] = field(default_factory=dict)
    limits: dict[str, tuple[int, str]] = field(default_factory=dict)

    def lengthened(self, node: fx.Node) -> list[int]:
        """The dims that become longer."""
        return [d for d, size in enumerate(node.meta["sizes"]) if self.longer(size)]

    def longer(self, size: Any) -> bool:
        return any(str(symbol) in self.symbols for symbol in sympy.sympify(size).free_symbols)

    def limit(self, size: Any, most: Any, name: str) -> None:
        """A dim of this size takes its entries from a table of `most`."""
        if isinstance(most, int) and (plain := end_of(size)) is not None:
            symbol, more = plain
            if symbol not in self.limits or most - more < self.limits[symbol][0]:
                self.limits[symbol] = most - more, name


def end_of(size: Any) -> tuple[str, int] | None:
    """The symbol `s` and the number `c` of a size `s + c`, of which pads are the end; None for another size."""
    expression = sympy.sympify(size)
    symbols = list(expression.free_symbols)
    more = expression - symbols[0] if len(symbols) == 1 else None
    return (str(symbols[0]), int(more)) if more is not None and more.is_Integer else None


def refused(node: fx.Node, why: str, *tries: str) -> CompileError:
    return CompileError(
        "pad_inputs=True would change what the model computes",
        node=describe(node), source=source_line(node), why=why,
        tries=(*tries, "lengths that divide, without pad_inputs"),
    )  # fmt: skip
