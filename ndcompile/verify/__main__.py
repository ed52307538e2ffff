"""Test a program on real ranks.

    torchrun --nproc-per-node 2 -m ndcompile.verify MODEL --mesh "tp=2" [--precision bf16] [--compile] [--halves]
        [--transport symmetric] [--cuda-graph]

MODEL is module:function, which returns (model, example inputs), the inputs being the global batch; or the config.json
of a transformers model. NCCL where each rank has a GPU, else gloo. A process ends with 0 if all is equal, 1 on any
difference, 2 on a user's error, 3 if a rank failed; torchrun itself ends with 1 for any of them but 0.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from ndcompile.axes import data_ranks
from ndcompile.bind import TRANSPORTS
from ndcompile.errors import CompileError
from ndcompile.mesh import MeshError, MeshSpec
from ndcompile.models import load_with_values
from ndcompile.runtime.agreement import Disagreement
from ndcompile.runtime.module import CallError
from ndcompile.runtime.recorded import RecordedError
from ndcompile.verify.real_ranks import PRECISIONS, verify_on_ranks
from ndcompile.verify.report import Report

EQUAL, DIFFERENT, USER_ERROR, RANK_FAILED = range(4)
USER_ERRORS = (CompileError, MeshError, Disagreement, CallError, RecordedError)


def main() -> None:
    asked = _arguments()
    if "RANK" not in os.environ:
        print("there are no ranks\n  try  torchrun --nproc-per-node 2 -m ndcompile.verify …", file=sys.stderr)
        sys.exit(USER_ERROR)
    store, rank, world_size = next(iter(rendezvous("env://", timeout=timedelta(seconds=asked.timeout))))
    try:
        report = _run(asked, store, rank, world_size)
    except USER_ERRORS as error:
        _end(_tell_once(store, rank, world_size, str(error), USER_ERROR))
    except Exception:  # whatever ends this rank is told, once
        text = f"rank {rank} failed\n{traceback.format_exc()}"
        _end(_tell_once(store, rank, world_size, text, RANK_FAILED))
    else:
        _show(report, asked.json if rank == 0 else None, rank)
        dist.barrier()
        dist.destroy_process_group()
        sys.exit(EQUAL if report else DIFFERENT)


def _run(asked: argparse.Namespace, store: Any, rank: int, world_size: int) -> Report:
    """Join the others, and verify."""
    timeout = timedelta(seconds=asked.timeout)
    if _on_gpus():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl", store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=device
        )
    else:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    spec = MeshSpec.parse(asked.mesh, world_size)
    model, batch = load_with_values(asked.model, samples=2 * data_ranks(spec))
    return verify_on_ranks(
        model, asked.mesh, batch, precision=asked.precision, steps=asked.steps, modes=_modes(asked),
        delays=asked.delays, backend=asked.backend, halves=asked.halves, transport=asked.transport,
        cuda_graph=asked.cuda_graph,
    )  # fmt: skip


def _on_gpus() -> bool:
    return torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])


def _modes(asked: argparse.Namespace) -> list[str]:
    if asked.compile or asked.eager:
        return ["compiled" if asked.compile else "eager"]
    return ["eager", "compiled"] if _on_gpus() else ["eager"]


def _show(report: Report, file: Path | None, rank: int) -> None:
    if rank == 0:
        print(report, flush=True)
    if file is not None:
        with file.open("a") as lines:
            lines.write(json.dumps(report.to_json()) + "\n")


GRACE = 5.0
"""Seconds that rank 0, which holds the store, waits for others to read there why they end."""


def _tell_once(store: Any, rank: int, world_size: int, text: str, status: int) -> int:
    """The first rank that fails says why and with which status all end; others fail because it did."""
    if store.add("ndcompile: failures", 1) == 1:
        store.set("ndcompile: status", str(status))
        print(text, file=sys.stderr, flush=True)
    status = int(store.get("ndcompile: status"))
    told, end = store.add("ndcompile: told", 1), time.monotonic() + GRACE
    while rank == 0 and told < world_size and time.monotonic() < end:
        time.sleep(0.05)
        told = store.add("ndcompile: told", 0)
    return status


def _end(status: int) -> NoReturn:
    """At once: other ranks may be gone, so no collective may be waited for."""
    sys.stdout.flush()
    os._exit(status)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "ndcompile.verify", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--mesh", required=True)
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16")
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps, at least 2")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--compile", action="store_true", help="torch.compile only")
    modes.add_argument("--eager", action="store_true", help="eager only; without either: both on GPUs, eager on CPUs")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--delays", type=int, default=2, help="runs with random delays around collectives")
    parser.add_argument("--halves", action="store_true", help="blocks compute two halves of a batch in turn")
    parser.add_argument("--transport", choices=TRANSPORTS, default="nccl", help="how tensors travel between ranks")
    parser.add_argument("--cuda-graph", action="store_true", help="steps are replayed from a CUDA graph, on GPUs")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds that a rank waits for another")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also append the report to FILE, as one line")
    asked = parser.parse_args()
    if asked.steps < 2:
        parser.error("--steps must be at least 2: some races show in the second step only")
    return asked


if __name__ == "__main__":
    main()
