"""The demonstration as a whole: compile, train twice, compare, show."""

from __future__ import annotations

import re
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ndcompile.demo.compare import Distance, bar, distances, holds, judged
from ndcompile.demo.processes import Report, enough_gpus, run_mesh, run_one_device
from ndcompile.demo.train import Record, Settings
from ndcompile.tables import axis_table, class_source, print_source


def demonstrate(settings: Settings, out: Path, console: Console) -> bool:
    """Print comparison and an emitted block, write the source to `out`; True if the gradients are within the bar."""
    with console.status(f"compiling for {settings.mesh}"):
        program = settings.compiled()
    world_size = program.mesh.world_size
    on_gpus = enough_gpus(world_size)
    with _progress(console) as progress:
        one = run_one_device(settings, on_gpus, _bar(progress, "one device", settings.steps))
        mesh = run_mesh(settings, world_size, on_gpus, _bar(progress, str(program.mesh), settings.steps))
    out.write_text(str(program))
    print_source(class_source(str(program), "DecoderBlock"), console)
    console.print(axis_table(program.collectives()))
    console.print(_losses(settings, one, mesh))
    found = distances(settings, mesh, one)
    equal = holds(settings, found)
    for line in _verdict(settings, found, equal):
        console.print(line, soft_wrap=True)
    console.print(f"the whole program is in {out}", highlight=False, soft_wrap=True)
    return equal


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}"))
    return Progress(*columns, TimeElapsedColumn(), console=console)


def _bar(progress: Progress, title: str, steps: int) -> Report:
    task = progress.add_task(title, total=steps, loss="starting")
    return lambda step, loss: progress.update(task, completed=step + 1, loss=f"loss {loss:.4f}")


def _losses(settings: Settings, one: Record, mesh: Record) -> Table:
    table = Table(title="mean cross-entropy of the next byte")
    table.add_column("step", justify="right")
    for title in ("one device", settings.mesh, "difference"):
        table.add_column(title, justify="right")
    for step, (a, b) in enumerate(zip(one.losses, mesh.losses, strict=True)):
        table.add_row(str(step), f"{a:.10f}", f"{b:.10f}", f"{abs(a - b):.1e}")
    return table


def _verdict(settings: Settings, found: list[Distance], equal: bool) -> list[str]:
    limit = bar(settings)
    lines = []
    for distance in found:
        is_judged = limit is not None and distance in judged(settings, found)
        note = f"must be at most {limit:.0e}" if is_judged else "not judged: " + _reason(settings)
        lines.append(
            f"step {distance.step}: largest relative distance of any gradient "
            f"{distance.largest:.1e} ({distance.name}); {note}"
        )
    if found[0].zero and not settings.float64:
        names = sorted({re.sub(r"\.\d+\.", ".*.", name) for name in found[0].zero})
        lines.append(f"zero by mathematics, so listed and not divided by: {', '.join(names)}")
    if limit is not None:
        lines.append("[green]equal within the bar[/]" if equal else "[red]NOT equal within the bar[/]")
    return lines


def _reason(settings: Settings) -> str:
    if settings.precision != "float32":
        return "the mesh computes in bf16, one device in float32"
    return "rounding has moved the weights apart since step 0"
