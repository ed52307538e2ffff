"""At which sizes a program is run: a large one at small ones, on a small mesh, with its own text."""

from __future__ import annotations

import itertools

from torch import nn

from ndcompile.errors import CompileError
from ndcompile.program import Program
from ndcompile.verify.domain import FAILURES, Float64
from ndcompile.verify.execute import on_one_device
from ndcompile.verify.sample import draw, symbol_sizes
from ndcompile.verify.shrink import ELEMENTS, RANKS, SMALL_ENOUGH, Small, parameter_count, shrink

ATTEMPTS = 20
"""How many sizes are tried until the reference runs at them."""


def cases_of(program: Program, model: nn.Module | None) -> list[Program]:
    """The program itself; of a large one two small ones, with axes of equal and of coprime sizes if both fit: 24 rows
    that 8 ranks cut evenly and 16 do not cannot become rows that 2 ranks cut evenly and 2 do not.
    """
    if program.mesh.world_size <= RANKS and parameter_count(program) <= ELEMENTS:
        return [program]
    settings: list[dict[str, int]] = [{}, *({axis.name: 3} for axis in reversed(program.mesh.axes))]
    found: list[Program] = []
    refused: list[CompileError] = []
    for ranks in settings:
        if len(found) < min(2, len(program.mesh.axes)):
            try:
                found.append(_fitting(program, model, ranks))
            except CompileError as error:
                refused.append(error)
    if not found:
        raise refused[0]
    return found


def _fitting(program: Program, model: nn.Module | None, ranks: dict[str, int]) -> Program:
    """The first small program whose reference runs."""
    failure: Exception | None = None
    for small in itertools.islice(shrink(program, ranks), ATTEMPTS):
        domain = Float64(0)
        try:
            on_one_device(small, draw(small, domain, model, steps=1), domain)
        except FAILURES as error:
            failure = error
            continue
        return small
    raise CompileError(
        "no small sizes were found at which the model runs",
        why=str(failure),
        tries=SMALL_ENOUGH,
    ) from failure


def sizes_of(case: Program) -> str:
    """At which sizes it ran."""
    symbols = ", ".join(f"{name} = {size}" for name, size in symbol_sizes(case).items())
    if not isinstance(case, Small):
        return f"{symbols}; others as in the program"
    named = ", ".join(f"{name} = {size}" for name, size in case.named.items())
    left = f", without {len(case.without)} blocks" if case.without else ""
    return f"{case.mesh}: {named}, {symbols}{left}"
