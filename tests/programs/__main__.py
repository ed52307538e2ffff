"""Random programs by their seeds; a log can be taken up where it was left.

python -m tests.programs LOG --count 10000 --jobs 30      the seeds that the log lacks, then the table
python -m tests.programs LOG --seconds 600 --first 5000   as many as fit in the time, from another seed on
python -m tests.programs LOG --show                       the table only
python -m tests.programs --replay 4711                    print one, judge it, and make it small if it fails
"""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random

import torch

from tests.programs.generate import generate
from tests.programs.judge import judge
from tests.programs.long_run import rows, run, smallest, table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path, nargs="?")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=10_000, help="how many seeds")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after this time")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--replay", type=int)
    given = parser.parse_args()
    if given.replay is not None:
        replay(given.replay)
    elif given.log is None:
        parser.error("a log is needed")
    else:
        if not given.show:
            run(given.log, range(given.first, given.first + given.count), given.seconds, given.jobs)
        print(table(rows(given.log)))


def replay(seed: int) -> None:
    torch.set_num_threads(1)
    sketch = generate(Random(seed))
    print(sketch)
    verdict = judge(sketch)
    print(verdict.kind, verdict.detail)
    if not verdict.good:
        print(f"\nsmaller:\n\n{smallest(sketch, verdict)}")


if __name__ == "__main__":
    main()
