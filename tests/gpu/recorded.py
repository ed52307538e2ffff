"""Recorded steps (`cuda_graph=True`) against the same steps as they are, on two GPUs, in float64.

    python -m torch.distributed.run --nproc-per-node 2 -m tests.gpu.recorded [--models M …] [--meshes M …]

Eight steps of AdamW, of which the third accumulates two batches; then what a recorded model refuses. A JSON line for
each model and mesh: the furthest parameter, and how many are off. Exit status 1 above 1e-10, or where something was not
refused.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ndcompile as nd
from ndcompile.mesh import MeshSpec
from ndcompile.runtime import StaleWeights
from ndcompile.runtime.recorded import RecordedError
from tests.claims import whole
from tests.equivalence.compare import distance, own_rows
from tests.equivalence.registry import MODELS
from tests.torchrun import finish, join

NAMES = ("llama", "gpt", "gpt with dropout", "shared block")
MESHES = ("dp_replicate=2", "dp_shard=2", "tp=2", "cp=2")
TRANSPORTS = ("nccl", "symmetric")
STEPS, ACCUMULATED, BAR = 8, 6, 1e-10


def trained(
    name: str, mesh: str, transport: str, compiled: bool, recorded: bool
) -> tuple[nd.ParallelModule, dict[str, Tensor], float]:
    torch.manual_seed(0)
    model, batch = MODELS[name](8)
    parallel = nd.parallelize(model.double(), mesh, batch, float64=True, transport=transport)
    if recorded:
        parallel.record()
    if compiled:
        parallel.compile()
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3, eps=1e-3)
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        torch.manual_seed(step)
        for _ in range(2 if step == ACCUMULATED else 1):
            loss = parallel(**mine(shuffled(batch, generator), mesh))["loss"]
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    found = {n: whole(p.detach()).cpu() for n, p in parallel.named_parameters()}
    return parallel, found, float(loss)


def shuffled(batch: dict[str, Any], generator: torch.Generator) -> dict[str, Any]:
    order = torch.randperm(8, generator=generator)
    return {name: x[order] for name, x in batch.items()}


def mine(batch: dict[str, Any], mesh: str) -> dict[str, Any]:
    rows = own_rows(batch, MeshSpec.parse(mesh), dist.get_rank())
    return {name: x.cuda() for name, x in rows.items()}


def rows(models: list[str], meshes: list[str]) -> Iterator[dict[str, Any]]:
    for compiled in (False, True):
        for name in models[:1] if compiled else models:
            for mesh in meshes:
                for transport in TRANSPORTS:
                    row = dict(model=name, mesh=mesh, transport=transport, compiled=compiled)
                    yield row | _row(name, mesh, transport, compiled)


def _row(model: str, mesh: str, transport: str, compiled: bool) -> dict[str, Any]:
    _, right, loss = trained(model, mesh, transport, compiled, False)
    parallel, found, recorded = trained(model, mesh, transport, compiled, True)
    far = {n: distance(found[n], right[n], 1e-12) for n in right}
    name, most = max(far.items(), key=lambda each: each[1])
    off = sum(each > BAR for each in far.values())
    row: dict[str, Any] = dict(furthest=most, at=name, off=f"{off} of {len(far)}", loss=loss, recorded=recorded)
    row["holds"] = most <= BAR
    return row | (dict(refuses=refusals(parallel, model, mesh)) if not compiled and model == "gpt" else {})


def refusals(parallel: nd.ParallelModule, name: str, mesh: str) -> dict[str, bool]:
    torch.manual_seed(0)
    _, batch = MODELS[name](8)
    _, longer = MODELS[name](16)

    def refused(call: Any, error: type[Exception]) -> bool:
        try:
            call()
        except error:
            return True
        return False

    first = parallel(**mine(batch, mesh))["loss"]
    second = parallel(**mine(batch, mesh))["loss"]
    found = dict(
        an_earlier_backward=refused(first.backward, RecordedError),
        another_shape=refused(lambda: parallel(**mine(longer, mesh)), RecordedError),
        accumulate=refused(lambda: parallel.accumulate().__enter__(), ValueError),
    )
    with torch.no_grad():
        next(iter(parallel.parameters())).mul_(1.0)
    return found | dict(stale_weights=refused(second.backward, StaleWeights))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", choices=MODELS, default=NAMES)
    parser.add_argument("--meshes", nargs="+", default=MESHES)
    asked = parser.parse_args()
    join(120)
    finish(rows(asked.models, asked.meshes))


if __name__ == "__main__":
    main()
