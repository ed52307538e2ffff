"""How far rounding goes on two ranks: Llama and GPT-2 × three meshes × bf16 and float32 × eager and compiled.

    python -m torch.distributed.run --nproc-per-node 2 -m tests.gpu.ratios --out ratios.jsonl --table ratios.md

NCCL where each rank has a GPU, else gloo and small sizes. For each: whole numbers through every conversion bit by bit,
two clipped steps of AdamW by the error model, and the same steps with delays around the collectives. A JSON line for
each; what is not reached within `--seconds` is named. Exit status 1 on any difference.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ndcompile.runtime.agreement import everyones
from ndcompile.verify.real_ranks import Job, OnRanks, References
from tests.gpu.train20 import LARGE, MODELS, TINY
from tests.torchrun import join

MESHES = ("dp_replicate=2", "dp_shard=2", "tp=2")
PRECISIONS = ("bf16", "float32")
COLUMNS = ("model", "mesh", "precision", "how", "ratio", "at", "rejects from", "to", "integers", "delays", "seconds")


def rows(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All eager ones first: compiling takes long."""
    held: list[tuple[dict[str, str], OnRanks, References]] = []
    for name in asked.models:
        for row, ranks, right in _programs(name):
            held.append((row, ranks, right))
            yield row | _measured(ranks, right) | _integers(ranks) | _delays(ranks, right, "eager")
    for row, ranks, right in held if "compiled" in asked.how else ():
        begin = time.perf_counter()
        ranks.parallel.compile(backend=asked.backend)
        found = row | dict(how="compiled") | _measured(ranks, right) | _delays(ranks, right, "compiled")
        yield found | dict(seconds=round(time.perf_counter() - begin, 1))


def _programs(name: str) -> Iterator[tuple[dict[str, str], OnRanks, References]]:
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    torch.manual_seed(0)
    model, batch = MODELS[name](LARGE if device.type == "cuda" else TINY)
    exact = None
    for precision in PRECISIONS:
        job, right = Job.of(model, batch, precision, 2, device), None
        for mesh in MESHES:
            program = job.compiled(mesh)
            right = right or References.of(job, program, exact)
            exact = right.exact
            yield dict(model=name, mesh=mesh, precision=precision, how="eager"), OnRanks(job, program), right


def _measured(ranks: OnRanks, right: References) -> dict[str, Any]:
    begin = time.perf_counter()
    found, model = ranks.measure(ranks.train(right.exact), right), ranks.error_model
    worst, limits = model.worst(found), sorted(model.relative_limit(m) for m in found if m.size)
    return {
        "ratio": round(model.ratio(worst), 3), "at": worst.what, "holds": not model.rejected(found),
        "rejects from": float(f"{limits[0]:.2g}"), "to": float(f"{limits[-1]:.2g}"), "tensors": len(found),
        "seconds": round(time.perf_counter() - begin, 1),
    }  # fmt: skip


def _integers(ranks: OnRanks) -> dict[str, Any]:
    claim = ranks.payloads()
    return {"integers": bool(claim.held), "checked": claim.evidence[0]}


def _delays(ranks: OnRanks, right: References, how: str) -> dict[str, Any]:
    claim = ranks.delays(right, 2, how)
    return {"delays": claim.held, "delayed": claim.evidence[0]}


def table(found: list[dict[str, Any]]) -> str:
    """The rows in markdown."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    return "\n".join([*lines, *(f"| {' | '.join(str(row.get(c, '')) for c in COLUMNS)} |" for row in found)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["Llama", "GPT-2"])
    parser.add_argument("--how", nargs="+", choices=["eager", "compiled"], default=["eager", "compiled"])
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--seconds", type=float, default=230.0, help="start nothing after this")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path)
    asked, begin = parser.parse_args(), time.perf_counter()
    join()
    found: list[dict[str, Any]] = []
    for row in rows(asked):
        found.append(row)
        if dist.get_rank() == 0:
            print(json.dumps(row), flush=True)
            if asked.out:
                with asked.out.open("a") as lines:
                    lines.write(json.dumps(row) + "\n")
            if asked.table:
                asked.table.write_text(table(found))
        if everyones(time.perf_counter() - begin > asked.seconds)[0]:
            break
    wanted = len(asked.models) * len(MESHES) * len(PRECISIONS) * len(asked.how)
    if dist.get_rank() == 0:
        print(f"{len(found)} of {wanted} in {time.perf_counter() - begin:.0f} s", flush=True)
        print(table(found))
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(
        0 if all(row["holds"] and row["delays"] is not False and row.get("integers", True) for row in found) else 1
    )


if __name__ == "__main__":
    main()
