"""Tables of a program for the terminal: its collectives by block and axis, and what a rank holds of the parameters."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Mapping

from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table

from ndcompile.cost import NOMINAL
from ndcompile.duties import Duties
from ndcompile.footprint import choices
from ndcompile.listing import Collective, amount, collectives_rows, nominal_sizes
from ndcompile.program import Program


def collectives_table(program: Program) -> Table:
    """One row for each axis and kind of collective in a block; blocks with equal rows are one, with their number."""
    table = Table(title=f"collectives on {program.mesh}", caption=f"bytes are of whole values, at {nominal_sizes()}")
    for name in ("block", "axis", "collective"):
        table.add_column(name)
    table.add_column("forward", justify="right")
    table.add_column("backward", justify="right")
    for rows in collectives_rows(program.collectives()):
        for row in rows:
            table.add_row(*row)
        table.add_section()
    return table


def axis_table(collectives: Iterable[Collective]) -> Table:
    """How many collectives of each kind run on each axis in one training step."""
    counts = Counter((" × ".join(c.axis), c.kind, c.side) for c in collectives)
    table = Table(title="collectives of one training step")
    for name in ("axis", "collective", "forward", "backward"):
        table.add_column(name, justify="right" if name.endswith("ward") else "left")
    for axis, kind in sorted({key[:2] for key in counts}):
        table.add_row(axis, kind, *(str(counts[axis, kind, side] or "–") for side in ("forward", "backward")))
    return table


def parameters_table(program: Program) -> Table:
    """What one rank holds of the parameters, by layout."""
    sizes: dict[str, list[int]] = {}
    for plan in program.parameters.values():
        sizes.setdefault(str(plan.layout) or "replicated", []).append(plan.local_bytes(program.mesh))
    table = Table(title="parameters on one rank", show_footer=True)
    table.add_column("layout", "all")
    table.add_column("parameters", str(sum(map(len, sizes.values()))), justify="right")
    total = sum(map(sum, sizes.values()))
    table.add_column("size", amount(total), justify="right")
    table.add_column("bytes", f"{total:,}", justify="right")
    for layout, found in sorted(sizes.items()):
        table.add_row(layout, str(len(found)), amount(sum(found)), f"{sum(found):,}")
    return table


def memory_table(program: Program, sizes: Mapping[str, int], transport: str = "nccl") -> Table:
    """What a training step needs of a rank, as the program is, and with other choices of what is recomputed."""
    found = choices(program, sizes, transport)
    told = ", ".join(f"{name} = {size}" for name, size in {**NOMINAL, **sizes}.items())
    caption = f"eager, at {told}; b is a rank's batch; optimizer: AdamW; activations: kept from forward to backward"
    table = Table(title="memory of one rank in a training step", caption=caption)
    for name in ("recomputed", "weights", *found[0].memory.rows()):
        table.add_column(name, justify="left" if name in ("recomputed", "weights") else "right")
    for choice in found:
        numbers = [amount(size) for size in choice.memory.rows().values()]
        table.add_row(choice.recomputed, choice.weights, *numbers)
    return table


def duties_table(program: Program) -> Table:
    """Who reduces which gradient, in which dtype, and how many bytes of it; equal blocks are one row."""
    table = Table(title="who reduces which gradient", caption="bytes are what a rank gives to each reduction")
    for name in Duties.HEAD:
        table.add_column(name, justify="right" if name in ("bytes", "uses") else "left")
    for row in program.duties().rows():
        table.add_row(*row)
    return table


def print_source(source: str, console: Console) -> None:
    """Python source: coloured on a terminal, as it is in a file or a pipe."""
    if console.is_terminal:
        console.print(Syntax(source, "python", theme="ansi_dark", background_color="default", word_wrap=True))
    else:
        console.file.write(f"{source}\n")


def class_source(source: str, name: str) -> str:
    """The text of the class called `name` in a program's source, or of the first class whose name starts so."""
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    named = [node for node in classes if node.name.startswith(name)] or classes
    assert named, "an emitted program has at least the class of its root"
    lines = source.splitlines()
    return "\n".join(lines[named[0].lineno - 1 : named[0].end_lineno])
