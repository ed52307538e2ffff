"""Where the time of a step goes on a GPU: kernels by kind, communication that nothing covers (by name), idle time.

    torchrun --nproc-per-node 2 -m tests.bench.timeline --cases single,ndcompile:dp_shard=2,ndcompile:tp=2

Cases are written as for `tests.bench.step_time`. Rank 0 prints for each a JSON line (milliseconds a step; `issued_ms`
is the host's part: near `wall_ms`, the host is the limit), the longest exposed stretches with the kernel that waited,
and one step as two lines of text.
"""

from __future__ import annotations

import gc
import json
import time
from typing import Annotated

import torch
import torch.distributed as dist
import typer

from tests.bench.spans import MARKS, Kernel, exposed, strip, summary
from tests.bench.step_time import Training, make, tell, wait
from tests.bench.workloads import WORKLOADS
from tests.torchrun import alone, join


def main(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(WORKLOADS)}.")] = "llama-1b",
    cases: str = "single,ndcompile:dp_replicate=2,ndcompile:dp_shard=2,ndcompile:tp=2,ndcompile:cp=2",
    warmup: Annotated[int, typer.Option(help="Steps before; clocks settle at the power limit.")] = 12,
    longest: int = 8,
    compiled: bool = True,
    others: Annotated[int, typer.Option(help="So many other ranks, which are not there; without torchrun.")] = 0,
) -> None:
    """Profile one step of each case."""
    device = alone(1 + others) if others else join(180.0)
    if device.type != "cuda":
        raise SystemExit("a timeline needs GPUs: the profiler reads their kernels")
    tell("marks: " + ", ".join(f"{mark} {kind}" for kind, mark in MARKS.items()))
    for case in cases.split(","):
        train = Training(make(case, WORKLOADS[model](), device, compiled))
        for _ in range(warmup):
            train.step()
        wait()
        begin = time.perf_counter()
        train.run()
        issued = time.perf_counter() - begin
        kernels = recorded(train)
        step = summary(kernels)
        row = dict(model=model, case=case, issued_ms=ms(issued * 1e9)) | {
            f"{name}_ms": ms(getattr(step, name)) for name in ("wall", "computing", "moving", "exposed", "idle")
        }
        tell(json.dumps(row | {"kinds_ms": {kind: ms(found) for kind, found in sorted(step.kinds.items())}}))
        for each in exposed(kernels)[:longest]:
            tell(f"  exposed {ms(each.nanoseconds):6.2f} ms  {each.name[:50]}  before  {each.before[:60]}")
        tell(strip(kernels))
        del train
        gc.collect()
        torch._dynamo.reset()
        torch.cuda.empty_cache()
    dist.destroy_process_group()


def recorded(train: Training) -> list[Kernel]:
    """The kernels of one step."""
    wait()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        train.run()
        torch.cuda.synchronize()
    return [
        Kernel(event.name, int(event.time_range.start * 1000), int(event.time_range.end * 1000))
        for event in profile.events()
        if event.device_type.name == "CUDA"
        and not event.is_user_annotation
        and event.time_range.end > event.time_range.start
    ]


def ms(nanoseconds: float) -> float:
    return round(nanoseconds / 1e6, 2)


if __name__ == "__main__":
    typer.run(main)
