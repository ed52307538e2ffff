"""Models that nobody chose: each compiled as it comes on some meshes, verified, and a line of a log for each.

What is refused says why; a difference, or an error that is no refusal, ends the command with status 1.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ndcompile as nd
from ndcompile.verify import untouched
from tests.verify.mutation import TooLong, limit

SECONDS = 150
"""For one model on one mesh."""

Batch = dict[str, Any]
"""Keyword inputs: tensors, and what else a model takes."""
Row = dict[str, Any]


class NotSmall(Exception):
    """A model that these sizes do not make small."""


@dataclass(frozen=True)
class Kind:
    """Models of one kind: their names, how one is made with a batch, and the meshes it is tried on."""

    names: Sequence[str]
    made: Callable[[str], tuple[nn.Module, Batch]]
    meshes: Sequence[str]
    on: str
    """What they are of, with its version."""
    options: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """What `nd.compile` is told of a model by name beside its inputs."""


Kinds = dict[str, Kind]


def rows_of(kinds: Kinds, kind: str, name: str, meshes: Sequence[str], verified: bool) -> Iterator[Row]:
    """What becomes of a model on each mesh, or why there is none."""
    about = dict(kind=kind, name=name, on=f"torch {torch.__version__.partition('+')[0]}, {kinds[kind].on}")
    torch.manual_seed(0)
    try:
        with limit(60):
            model, batch = kinds[kind].made(name)
    except (Exception, TooLong) as error:
        yield about | dict(mesh="", found="not made", why=f"{type(error).__name__}: {str(error)[:200]}")
        return
    for mesh in meshes:
        began = time.time()
        row = about | dict(mesh=mesh) | judged(model, mesh, batch, kinds[kind].options.get(name, {}), verified)
        yield row | dict(seconds=round(time.time() - began, 1))


def judged(model: nn.Module, mesh: str, batch: Batch, options: dict[str, Any], verified: bool) -> Row:
    try:
        with limit(SECONDS):
            program = nd.compile(model, mesh, batch, **options)
            if not verified:
                return dict(found="compiled", why="")
            report = nd.verify(program, model, seeds=1)
    except TooLong:
        return dict(found="too long", why=f"{SECONDS} seconds")
    except nd.CompileError as error:
        own = type(error) is nd.CompileError  # else a check of the compiler's own work
        return dict(found="refused" if own else "failed", why=str(error))
    except Exception:  # whatever it is, the log tells it whole, and the exit status is 1
        return dict(found="failed", why=traceback.format_exc())
    unsaid = [claim.kind for claim in report.claims if claim.held is None]
    return dict(found="equal" if report.equal else "different", why="" if report.equal else str(report), unsaid=unsaid)


def done_of(log: Path) -> list[Row]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def work(
    kinds: Callable[[], Kinds], verified: bool, end: float, kind: str, name: str, meshes: Sequence[str]
) -> list[Row]:
    if time.time() > end:
        return []
    warnings.filterwarnings("ignore")
    return list(rows_of(kinds(), kind, name, meshes, verified))


def run(kinds: Callable[[], Kinds], given: argparse.Namespace) -> None:
    """All that the log lacks, until the time is over. `kinds` is a function, so that other processes can call it."""
    log, only, on, end = given.log, given.only, given.on, time.time() + given.seconds
    known = {(row["kind"], row["name"], row["mesh"]) for row in done_of(log)}
    wanted = []
    for kind, of in kinds().items():
        for name in of.names:
            left = [m for m in of.meshes if (not on or m in on) and not {(kind, name, m), (kind, name, "")} & known]
            if left and (not only or name in only or kind in only):
                wanted.append((kind, name, left))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.jobs, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        running = [pool.submit(work, kinds, given.verified, end, *each) for each in wanted]
        for each in as_completed(running):
            with log.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in each.result())
            for row in each.result():
                first = row["why"].partition("\n")[0][:150]
                print(row["kind"], row["name"], row["mesh"], row["found"], first, flush=True)


# ---- the page ------------------------------------------------------------------------------------------------------


FOUND = ("equal", "compiled", "refused", "too long")
"""What may be found, but for what is wrong."""

UNSAID = {
    "equal over F_p": "Tested in float64 alone, since an op has no meaning in the field",
    untouched.KIND: "Equal to their graphs, which were not run beside the models themselves",
}
"""What a claim is that nothing was said of."""


def page(head: str, kinds: Kinds, rows: list[Row], each: tuple[str, str]) -> str:
    """`each` is what one model is called, and several."""
    one, several = each
    tried = [row for row in rows if row["mesh"]]
    told = [what for what in FOUND if any(row["found"] == what for row in tried)]
    versions = "; ".join(dict.fromkeys(row["on"] for row in rows))
    lines = [head, f"Of {versions}:", "", f"| for | {several} | left out | on | {' | '.join(told)} | wrong |"]
    lines += ["|---|---|---|---|" + "---|" * (len(told) + 1)]
    for kind in kinds:
        names = {row["name"] for row in tried if row["kind"] == kind}
        out = {row["name"] for row in rows if row["kind"] == kind} - names
        for mesh in kinds[kind].meshes:
            found = Counter(row["found"] for row in tried if (row["kind"], row["mesh"]) == (kind, mesh))
            counts = [*(found[what] for what in told), found["different"] + found["failed"]]
            if any(counts):
                lines.append(f"| {' | '.join(map(str, [kind, len(names), len(out), f'`{mesh}`', *counts]))} |")
    for claim, text in UNSAID.items():
        unsaid = sorted({row["name"] for row in tried if claim in row.get("unsaid", ())})
        lines += ["", f"{text}: {', '.join(unsaid)}."] if unsaid else []
    return "\n".join([*lines, "", *refusals(kinds, tried, one)]) + "\n"


def refusals(kinds: Kinds, tried: list[Row], one: str) -> Iterator[str]:
    yield from ("## What is refused", "", f"| {one} | on | error |", "|---|---|---|")
    meshes: dict[tuple[str, str, str], list[str]] = {}
    for row in tried:
        if row["found"] not in FOUND[:2]:
            error = row["why"].partition("\n")[0].replace("|", "\\|")
            meshes.setdefault((row["kind"], row["name"], error), []).append(row["mesh"])
    for (kind, name, error), where in meshes.items():
        everywhere = set(where) >= set(kinds[kind].meshes[:2])
        yield f"| {name} | {'all' if everywhere else ', '.join(f'`{mesh}`' for mesh in where)} | {error} |"


def main(about: str, kinds: Callable[[], Kinds], path: Path, written: Callable[[list[Row]], str]) -> None:
    """The command line: fill the log, or write the page from it."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="models or kinds")
    parser.add_argument("--on", nargs="*", default=[], metavar="MESH")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--compile", dest="verified", action="store_false", help="compile alone, which is quicker")
    parser.add_argument("--page", action="store_true")
    given = parser.parse_args()
    if given.page:
        path.write_text(written(done_of(given.log)))
    else:
        run(kinds, given)
    sys.exit(any(row["found"] in ("different", "failed") for row in done_of(given.log)))
