"""Tables of a program for the terminal: its collectives by block and axis, and what a rank holds of the parameters."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable

from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table

from ndcompile.cost import NOMINAL
from ndcompile.duties import Duties
from ndcompile.listing import Collective
from ndcompile.program import Program

OUTSIDE = "outside blocks"

Row = tuple[str, str]
"""The axes and the kind of a collective."""

Counts = dict[Row, dict[str, tuple[int, int]]]
"""For each kind of collective and each side: how many, and their bytes."""


def collectives_table(program: Program) -> Table:
    """One row for each axis and kind of collective in a block; blocks with equal rows are one, with their number."""
    table = Table(title=f"collectives on {program.mesh}", caption=f"bytes are of whole values, at {nominal_sizes()}")
    for name in ("block", "axis", "collective"):
        table.add_column(name)
    table.add_column("forward", justify="right")
    table.add_column("backward", justify="right")
    for rows in collectives_rows(program):
        for row in rows:
            table.add_row(*row)
        table.add_section()
    return table


def collectives_rows(program: Program) -> list[list[tuple[str, ...]]]:
    """The rows of that table, blocks apart: the first of each names its blocks."""
    found: list[list[tuple[str, ...]]] = []
    for blocks, counts in grouped(program.collectives()):
        title = block_title(blocks)
        rows: list[tuple[str, ...]] = []
        for (axis, kind), sides in sorted(counts.items()):
            rows.append((title, axis, kind, _amount(sides.get("forward")), _amount(sides.get("backward"))))
            title = ""
        found.append(rows)
    return found


def axis_table(collectives: Iterable[Collective]) -> Table:
    """How many collectives of each kind run on each axis in one training step."""
    counts = Counter((" × ".join(c.axis), c.kind, c.side) for c in collectives)
    table = Table(title="collectives of one training step")
    for name in ("axis", "collective", "forward", "backward"):
        table.add_column(name, justify="right" if name.endswith("ward") else "left")
    for axis, kind in sorted({key[:2] for key in counts}):
        table.add_row(axis, kind, *(str(counts[axis, kind, side] or "–") for side in ("forward", "backward")))
    return table


def grouped(collectives: Iterable[Collective]) -> list[tuple[list[str], Counts]]:
    """The counts of each block, blocks with equal counts together, in program order."""
    blocks: dict[str, Counts] = {}
    for c in collectives:
        sides = blocks.setdefault(c.block or OUTSIDE, {}).setdefault((" × ".join(c.axis), c.kind), {})
        number, size = sides.get(c.side, (0, 0))
        sides[c.side] = number + 1, size + c.bytes
    groups: list[tuple[list[str], Counts]] = []
    for block, counts in blocks.items():
        same = next((names for names, other in groups if other == counts and OUTSIDE not in (block, *names)), None)
        if same is None:
            groups.append(([block], counts))
        else:
            same.append(block)
    return groups


def block_title(blocks: list[str]) -> str:
    """The first and last of equal blocks and their number."""
    return blocks[0] if len(blocks) == 1 else f"{blocks[0]} … {blocks[-1]} (each of {len(blocks)})"


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


def amount(size: float) -> str:
    """Bytes for people: 1536 is "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def nominal_sizes() -> str:
    """At which sizes bytes are told."""
    return ", ".join(f"{name} = {size}" for name, size in NOMINAL.items())


def _amount(found: tuple[int, int] | None) -> str:
    return "–" if found is None else f"{found[0]} × {amount(found[1] / found[0])}"
