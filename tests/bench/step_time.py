"""The speed and memory of a training step: ndcompile beside torch's own ways, in rounds of one process group.

    torchrun --nproc-per-node 2 -m tests.bench.step_time
    torchrun --nproc-per-node 2 -m tests.bench.step_time --model gpt2-xl --cases single,ddp,fsdp2,ndcompile:dp_shard=2
    torchrun --nproc-per-node 2 -m tests.bench.step_time --cases 'single,ndcompile:tp=2/remat="block"' --rounds 1
    python -m tests.bench.step_time --cases single,ndcompile:tp=2 --others 1        one GPU: what a rank computes

Each case trains the same model on the same data with the same AdamW, compiled by region (`--no-compiled`: eager), in
bfloat16 on float32 parameters, in each round `--warmup` steps and then `--steps` timed ones. A case is built once and
stays: all of them must fit the GPU together. Rank 0 prints a JSON line for each case
and round, with the median of its steps, and then a table: medians over rounds, and of the ratio to `single` in the same
round the median and the quartiles. Hosts are noisy: only ratios of one round say something. A case that all ranks
refuse prints its error, and the rest go on; a rank that fails alone ends the run. With `--others` collectives bring
nothing, so losses mean nothing: what is left of a step is what no overlap can take away.
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
from tests.torchrun import alone, join

CASES = "single,ddp,fsdp2,tp,ndcompile:dp_replicate=2,ndcompile:dp_shard=2,ndcompile:tp=2,ndcompile:cp=2"
Row = dict[str, Any]


def main(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(WORKLOADS)}.")] = "llama-1b",
    cases: Annotated[str, typer.Option(help=f"Of {', '.join(WAYS)}, each with a mesh and options.")] = CASES,
    rounds: int = 5,
    steps: int = 10,
    warmup: int = 4,
    compiled: bool = True,
    others: Annotated[int, typer.Option(help="So many other ranks, which are not there; without torchrun.")] = 0,
) -> None:
    """Measure, print JSON lines, and a table of all rounds."""
    device = alone(1 + others) if others else join(180.0)
    workload = WORKLOADS[model]()
    rows, made = list[Row](), [Case(name, workload, device, compiled) for name in cases.split(",")]
    torch._dynamo.config.recompile_limit = 1 + 8 * len(made)  # cases of one model share its code
    for _ in range(rounds):
        for case in made:
            rows.append(dict(model=model, case=case.name, compiled=compiled) | case.round(steps, warmup))
            tell(json.dumps(rows[-1]))
    tell(table(rows, f"{model}, {workload.counted} a second and GPU, {rounds} rounds"))
    dist.destroy_process_group()


class Case:
    """One case: it is built in its first round and kept for the others, so that rounds are short."""

    def __init__(self, name: str, workload: Workload, device: torch.device, compiled: bool) -> None:
        self.name, self._workload, self._device, self._compiled = name, workload, device, compiled
        self._train: Training | None = None
        self._told: Row = {}

    def round(self, steps: int, warmup: int) -> Row:
        """What it measures, on every rank alike; or the error that every rank raised."""
        if "error" not in self._told:
            try:
                return self._round(steps, warmup)
            except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
                self._told, self._train = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}, None
        return self._told

    def _round(self, steps: int, warmup: int) -> Row:
        held, begin = self._allocated(), time.perf_counter()
        is_first, train = self._train is None, self._train or self._made()
        losses, seconds = zip(*(train.step() for _ in range(warmup + steps)), strict=True)
        if is_first:
            self._train = train
            first = time.perf_counter() - begin - sum(seconds[1:])
            self._told = dict(gib=self._peak(held), first_loss=losses[0], first_s=round(first, 1))
        median = statistics.median(seconds[warmup:])
        count = self._workload.samples * self._workload.per_sample * train.batches / dist.get_world_size()
        clean()
        return dict(step_s=round(median, 5), per_s_gpu=round(count / median, 2), last_loss=losses[-1]) | self._told

    def _made(self) -> Training:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        return Training(make(self.name, self._workload, self._device, self._compiled))

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0

    def _peak(self, before: int) -> float | None:
        """GiB at the height of the first round, without what other cases hold."""
        if self._device.type != "cuda":
            return None
        return round((torch.cuda.max_memory_allocated(self._device) - before) / 2**30, 2)


def clean() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


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

    @property
    def batches(self) -> int:
        """How many batches all ranks together take in a step."""
        return self._way.batches[0]

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
