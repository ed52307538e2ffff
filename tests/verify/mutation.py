"""Plant bugs in every program of the equivalence matrix, and count what sees them; a log that a later run goes on with.

    python -m tests.verify.mutation LOG                              all bugs that the log lacks, then the score
    python -m tests.verify.mutation LOG --jobs 32 --seconds 480      32 processes of one thread, done after 480 seconds
    python -m tests.verify.mutation LOG --every 4                    of each operator one site in four, and at least one
    python -m tests.verify.mutation LOG --models mlp --meshes tp=2   some programs
    python -m tests.verify.mutation LOG --only conversions           of the graphs alone: no program has to run for them
    python -m tests.verify.mutation LOG --only calls                 what the root calls: other blocks, other values
    python -m tests.verify.mutation LOG --show                       the score, and what the log has not got

A program's bugs are planted in an order that is drawn by a fixed seed, first one site of each operator, then another:
wherever time ends, no operator was left out. Exit status 1 if a bug is alive. A log is of one version of the compiler:
programs of which it has all bugs are not compiled again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import random
import signal
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import ndcompile as nd
from ndcompile.program import Program
from ndcompile.verify.graph_mutants import GraphMutant, graph_mutants
from ndcompile.verify.mutants import CALLS, Mutant, mutants
from ndcompile.verify.score import Judge, Score
from tests.equivalence.captures import captured_once
from tests.equivalence.compare import Case, make
from tests.equivalence.registry import MODELS

MESHES = ("tp=3", "dp_shard=2, tp=2", "dp_replicate=2, dp_shard=2", "dp_shard=3", "tp=2", "dp_shard=2")
"""Axes alone and together, of equal sizes, and sizes that divide little; few models take all."""

COUNT = 4
"""A model is planted with bugs on the first of these that it compiles for, so many."""

SEED = 0

Planted = Mutant | GraphMutant
Row = dict[str, Any]
Key = tuple[Any, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path)
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS, metavar="MODEL")
    parser.add_argument("--meshes", nargs="*", default=list(MESHES), metavar="MESH")
    parser.add_argument("--count", type=int, default=COUNT, help="the first meshes that a model compiles for, so many")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--only", choices=["conversions", "calls"], help="some operators, in a log of their own")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--each", type=float, default=30.0, help="seconds after which one bug is given up")
    given = parser.parse_args()
    if not given.show:
        work = Work(given.log, tuple(given.meshes), given.count, given.every, given.each, given.only)
        run(given.models, work, given.jobs, time.time() + given.seconds)
    sys.exit(0 if show(given.log) else 1)


# ---- who does what, and until when ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """What is done with each model, by the options of the command."""

    log: Path
    meshes: tuple[str, ...]
    count: int = COUNT
    every: int = 1
    each: float = 30.0
    only: str | None = None


def run(models: Iterable[str], work: Work, jobs: int, end: float) -> None:
    """Each model in one of `jobs` processes. Of the time that is left, a model gets its share when it begins."""
    left = list(models)
    known = rows(work.log)
    done, settled = {key(row) for row in known}, settled_of(known, work.every)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        running: set[Future[None]] = set()
        while (left and time.time() < end) or running:
            while left and len(running) < jobs and time.time() < end:
                share = min(1.0, jobs / len(left)) * (end - time.time())
                running.add(pool.submit(run_model, left.pop(0), work, done, time.time() + share, settled))
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            for each in finished:
                each.result()


def run_model(
    model: str, work: Work, done: set[Key], end: float, settled: Mapping[tuple[str, str], bool] | None = None
) -> None:
    """The bugs of one model, on each mesh for its share of the time; it is captured once. Of a model and mesh that are
    `settled` it is known whether there is a program, and there is nothing left to do.
    """
    left, settled = work.count, settled or {}
    with captured_once():
        for mesh in work.meshes:
            share = (end - time.time()) / left
            try:
                known = settled.get((model, mesh))
                left -= run_program(Case(model, mesh), work, done, time.time() + share) if known is None else known
            except Exception:
                write(work.log, dict(model=model, mesh=mesh, failed=traceback.format_exc()))
            if not left:
                return


def run_program(case: Case, work: Work, done: set[Key], end: float) -> bool:
    """Judge the bugs of one program that are not done, as far as time goes; whether there is such a program."""
    made, batch = make(case)
    program_row = dict(model=case.model, mesh=case.mesh)
    try:
        program = nd.compile(made, case.mesh, batch, float64=True)
    except nd.CompileError as error:
        if type(error) is not nd.CompileError:
            raise  # a check of the compiler's own work
        write(work.log, program_row | dict(refused=error.what))
        return False
    chosen = in_turn(planted(program, work.only), f"{SEED} {case}", work.every)
    write(work.log, program_row | dict(sites=Counter(m.operator for m in chosen), every=work.every))
    judge = Judge(program, made)
    alarm = judge(Mutant("", 0, "", "", str(program))) if work.only != "conversions" else "not said"
    if alarm not in ("equivalent", "not said"):
        write(work.log, program_row | dict(failed=f"the right program is told to be wrong: {alarm}"))
        return True
    for mutant in chosen:
        row = program_row | row_of(mutant)
        if time.time() > end:
            return True
        if key(row) not in done:
            begin = time.perf_counter()
            verdict = judged(judge, mutant, work.each)
            write(work.log, row | dict(verdict=verdict, seconds=round(time.perf_counter() - begin, 2)))
    return True


def planted(program: Program, only: str | None) -> list[Planted]:
    """The bugs of a program, or those of one kind."""
    if only == "conversions":
        return [*graph_mutants(program)]
    of_text = mutants(str(program), program.mesh)
    if only == "calls":
        return [mutant for mutant in of_text if mutant.operator in CALLS]
    return [*graph_mutants(program), *of_text]


def in_turn(planted: Iterable[Planted], seed: str, every: int = 1) -> list[Planted]:
    """One site of each operator, then another of each; of every operator one in `every`, and at least one."""
    by_operator: defaultdict[str, list[Planted]] = defaultdict(list)
    for mutant in planted:
        by_operator[mutant.operator].append(mutant)
    draw = random.Random(seed)
    drawn = [draw.sample(found, -(-len(found) // every)) for found in by_operator.values()]
    return [mutant for turn in itertools.zip_longest(*drawn) for mutant in turn if mutant is not None]


def judged(judge: Judge, mutant: Planted, seconds: float) -> str:
    try:
        with limit(seconds):
            return judge(mutant)
    except TooLong:
        return "too long"


class TooLong(BaseException):
    """A bug keeps its program from ending. Nothing that tells errors of the model's code takes it for one."""


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raise `TooLong` in the main thread after so many seconds."""

    def give_up(*_: Any) -> None:
        raise TooLong

    signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


# ---- the log -------------------------------------------------------------------------------------------------------


def row_of(mutant: Planted) -> Row:
    if isinstance(mutant, GraphMutant):
        return dict(operator=mutant.operator, line=mutant.number, before=mutant.place, after="")
    return dict(operator=mutant.operator, line=mutant.line, before=mutant.before, after=mutant.after)


def write(log: Path, row: Row) -> None:
    with log.open("a") as file:
        file.write(json.dumps(row) + "\n")


def rows(log: Path) -> list[Row]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def key(row: Row) -> Key:
    return tuple(row.get(k) for k in ("model", "mesh", "operator", "line", "before", "after"))


def settled_of(known: Iterable[Row], every: int) -> dict[tuple[str, str], bool]:
    """The models and meshes that a log is through with: those that do not compile, and those with all bugs judged."""
    programs, latest = Programs(), {key(row): row for row in known}
    for row in latest.values():
        programs.add(row)
    of_every = {(row["model"], row["mesh"]) for row in latest.values() if row.get("every") == every}
    judged = {p: True for p, sites in programs.sites.items() if p in of_every and programs.judged[p] == sites}
    return dict.fromkeys(programs.refused, False) | judged


def show(log: Path, console: Console | None = None) -> bool:
    """The table of all, what was not seen, and what is not done; whether no bug is alive and nothing failed."""
    console = console or Console(width=150)
    found, programs = Score(), Programs()
    for row in {key(row): row for row in rows(log)}.values():
        if "verdict" in row:
            found.add(Mutant(row["operator"], row["line"], row["before"], row["after"], ""), row["verdict"])
        programs.add(row)
    console.print(found.table())
    console.print("\n".join(programs.lines()), markup=False, highlight=False)
    for unseen, verdict in found.unseen:
        if verdict != "equivalent":
            console.print(f"{verdict}: {unseen}", markup=False, highlight=False)
    return found.score == 1.0 and not programs.failed


class Programs:
    """How much of each program the log has."""

    def __init__(self) -> None:
        self.sites: dict[tuple[str, str], Counter[str]] = {}
        self.judged: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        self.refused: dict[tuple[str, str], str] = {}
        self.failed: dict[tuple[str, str], str] = {}
        self.seconds = 0.0

    def add(self, row: Row) -> None:
        program = row["model"], row["mesh"]
        if "sites" in row:
            self.sites[program] = Counter(row["sites"])
        elif "verdict" in row:
            self.judged[program][row["operator"]] += 1
            self.seconds += row.get("seconds", 0.0)
        elif "refused" in row:
            self.refused[program] = row["refused"]
        elif "failed" in row:
            self.failed[program] = row["failed"]

    def lines(self) -> list[str]:
        meshes = Counter(model for model, _ in self.judged)
        sites, done = (sum(sum(c.values()) for c in counts.values()) for counts in (self.sites, self.judged))
        pairs = [(program, operator) for program, found in self.sites.items() for operator in found]
        missing = [(p, operator) for p, operator in pairs if not self.judged[p][operator]]
        least = min(meshes.values(), default=0)
        return [
            f"{len(meshes)} models on {least} to {max(meshes.values(), default=0)} meshes each, "
            f"{sum(meshes.values())} programs; {len(self.refused)} do not compile",
            f"{done} of {sites} sites; of {len(pairs)} operators in programs {len(missing)} have none that was judged",
            f"{self.seconds:.0f} CPU seconds, {self.seconds / max(1, done):.2f} a bug",
            *(f"failed: {' on '.join(case)}: {_error(text)}" for case, text in self.failed.items()),
        ]


def _error(text: str) -> str:
    """The line of a traceback that names the error."""
    return next(line for line in reversed(text.splitlines()) if line and not line.startswith(" "))


if __name__ == "__main__":
    main()
