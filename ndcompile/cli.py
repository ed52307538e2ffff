"""The command line: `ndcompile demo`, `inspect`, `verify` and `mutate`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn, track
from rich.text import Text

import ndcompile as nd
from ndcompile.demo import run as demonstration
from ndcompile.demo.processes import RankFailed
from ndcompile.demo.train import PRECISIONS, Settings
from ndcompile.errors import CompileError
from ndcompile.mesh import MeshError
from ndcompile.models import in_float64, load_model
from ndcompile.tables import collectives_table, duties_table, memory_table, parameters_table, print_source
from ndcompile.verify.graph_mutants import GraphMutant, graph_mutants
from ndcompile.verify.mutants import Mutant, mutants
from ndcompile.verify.score import Judge, Score

HELP = "Write a model for one device, declare a mesh, get a readable module that runs on the mesh."

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=HELP)
console = Console()
errors = Console(stderr=True)

Model = Annotated[str, typer.Argument(help="module:function returning (model, example_inputs), or a config.json.")]
Mesh = Annotated[str, typer.Option(help="Axes and sizes, for example 'dp_shard=2, tp=2'.")]


@app.command()
def demo(
    mesh: Mesh = "dp_shard=2, tp=2",
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 20,
    float64: Annotated[bool, typer.Option("--float64", help="Compute in float64, where the bar is 1e-10.")] = False,
    precision: Annotated[str, typer.Option(help=" or ".join(PRECISIONS))] = "float32",
    dropout: Annotated[float, typer.Option(min=0.0, max=0.9)] = 0.0,
    out: Annotated[Path, typer.Option(help="Where the emitted source is written.")] = Path("ndcompile_demo.py"),
) -> None:
    """Train a small language model on one device and on a mesh of local processes, and compare them.

    The text is the source of Python's own standard library. Exit status 1 if the gradients differ by more than
    1e-10 in float64, or 1e-5 in float32.
    """
    if precision not in PRECISIONS:
        raise typer.BadParameter(f"{precision!r} is not {' or '.join(PRECISIONS)}", param_hint="--precision")
    if float64 and precision != "float32":
        raise typer.BadParameter("--float64 leaves nothing to round: give one of the two", param_hint="--precision")
    settings = Settings(mesh=mesh, steps=steps, float64=float64, precision=precision, dropout=dropout)
    with user_errors():
        equal = demonstration.demonstrate(settings, out, console)
    raise typer.Exit(0 if equal else 1)


@app.command()
def inspect(
    model: Model,
    mesh: Mesh,
    source: Annotated[bool, typer.Option(help="Print the emitted source.")] = True,
    out: Annotated[Path | None, typer.Option(help="Also write the emitted source to this file.")] = None,
    remat: Annotated[str | None, typer.Option(help="none, block, or what is saved: linear,attention.")] = None,
    reshard: Annotated[bool, typer.Option(help="Give gathered weights back after forward.")] = True,
    halves: Annotated[bool, typer.Option("--halves", help="Two halves of a batch in turn, on tp.")] = False,
    at: Annotated[str, typer.Option(help="Sizes at which memory is told, for example 'b=4, s=8192'.")] = "",
    transport: Annotated[str, typer.Option(help="Whose memory is told: nccl or symmetric.")] = "nccl",
) -> None:
    """Show what a model becomes on a mesh, without running it: collectives, parameters on a rank, its memory, who
    reduces which gradient, source.
    """
    with user_errors():
        made, example_inputs = load_model(model)
        saved = remat if remat in (None, "none", "block") else tuple(remat.replace(" ", "").split(","))
        program = nd.compile(made, mesh, example_inputs, remat=saved, reshard_after_forward=reshard, halves=halves)
        memory = memory_table(program, _sizes(at), transport)
    console.print(collectives_table(program))
    console.print(parameters_table(program))
    console.print(memory)
    console.print(duties_table(program))
    for mask in program.dense_masks():
        console.print(f"{mask}   {mask.source}", markup=False)
    if source:
        print_source(str(program), console)
    if out is not None:
        out.write_text(str(program))


@app.command()
def verify(
    model: Model,
    mesh: Mesh,
    seeds: Annotated[int, typer.Option(min=1, help="Samples in the prime field.")] = 3,
    microbatches: Annotated[int, typer.Option(min=1, help="Microbatches of a step.")] = 2,
    also: Annotated[str, typer.Option(help="More arithmetics: dtypes, integers, or both with a comma.")] = "",
    device: Annotated[str, typer.Option(help="Where all ranks run: cpu, or a GPU such as cuda.")] = "cpu",
    halves: Annotated[bool, typer.Option("--halves", help="Two halves of a batch in turn, on tp.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the report to this file.")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Also write it as a page to this file.")] = None,
) -> None:
    """Compare what a model becomes on a mesh with the model on one device, in exact arithmetic, in one process.

    Exit status 1 on any difference.
    """
    with user_errors():
        made, example_inputs = load_model(model)
        program = nd.compile(made, mesh, example_inputs, halves=halves)
        more = [name.strip() for name in also.split(",") if name.strip()]
        with progress_bar() as progress:
            report = nd.verify(
                program, made, seeds=seeds, microbatches=microbatches, also=more, device=device, progress=progress
            )  # fmt: skip
    console.print(Text(str(report)), soft_wrap=True)
    if json_file is not None:
        json_file.write_text(json.dumps(report.to_json(), indent=1))
    if html_file is not None:
        html_file.write_text(report.to_html())
    raise typer.Exit(0 if report else 1)


@app.command()
def mutate(
    model: Model,
    mesh: Mesh,
    only: Annotated[str, typer.Option(help="Operators whose name holds this.")] = "",
    every: Annotated[int, typer.Option(min=1, help="Take one mutant in this many.")] = 1,
) -> None:
    """Plant bugs in a program, one at a time, and count what verify sees of them.

    Exit status 1 if a mutant that is not equivalent is left alive.
    """
    with user_errors():
        made, example_inputs = load_model(model)
        program = nd.compile(made.double(), mesh, in_float64(example_inputs), float64=True)
        planted: list[Mutant | GraphMutant] = [*graph_mutants(program), *mutants(str(program), program.mesh)]
        chosen = [m for m in planted if only in m.operator][::every]
        found = Score()
        judge = Judge(program, made)
        for mutant in track(chosen, "mutants", console=errors):
            found.add(mutant, judge(mutant))
    console.print(found.table())
    for mutant, verdict in found.unseen:
        console.print(Text(f"{verdict}: {mutant}"), soft_wrap=True)
    raise typer.Exit(0 if found.score == 1 else 1)


def _sizes(text: str) -> dict[str, int]:
    """`b=4, s=8192`."""
    pairs = [part.partition("=") for part in text.replace(" ", "").split(",") if part]
    if wrong := [name for name, _, size in pairs if not size.isdigit() or int(size) < 1]:
        raise typer.BadParameter(f"'{wrong[0]}' has no size", param_hint="--at")
    return {name: int(size) for name, _, size in pairs}


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on a terminal, and nothing elsewhere: what to call with a text, the steps that are done, and all."""
    columns = (*Progress.get_default_columns()[:3], TimeElapsedColumn())
    with Progress(*columns, console=errors, disable=not errors.is_terminal, transient=True) as bar:
        task = bar.add_task("")

        def tell(what: str, done: int, steps: int) -> None:
            bar.update(task, description=what, completed=done, total=steps, refresh=True)

        yield tell


@contextmanager
def user_errors() -> Iterator[None]:
    """Errors made for users are printed as their text, with exit status 2; a failing rank's as its own, with 3."""
    try:
        yield
    except (CompileError, MeshError) as error:
        errors.print(Text(str(error)))
        raise typer.Exit(2) from None
    except RankFailed as error:
        errors.print(Text(error.user_error or str(error)))
        raise typer.Exit(2 if error.user_error else 3) from None


def main() -> None:
    app(prog_name="ndcompile")
