"""Plant every bug in every program of the zoo; a log can be taken up where it was left.

python -m tests.verify.mutation mutants.jsonl            run what the log does not have yet, then show the score
python -m tests.verify.mutation mutants.jsonl --show     show the score only
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import ndcompile as nd
from ndcompile.verify.graph_mutants import graph_mutants
from ndcompile.verify.mutants import Mutant, mutants
from ndcompile.verify.score import Judge, Score
from tests.equivalence.compare import Case, make
from tests.equivalence.zoo import ALL

MESHES = ("tp=2", "dp_shard=2, tp=2", "tp=3", "dp_replicate=2, dp_shard=2", "dp_shard=2, tp=3")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("log", type=Path)
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--models", nargs="*", default=list(ALL))
    parser.add_argument("--meshes", nargs="*", default=list(MESHES))
    given = parser.parse_args()
    torch.set_num_threads(1)
    if not given.show:
        for case in (Case(model, mesh) for model in given.models for mesh in given.meshes):
            run(case, given.log)
    show(given.log)


def run(case: Case, log: Path) -> None:
    """Judge the mutants of one program that the log lacks."""
    made, batch = make(case)
    try:
        program = nd.compile(made, case.mesh, batch, float64=True)
    except nd.CompileError as error:
        print(f"{case}: refused: {error.what}")
        return
    judge, done = Judge(program, made), {key(row) for row in rows(log)}
    for number, wrong in enumerate(graph_mutants(program)):
        row = dict(model=case.model, mesh=case.mesh, operator=wrong.operator, line=number, before=wrong.place, after="")
        if key(row) not in done:
            write(log, row, judge(wrong))
    for mutant in mutants(str(program), program.mesh):
        row = dict(model=case.model, mesh=case.mesh, operator=mutant.operator, line=mutant.line, before=mutant.before)
        row["after"] = mutant.after
        if key(row) not in done:
            write(log, row, judge(mutant))


def write(log: Path, row: dict[str, Any], verdict: str) -> None:
    with log.open("a") as file:
        file.write(json.dumps(row | dict(verdict=verdict)) + "\n")


def rows(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[k] for k in ("model", "mesh", "operator", "line", "before", "after"))


def show(log: Path) -> None:
    """The table of all, the score of each program, and what was not seen."""
    found, programs = Score(), Counter[str]()
    for row in rows(log):
        mutant = Mutant(row["operator"], row["line"], row["before"], row["after"], "")
        found.add(mutant, row["verdict"])
        programs[f"{row['model']} on {row['mesh']}"] += 1
    console = Console(width=140)
    console.print(found.table())
    console.print(f"{len(programs)} programs")
    for unseen, verdict in found.unseen:
        console.print(f"{verdict}: {unseen}", markup=False)


if __name__ == "__main__":
    main()
