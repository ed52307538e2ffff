"""`transport="symmetric"` against `"nccl"` on two GPUs: equal losses and gradients, and the time of a step of each.

    python -m torch.distributed.run --nproc-per-node 2 -m tests.gpu.transport [--only equal|time] [--meshes M …]

Equal: the same steps of AdamW by both, of which one accumulates, in float64 (the furthest loss, gradient and parameter;
exit status 1 above 1e-10) and with bfloat16 weights (whether all bits are equal, which they are where sums are of two
ranks and kernels are deterministic); then by copies while the streams of each GPU are stalled at random times; then by
copies compiled, where exchanges are joined with products, in float64.

Time: a Llama in bfloat16 on float32 parameters, compiled by blocks, by both in turn; milliseconds a step (a round's
median), and GiB. On CPU ranks, small sizes without compilation: that tries the script, and its times say nothing.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import ndcompile as nd
from ndcompile.mesh import MeshSpec
from ndcompile.runtime import private
from ndcompile.verify.delays import jittered
from tests.equivalence.compare import distance, own_rows
from tests.equivalence.registry import MODELS
from tests.gpu.memory import TINY, Sizes, llama
from tests.torchrun import finish, join

LARGE = Sizes(2048, 16, 32_000, 4, 4096)
MODEL_NAMES = ("llama", "gpt with dropout", "shared block")
MESHES = ("dp_shard=2", "dp_replicate=2", "cp=2", "tp=2")
TIMED = ("dp_shard=2", "dp_replicate=2")
BOTH = ("nccl", "symmetric")
STEPS, ACCUMULATED, BAR = 5, 3, 1e-10
Found = dict[str, Tensor]


class Way(NamedTuple):
    """How a model is trained."""

    transport: str
    low: bool = False
    stalled: bool = False
    compiled: bool = False


def trained(name: str, mesh: str, way: Way, device: torch.device) -> Found:
    """This rank's part of every loss, gradient and parameter, by name."""
    torch.manual_seed(0)
    model, batch = MODELS[name](8)
    how: dict[str, Any] = dict(float64=True)
    if way.low:
        how = dict(precision=nd.Precision(torch.bfloat16, torch.float32))
    model = model.float() if way.low else model.double()
    parallel = nd.parallelize(model, mesh, batch, transport=way.transport, **how)
    if way.compiled:
        parallel.compile()
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3, eps=1e-3)
    found: Found = {}
    with jittered(dist.get_rank(), device) if way.stalled and device.type == "cuda" else nullcontext():
        for step in range(STEPS):
            torch.manual_seed(step)
            for number in range(2 if step == ACCUMULATED else 1):
                mine = {n: x.to(device) for n, x in own_rows(batch, MeshSpec.parse(mesh), dist.get_rank()).items()}
                with parallel.accumulate() if step == ACCUMULATED and number == 0 else nullcontext():
                    loss = parallel(**mine)["loss"]
                    loss.backward()
            found[f"loss {step}"] = loss.detach().clone()
            grads = {n: p.grad for n, p in parallel.named_parameters() if p.grad is not None}
            found |= {f"gradient {step} {n}": private.local(g).clone() for n, g in grads.items()}
            optimizer.step()
            optimizer.zero_grad()
    return found | {f"parameter {n}": private.local(p).clone() for n, p in parallel.named_parameters()}


def equal(names: Sequence[str], meshes: Sequence[str], device: torch.device) -> Iterator[dict[str, Any]]:
    for name in names:
        for mesh in meshes:
            for low in (False, True):
                right = trained(name, mesh, Way("nccl", low), device)
                ways = [Way("symmetric", low), Way("symmetric", low, stalled=True)]
                for way in ways if low else [*ways, Way("symmetric", compiled=True)]:
                    found = trained(name, mesh, way, device)
                    far = {what: distance(found[what], right[what], 1e-12) for what in right}
                    worst = max(far, key=lambda what: far[what])
                    row: dict[str, Any] = dict(model=name, mesh=mesh, dtype="bfloat16" if low else "float64")
                    bits = found.keys() == right.keys() and all(torch.equal(found[w], right[w]) for w in right)
                    row |= dict(stalled=way.stalled, compiled=way.compiled, furthest=far[worst], at=worst)
                    yield row | dict(same_bits=bits, holds=low or far[worst] <= BAR)


class Timed:
    """A Llama that trains, and how long its steps take."""

    def __init__(self, mesh: str, transport: str, sizes: Sizes, device: torch.device, compiled: bool) -> None:
        low = nd.Precision(compute=torch.bfloat16)
        self.parallel = nd.parallelize(llama(sizes), mesh, precision=low, transport=transport)
        generator = torch.Generator(device).manual_seed(0)
        with torch.no_grad():
            for p in self.parallel.parameters():
                own = private.local(p)
                own.normal_(0, 0.02, generator=generator) if own.dim() > 1 else own.fill_(1.0)
        if compiled:
            self.parallel.compile()
        self.optimizer = torch.optim.AdamW(self.parallel.parameters(), lr=1e-4, fused=True)
        self.ids = torch.arange(sizes.samples * sizes.tokens, device=device).view(sizes.samples, -1)
        self.ids = (self.ids * 7919 + dist.get_rank()) % sizes.vocabulary
        self.device = device

    def step(self) -> None:
        self.parallel(input_ids=self.ids, labels=self.ids).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def round(self, steps: int) -> float:
        """Milliseconds a step, the median."""
        found = []
        for _ in range(steps):
            self._wait()
            begin = time.perf_counter()
            self.step()
            self._wait()
            found.append((time.perf_counter() - begin) * 1e3)
        return statistics.median(found)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def timed(
    meshes: Sequence[str], sizes: Sizes, steps: int, rounds: int, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Each way in turn, with memory of its own: the two models of one mesh are not there at once."""
    on_gpus = device.type == "cuda"
    for mesh in meshes:
        for number in range(rounds):
            for transport in BOTH:
                free = torch.cuda.mem_get_info()[0] if on_gpus else 0
                case = Timed(mesh, transport, sizes, device, compiled=on_gpus)
                case.round(4)
                if on_gpus:
                    torch.cuda.reset_peak_memory_stats()
                milliseconds = case.round(steps)
                row = dict(mesh=mesh, transport=transport, round=number, ms=round(milliseconds, 2))
                row["tokens_per_s_per_gpu"] = round(sizes.samples * sizes.tokens / milliseconds * 1e3)
                if on_gpus:
                    row["allocated_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
                    row["of_the_gpu_gib"] = round((free - torch.cuda.mem_get_info()[0]) / 2**30, 2)
                yield row
                del case
                gc.collect()
                if on_gpus:
                    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["equal", "time"])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODEL_NAMES)
    parser.add_argument("--meshes", nargs="+")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2)
    asked = parser.parse_args()
    device = join(120)
    rows: list[Iterator[dict[str, Any]]] = []
    if asked.only != "time":
        rows.append(equal(asked.models, asked.meshes or MESHES, device))
    if asked.only != "equal":
        sizes = LARGE if device.type == "cuda" else TINY
        rows.append(timed(asked.meshes or TIMED, sizes, asked.steps, asked.rounds, device))
    finish(itertools.chain(*rows))


if __name__ == "__main__":
    main()
