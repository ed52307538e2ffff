"""The long search for a rule's row that does not hold; a log can be taken up where it was left.

python -m tests.rules.search LOG.jsonl --seconds 3600 --jobs 32    more seeds of every rule, then what the log has
python -m tests.rules.search LOG.jsonl --seconds 0                 what the log has
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from ndcompile.rules.registry import RULES
from tests.rules.tries import search

EXAMPLES, ROWS = 100, 200
"""Calls of one seed, and of each call the most combinations of rows."""

Row = dict[str, Any]
Arguments = tuple[Any, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--rules", nargs="*", default=list(RULES))
    given = parser.parse_args()
    known = {(row["rule"], row["seed"]) for row in rows(given.log)}
    left = ((rule, seed) for seed in itertools.count() for rule in given.rules if (rule, seed) not in known)
    run(given.log, one, left, given.seconds, given.jobs)
    raise SystemExit(show(given.log))


def run(log: Path, work: Callable[..., list[Row]], left: Iterator[Arguments], seconds: float, jobs: int) -> None:
    """Do what is left, in so many processes, until it is done or the time is over; results are lines of the log."""
    end = time.monotonic() + seconds
    with ProcessPoolExecutor(jobs, get_context("spawn"), torch.set_num_threads, (1,)) as pool, log.open("a") as file:
        running = {pool.submit(work, *each) for each in itertools.islice(left, 2 * jobs * (seconds > 0))}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                file.writelines(json.dumps(row) + "\n" for row in future.result())
                file.flush()
                if time.monotonic() < end:
                    running |= {pool.submit(work, *each) for each in itertools.islice(left, 1)}


def one(rule: str, seed: int) -> list[Row]:
    """A seed of a rule: how many combinations of rows held, and what did not, shrunk."""
    begin, held, failure = time.process_time(), 0, ""
    try:
        held = search(rule, EXAMPLES, ROWS, seed * EXAMPLES).combinations
    except Exception as error:  # whatever goes wrong belongs into the log
        several = getattr(error, "exceptions", (error,))  # hypothesis tells different failures apart
        failure = "\n".join(f"{type(e).__name__}: {e}\n" + "\n".join(getattr(e, "__notes__", [])) for e in several)
    spent = round(time.process_time() - begin, 2)
    known = dict(rule=rule, seed=seed, examples=EXAMPLES, torch=torch.__version__)
    return [known | dict(rows=held, failure=failure, seconds=spent)]


def rows(log: Path) -> list[Row]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def show(log: Path) -> int:
    """Failures in full, and a line on all; the exit status."""
    found = rows(log)
    seeds = Counter(row["rule"] for row in found)
    failed = [row for row in found if row["failure"]]
    for row in failed:
        print(f"{row['rule']}, seed {row['seed']}, torch {row['torch']}: {row['failure']}\n")
    calls, held = (sum(row[name] for row in found) for name in ("examples", "rows"))
    least = min((seeds[rule] for rule in RULES), default=0) * EXAMPLES
    print(
        f"{len(seeds)} of {len(RULES)} rules, at least {least} calls each, {calls:,} in all; "
        f"{held:,} combinations of rows held; {len(failed)} searches failed; "
        f"{sum(row['seconds'] for row in found):,.0f} CPU seconds"
    )
    return int(bool(failed))


if __name__ == "__main__":
    main()
