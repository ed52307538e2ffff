"""CPU seconds of each stage of a compilation, its peak memory, and the second start, for Llamas of several depths.

    python -m tests.bench.compile_time
    python -m tests.bench.compile_time --layers 2,8 --hidden 512 --mesh "dp_shard=2, tp=2"

The defaults are the widths of Llama 3 of 8 billion parameters, without weights. Each depth is compiled in a process of
its own, whose imports are not counted. The starts are CPU seconds of fresh processes, from a model to its program with
the import of ndcompile: the first compiles and keeps the program, the second finds it.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from rich.console import Console
from rich.table import Table

import ndcompile as nd
from tests.bench import start
from tests.bench.memory import largest


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


def measure(mesh: str, *sizes: int) -> tuple[dict[str, float], int]:
    """The CPU seconds of each stage, and the largest resident memory of this process in bytes."""
    with mock.patch("time.perf_counter", time.process_time):  # other work of the machine does not count
        program = nd.compile(llama(*sizes), mesh)
    return program.times, largest()


def main(
    layers: Annotated[str, typer.Option(help="Depths, separated by commas.")] = "2,8,32",
    mesh: Annotated[str, typer.Option(help="Axes and sizes.")] = "dp_shard=32, tp=8",
    hidden: int = 4096,
    intermediate: int = 14336,
    heads: int = 32,
    kv_heads: int = 8,
    vocabulary: int = 128256,
) -> None:
    """Measure, and print one row a stage and one column a depth."""
    depths = [int(text) for text in layers.split(",")]
    found, starts = {}, {}
    for depth in depths:
        sizes = (depth, hidden, intermediate, heads, kv_heads, vocabulary)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found[depth] = pool.apply(measure, (mesh, *sizes))
        with tempfile.TemporaryDirectory() as folder:
            starts[depth] = [start.start(mesh, Path(folder), *sizes) for _ in range(2)]
        assert [kept for _, kept in starts[depth]] == [False, True], "the second start finds the program"
    table = Table(
        title=f"CPU seconds to compile a Llama for {mesh}", caption=f"hidden {hidden}, vocabulary {vocabulary}"
    )
    table.add_column("stage")
    for depth in depths:
        table.add_column(f"{depth} blocks", justify="right")
    for stage in dict.fromkeys(name for times, _ in found.values() for name in times):
        table.add_row(stage, *(f"{found[depth][0].get(stage, 0.0):.2f}" for depth in depths))
    table.add_section()
    table.add_row("all", *(f"{sum(found[depth][0].values()):.2f}" for depth in depths))
    table.add_row("peak memory, GB", *(f"{found[depth][1] / 1e9:.2f}" for depth in depths))
    table.add_section()
    for number, name in enumerate(("first start, CPU", "second start, CPU")):
        table.add_row(name, *(f"{starts[depth][number][0]:.2f}" for depth in depths))
    Console().print(table)
    for module in ("ndcompile", "ndcompile.api"):
        print(f"import {module}: {start.import_seconds(module):.3f} s over import torch")


if __name__ == "__main__":
    typer.run(main)
