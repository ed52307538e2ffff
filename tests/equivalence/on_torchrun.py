"""The models of the matrix on two ranks that torchrun starts: NCCL where each has a GPU, else gloo.

    torchrun --nproc-per-node 2 -m tests.equivalence.on_torchrun [--only MODEL …]

Rank 0 first compiles all cases and trains them on one device, on the CPU. Prints one JSON line a rank: how many cases,
the largest distance and where, the failures, and the cases that were refused at compile time. In float64 mode.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import ndcompile as nd
from ndcompile.mesh import MeshSpec
from tests.equivalence import compare
from tests.equivalence.compare import Case, Outcome, measure, prepare
from tests.equivalence.registry import MODELS
from tests.torchrun import join

MESHES = "dp_shard=2", "tp=2", "dp_replicate=2"
REFUSED = "refused"
"""A file in a case's folder that says why it was not compiled."""


def prepare_alone(case: Case, folder: Path) -> None:
    torch.set_num_threads(1)
    folder.mkdir(parents=True)
    try:
        prepare(case, folder)
    except nd.CompileError as error:
        (folder / REFUSED).write_text(f"{case}: {error}")


def prepare_all(models: list[str], root: Path) -> None:
    context = multiprocessing.get_context("spawn")
    cases = [Case(model, mesh) for model in models for mesh in MESHES]
    folders = [root / str(number) for number in range(len(cases))]
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 2), mp_context=context) as pool:
        list(pool.map(prepare_alone, cases, folders))


def measure_on(device: torch.device, root: Path) -> list[Outcome]:
    """Every case, with this rank's rows on its device; distances are taken on the CPU."""
    rows, far = compare.own_rows, compare.distance

    def moved(batch: dict, spec: MeshSpec, rank: int) -> dict:
        return {name: value.to(device) for name, value in rows(batch, spec, rank).items()}

    def apart(a: Tensor, b: Tensor, least: float) -> float:
        return far(a.cpu(), b.cpu(), least)

    compare.own_rows, compare.distance = moved, apart
    return [measure(folder) for folder in sorted(root.iterdir()) if not (folder / REFUSED).exists()]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    root = Path(tempfile.gettempdir(), f"ndcompile_cases_{os.environ['MASTER_PORT']}")
    if int(os.environ["RANK"]) == 0:
        prepare_all(parser.parse_args().only, root)
    device = join(600)
    dist.barrier()
    outcomes = measure_on(device, root)
    worst, case = max((max(o.distances.values()), str(o.case)) for o in outcomes)
    failures = [text for outcome in outcomes for text in outcome.failures]
    row = dict(rank=dist.get_rank(), backend=dist.get_backend(), cases=len(outcomes), worst=worst, at=case)
    refused = [path.read_text() for path in root.glob(f"*/{REFUSED}")]
    print(json.dumps(row | dict(failures=failures, refused=refused)), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
