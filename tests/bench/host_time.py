"""Host time: what one block's forward and backward cost the process that issues them, by mesh.

    python -m tests.bench.host_time
    python -m tests.bench.host_time --meshes "cp=2" --backend aot_eager --profile 25
    python -m tests.bench.host_time --meshes "tp=2" --transport symmetric

A Llama whose tensors are so small that kernels cost little, float32 on float64 parameters, compiled by region, on rank
0 of a world whose other ranks are not there (torch's fake process group: a collective copies). Beside the meshes: the
model itself, with `compile` of each block. Each has a process of its own. Times are CPU seconds of the process, the
least of `--steps`, those of a block with its share of what stands outside of blocks. On a machine with other work they
are some tenths too long; `calls` are the calls of Python functions in a forward and backward a block, and exact.

`graphs` is how many regions are compiled, 4 for this model: its block, what is before, the logits, the loss;
`breaks` is how often a region had to be cut.
"""

from __future__ import annotations

import cProfile
import multiprocessing
import pstats
import time
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

import ndcompile as nd
from tests.torchrun import alone

MESHES = "model,one device,dp_replicate=2,dp_shard=2,tp=2,cp=2"
WARM_UP = 4
"""Steps that compile, and learn the order of weights."""


def llama(blocks: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = dict(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=blocks, num_attention_heads=8,
        num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    assert isinstance(model, nn.Module)
    return model


def built(mesh: str, blocks: int, backend: str, transport: str, ids: torch.Tensor) -> nn.Module:
    """The model, or the parallel one; compiled by region."""
    model = llama(blocks).double()
    if mesh == "model":
        model = model.float()
        for block in model.model.layers:
            block.compile(backend=backend)
        return model
    spec = "" if mesh == "one device" else mesh
    alone(nd.MeshSpec.parse(spec).world_size)
    precision = nd.Precision(compute=torch.float32, reduce=torch.float32)
    example = dict(input_ids=ids, labels=ids.clone())
    parallel = nd.parallelize(model, spec, example, precision=precision, transport=transport)
    parallel.compile(backend=backend)
    return parallel


def measure(
    mesh: str, blocks: int, tokens: int, steps: int, backend: str, transport: str, profile: int
) -> dict[str, float]:
    """Microseconds: of forward and backward for each block (with its share of what is outside), of the optimizer."""
    torch.set_num_threads(1)
    ids = torch.arange(tokens)[None] % 128
    model = built(mesh, blocks, backend, transport, ids)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    seconds: dict[str, list[float]] = {"forward": [], "backward": [], "optimizer": []}

    def timed(name: str, part: Callable[[], Any]) -> Any:
        begin = time.process_time()
        found = part()
        seconds[name].append(time.process_time() - begin)
        return found

    def step() -> None:
        loss = timed("forward", lambda: model(input_ids=ids, labels=ids).loss)
        timed("backward", loss.backward)
        timed("optimizer", optimizer.step)
        optimizer.zero_grad()

    for _ in range(WARM_UP):
        step()
    seconds = {name: [] for name in seconds}
    for _ in range(steps):
        step()
    least = {name: min(each) * 1e6 for name, each in seconds.items()}
    counters = torch._dynamo.utils.counters
    calls = cProfile.Profile()
    loss = calls.runcall(model, input_ids=ids, labels=ids).loss
    calls.runcall(loss.backward)
    stats = pstats.Stats(calls)
    if profile:
        stats.sort_stats("ncalls").print_stats(profile)
    return {
        "forward": least["forward"] / blocks,
        "backward": least["backward"] / blocks,
        "optimizer": least["optimizer"],
        "calls": stats.total_calls / blocks,  # type: ignore[attr-defined]
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
    }


def apart(mesh: str, **options: Any) -> dict[str, float]:
    """`measure` in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, (mesh,), options)


def main(
    meshes: Annotated[str, typer.Option(help="Separated by commas; `model` is the model itself.")] = MESHES,
    blocks: int = 16,
    tokens: int = 16,
    steps: int = 60,
    backend: Annotated[str, typer.Option(help="Of torch.compile.")] = "inductor",
    transport: Annotated[str, typer.Option(help="Of nd.parallelize.")] = "nccl",
    profile: Annotated[int, typer.Option(help="Rows of a profile of one more step.")] = 0,
) -> None:
    """Measure, and print one row a mesh."""
    table = Table(title=f"Host time of a Llama of {blocks} blocks, µs, torch {torch.__version__}")
    for column in ("", "forward a block", "backward a block", "optimizer", "calls a block", "graphs", "breaks"):
        table.add_column(column, justify="right" if column else "left")
    for mesh in meshes.split(","):
        given: dict[str, Any] = dict(blocks=blocks, tokens=tokens, steps=steps, profile=profile)
        found = apart(mesh, backend=backend, transport=transport, **given)
        table.add_row(mesh, *(f"{value:.0f}" for value in found.values()))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
