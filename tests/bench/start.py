"""What starting costs, in CPU seconds of fresh processes: `import ndcompile`, and a compilation that was kept."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

RUNS = 5


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A fresh process of this interpreter; raises where it fails."""
    given = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=given)
    assert done.returncode == 0, done.stderr
    return done


def import_seconds(module: str, after: str = "torch", runs: int = RUNS) -> float:
    """What importing a module costs once another is there: the median, by Python's own `-X importtime`."""
    found = []
    for _ in range(runs):
        told = python("-X", "importtime", "-c", f"import {after}\nimport {module}").stderr
        row = re.search(rf"^import time:\s*\d+ \|\s*(\d+) \| {re.escape(module)}$", told, re.MULTILINE)
        assert row is not None, f"{module} is imported"
        found.append(int(row[1]) / 1e6)
    return statistics.median(found)


def modules_of(statement: str, after: str = "import torch") -> set[str]:
    """The modules that a statement loads beside those that are there."""
    code = f"{after}\nimport sys, json\nbefore = set(sys.modules)\n{statement}\n"
    told = python("-c", f"{code}print(json.dumps(sorted(set(sys.modules) - before)))").stdout
    return set(json.loads(told.splitlines()[-1]))


START = """
import sys, time
from tests.bench.compile_time import llama
model = llama(*map(int, sys.argv[3:]))
begin = time.process_time()
import ndcompile as nd
program = nd.compile(model, sys.argv[1], cache=sys.argv[2])
print(time.process_time() - begin, "recall" in program.times)
"""


def start(mesh: str, folder: Path, *sizes: int) -> tuple[float, bool]:
    """CPU seconds from a model without weights to its program in a fresh process, and whether it was kept."""
    seconds, kept = python("-c", START, mesh, str(folder), *map(str, sizes)).stdout.split()[-2:]
    return float(seconds), kept == "True"
