"""Many random programs in several processes, and the log that they write."""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import time
import traceback
from collections import Counter
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random
from typing import Any, TextIO

import torch

from tests.programs.generate import generate
from tests.programs.judge import Verdict, as_row, judge, reason
from tests.programs.reduce import reduce
from tests.programs.sketch import Sketch

LIMIT = 120
"""Seconds after which a program counts as hanging."""


def run(log: Path, seeds: range, seconds: float, jobs: int, limit: float = LIMIT) -> None:
    """`jobs` processes; one that dies, or is at a program for longer than `limit`, is a row of the log, and another
    takes its place.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    spawn, end = multiprocessing.get_context("spawn"), time.time() + seconds
    done = {row["seed"] for row in rows(log)}
    shares = [[seed for seed in seeds if seed % jobs == job and seed not in done] for job in range(jobs)]
    running = [_start(spawn, log, share, end, job, limit) for job, share in enumerate(shares)]
    while any(process.is_alive() for process in running):
        time.sleep(1)
        for job, process in enumerate(running):
            if process.exitcode not in (None, 0):
                _write_death(log, job, process.exitcode or 0)
                done = {row["seed"] for row in rows(log)}
                left = [seed for seed in shares[job] if seed not in done]
                running[job] = _start(spawn, log, left, end, job, limit)
    for job in range(jobs):
        _current(log, job).unlink(missing_ok=True)


def _start(spawn: Any, log: Path, seeds: list[int], end: float, job: int, limit: float) -> BaseProcess:
    process: BaseProcess = spawn.Process(target=work, args=(log, seeds, end, job, limit))
    process.start()
    return process


def work(log: Path, seeds: list[int], end: float, job: int, limit: float) -> None:
    """Judge the seeds, one line of the log each."""
    torch.set_num_threads(1)
    for seed in seeds:
        if time.time() > end:
            return
        with _current(log, job).open("w") as note:
            _append(log, _row(seed, note, limit))
            faulthandler.cancel_dump_traceback_later()


def _row(seed: int, note: TextIO, limit: float) -> dict[str, Any]:
    """The verdict on a seed; `note` has what is known so far, in case the process does not come back."""
    note.write(f"{seed}\n")
    note.flush()
    faulthandler.dump_traceback_later(limit, exit=True, file=note)
    try:
        sketch = generate(Random(seed))
    except Exception:
        verdict = Verdict("generator", traceback.format_exc(limit=-4))
        return as_row(seed, None, verdict) | dict(program="")
    row = as_row(seed, sketch, verdict := judge(sketch))
    if not verdict.good:
        note.write(json.dumps(row | dict(program=str(sketch))) + "\n")
        note.flush()
        faulthandler.dump_traceback_later(limit, exit=True, file=note)
        row["program"] = str(smallest(sketch, verdict, seconds=30))
    return row


def _current(log: Path, job: int) -> Path:
    """Which seed a process is at, and where it stood when it was ended."""
    return log.with_suffix(f".{job}")


def _write_death(log: Path, job: int, code: int) -> None:
    first, *rest = _current(log, job).read_text().splitlines() or ["-1"]
    if rest and rest[0].startswith("{"):
        _append(log, json.loads(rest[0]))  # it was being made small
        return
    seed = int(first)
    kind, detail = ("hang", "\n".join(rest)[-1500:]) if rest else ("died", f"exit code {code}")
    sketch = generate(Random(seed))  # it has been before: a seed of which none comes is a row
    _append(log, as_row(seed, sketch, Verdict(kind, detail)) | dict(program=str(sketch)))


def _append(log: Path, row: dict[str, Any]) -> None:
    with log.open("a") as file:
        file.write(json.dumps(row) + "\n")


def rows(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def smallest(sketch: Sketch, verdict: Verdict, seconds: float = 60) -> Sketch:
    """A smaller sketch with the same kind of failure."""

    def fails(candidate: Sketch) -> bool:
        found = judge(candidate)
        return (found.kind, reason(found)) == (verdict.kind, reason(verdict))

    return reduce(sketch, fails, seconds)


def table(found: list[dict[str, Any]]) -> str:
    """How many of each kind, why they were refused, and every failure."""
    kinds = Counter(row["kind"] for row in found)
    judged = sum(n for kind, n in kinds.items() if kind != "invalid")
    seconds = sum(row["seconds"] for row in found)
    versions = ", ".join(sorted({row.get("torch", "") for row in found}))
    lines = [f"{judged:,} programs, {seconds:,.0f} CPU seconds, torch {versions}", ""]
    lines += [f"{n:7,}  {kind:<10} {n / max(judged, 1):6.1%}" for kind, n in kinds.most_common()]
    free = [row["kind"] for row in found if not row.get("pins") and row["kind"] != "invalid"]
    lines += ["", f"without pins: {len(free):,}, of which refused {free.count('refused') / max(len(free), 1):.1%}"]
    for kind in (
        "refused",
        "tested",
        "crash",
        "checker",
        "wrong",
        "rounding",
        "reference",
        "hang",
        "died",
        "generator",
    ):
        same = Counter(reason(Verdict(kind, row["detail"])) for row in found if row["kind"] == kind)
        lines += ["", kind] * bool(same) + [f"{n:7,}  {text}" for text, n in same.most_common(40)]
    bad = [row for row in found if "program" in row]
    lines += ["", "failures: " + ", ".join(f"{row['seed']} {row['kind']}" for row in bad[:60])] * bool(bad)
    return "\n".join(lines)
