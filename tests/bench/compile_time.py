"""Seconds of each stage of a compilation, and its peak memory, for Llamas of several depths on the meta device.

    python -m tests.bench.compile_time
    python -m tests.bench.compile_time --layers 2,8 --hidden 512 --mesh "dp_shard=2, tp=2"

The defaults are the widths of Llama 3 of 8 billion parameters. Each depth is compiled in a process of its own, `--runs`
times, of which the one with the least CPU time counts: with several, imports and other work on the machine count less.
"""

from __future__ import annotations

import gc
import multiprocessing
import resource
import sys
import time
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

import ndcompile as nd


def llama(layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, vocabulary: int) -> torch.nn.Module:
    """A Llama without weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings: dict[str, Any] = dict(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**settings))
    assert isinstance(model, torch.nn.Module)
    return model


@dataclass(frozen=True)
class Cost:
    """Of one compilation: seconds of each stage, CPU seconds of all, and the process's largest memory in bytes."""

    stages: dict[str, float]
    cpu: float
    memory: int


def measure(runs: int, mesh: str, *sizes: int) -> Cost:
    """The compilation that took the least CPU time."""
    model, found = llama(*sizes), list[Cost]()
    for _ in range(runs):
        gc.collect()
        begin = time.process_time()
        program = nd.compile(model, mesh)
        cpu = time.process_time() - begin
        largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        found.append(Cost(program.times, cpu, largest))
    return min(found, key=lambda cost: cost.cpu)


def main(
    layers: Annotated[str, typer.Option(help="Depths, separated by commas.")] = "2,8,32",
    mesh: Annotated[str, typer.Option(help="Axes and sizes.")] = "dp_shard=32, tp=8",
    hidden: int = 4096,
    intermediate: int = 14336,
    heads: int = 32,
    kv_heads: int = 8,
    vocabulary: int = 128256,
    runs: int = 3,
) -> None:
    """Measure, and print one row a stage and one column a depth."""
    depths = [int(text) for text in layers.split(",")]
    found = dict[int, Cost]()
    for depth in depths:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found[depth] = pool.apply(measure, (runs, mesh, depth, hidden, intermediate, heads, kv_heads, vocabulary))
    table = Table(title=f"seconds to compile a Llama for {mesh}", caption=f"hidden {hidden}, vocabulary {vocabulary}")
    table.add_column("stage")
    for depth in depths:
        table.add_column(f"{depth} blocks", justify="right")
    for stage in dict.fromkeys(name for cost in found.values() for name in cost.stages):
        table.add_row(stage, *(f"{found[depth].stages.get(stage, 0.0):.2f}" for depth in depths))
    table.add_section()
    table.add_row("all", *(f"{sum(found[depth].stages.values()):.2f}" for depth in depths))
    table.add_row("CPU", *(f"{found[depth].cpu:.2f}" for depth in depths))
    table.add_row("peak memory, GB", *(f"{found[depth].memory / 1e9:.2f}" for depth in depths))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
