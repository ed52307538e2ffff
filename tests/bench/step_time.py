"""The speed and memory of a training step: ndcompile beside torch's own ways, in rounds of one process group.

    torchrun --nproc-per-node 2 -m tests.bench.step_time
    torchrun --nproc-per-node 2 -m tests.bench.step_time --model gpt2-xl --cases single,ddp,fsdp2,ndcompile:dp_shard=2
    torchrun --nproc-per-node 2 -m tests.bench.step_time --cases 'single,ndcompile:tp=2/remat="block"' --rounds 1

Each case trains the same model on the same data with the same AdamW, compiled by region (`--no-compiled`: eager), in
bfloat16 on float32 parameters, `--warmup` steps and then `--steps` timed ones. Rank 0 prints a JSON line for each case
and round, with the median of its steps, and then a table: medians over rounds, and of the ratio to `single` in the same
round the median and the quartiles. Hosts are noisy: only ratios of one round say something. A case that all ranks
refuse prints its error, and the rest go on; a rank that fails alone ends the run.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Sequence
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

from tests.bench.ways import WAYS, Way
from tests.bench.workloads import WORKLOADS, Workload
from tests.torchrun import join

CASES = "single,ddp,fsdp2,tp,cp,ndcompile:dp_replicate=2,ndcompile:dp_shard=2,ndcompile:tp=2,ndcompile:cp=2"
Row = dict[str, Any]


def main(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(WORKLOADS)}.")] = "llama-1b",
    cases: Annotated[str, typer.Option(help=f"Of {', '.join(WAYS)}, each with a mesh and options.")] = CASES,
    rounds: int = 5,
    steps: int = 10,
    warmup: int = 4,
    compiled: bool = True,
) -> None:
    """Measure, print JSON lines, and a table of all rounds."""
    device = join(180.0)
    workload = WORKLOADS[model]()
    rows = []
    for _ in range(rounds):
        for case in cases.split(","):
            row = dict(model=model, case=case, compiled=compiled) | timed(
                case, workload, device, steps, warmup, compiled
            )
            tell(json.dumps(row))
            rows.append(row)
    tell(table(rows, f"{model}, {workload.counted} a second and GPU, {rounds} rounds"))
    dist.destroy_process_group()


def timed(case: str, workload: Workload, device: torch.device, steps: int, warmup: int, compiled: bool) -> Row:
    """What one case measures, on every rank alike; or the error that every rank raised."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    try:
        begin = time.perf_counter()
        way = make(case, workload, device, compiled)
        train = Training(way)
        losses, seconds = zip(*(train.step() for _ in range(warmup + steps)), strict=True)
        first = time.perf_counter() - begin - sum(seconds[1:])
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    finally:
        torch._dynamo.reset()
    median = statistics.median(seconds[warmup:])
    count = workload.samples * workload.per_sample * way.batches[0] / dist.get_world_size()
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if cuda else None
    del way, train
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
    return dict(
        step_s=round(median, 5), per_s_gpu=round(count / median, 2), gib=None if peak is None else round(peak, 2),
        first_loss=losses[0], last_loss=losses[-1], first_s=round(first, 1),
    )  # fmt: skip


def make(case: str, workload: Workload, device: torch.device, compiled: bool) -> Way:
    kind, _, spec = case.partition(":")
    if kind not in WAYS:
        raise ValueError(f"no way to train is called {kind}; there are {', '.join(WAYS)}")
    return WAYS[kind](workload, spec, device, compiled)


class Training:
    """Steps of one way, each on a batch of its own."""

    def __init__(self, way: Way) -> None:
        self._way = way
        self._optimizer = torch.optim.AdamW(way.model.parameters(), lr=1e-4, fused=True)
        self._generator = torch.Generator(way.device).manual_seed(way.batches[1])

    def run(self) -> torch.Tensor:
        """One step, not waited for."""
        loss = self._way.step(self._way.workload.draw(self._way.workload.samples, self._generator))
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss

    def step(self) -> tuple[float, float]:
        """The loss, averaged over all ranks, and the seconds."""
        wait()
        begin = time.perf_counter()
        loss = self.run()
        wait()
        seconds = time.perf_counter() - begin
        value = getattr(loss, "full_tensor", lambda: loss)().float().clone()
        dist.all_reduce(value)
        return value.item() / dist.get_world_size(), seconds


def wait() -> None:
    """Until all ranks have come here, and their GPUs have done their work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()


def table(rows: Sequence[Row], title: str) -> Table:
    """One row a case: medians over rounds, and the ratio to `single` of the same round."""
    made = Table(title=title)
    for name in ("case", "per GPU", "of single", "quartiles", "GiB", "first step, s"):
        made.add_column(name, justify="left" if name == "case" else "right")
    alone = [row.get("per_s_gpu") for row in rows if row["case"] == "single"]
    for case in dict.fromkeys(row["case"] for row in rows):
        mine = [row for row in rows if row["case"] == case]
        if any("error" in row for row in mine):
            made.add_row(case, next(row["error"] for row in mine if "error" in row))
            continue
        speeds = [row["per_s_gpu"] for row in mine]
        ratios = [a / b for a, b in zip(speeds, alone, strict=False) if b]
        made.add_row(
            case,
            f"{statistics.median(speeds):,.0f}",
            f"{statistics.median(ratios):.3f}" if ratios else "",
            " – ".join(f"{q:.3f}" for q in statistics.quantiles(ratios, n=4)[::2]) if len(ratios) > 3 else "",
            f"{mine[-1]['gib']:.1f}" if mine[-1]["gib"] else "",
            f"{mine[0]['first_s']:.0f}",
        )
    return made


def tell(what: object) -> None:
    if dist.get_rank() == 0:
        Console(width=160, soft_wrap=True).print(what, markup=False, highlight=False)


if __name__ == "__main__":
    typer.run(main)
