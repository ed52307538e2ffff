"""Models of the sizes that people train, on meta tensors: what a rank holds against arithmetic, and the cost."""

from __future__ import annotations

import io
import multiprocessing
import re
import time
from functools import cache
from typing import Any

import torch
from rich.console import Console

import ndcompile as nd
from ndcompile.program import Program
from ndcompile.tables import parameters_table
from ndcompile.verify.graph_mutants import check_types
from tests.bench.memory import largest

VOCABULARY, FLOAT32 = 128_256, 4


def llama(layers: int, hidden: int, ffn: int, heads: int) -> torch.nn.Module:
    """A Llama with 8 KV heads of 128, without weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings: dict[str, Any] = dict(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=8, use_cache=False, max_position_embeddings=8192,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**settings))
    assert isinstance(model, torch.nn.Module)
    return model


@cache
def of_405b() -> tuple[Program, float]:
    begin = time.process_time()
    program = nd.compile(llama(126, 16_384, 53_248, 128), "dp_replicate=8, dp_shard=64, tp=16")
    return program, time.process_time() - begin


def test_what_a_rank_of_8192_holds_of_405b_is_what_arithmetic_says() -> None:
    """Keys and values have 8 heads on tp=16: they lie on a part of 8 and twice, all else on 16; all on dp_shard=64."""
    hidden, ffn, kv = 16_384, 53_248, 8 * 128
    whole = 16 * 64
    block = 2 * hidden * hidden // whole  # q and o
    block += 2 * kv * hidden // (8 * 64)  # k and v
    block += 3 * hidden * ffn // whole  # gate, up, down
    block += 2 * hidden // 64  # norms
    due = FLOAT32 * (126 * block + 2 * VOCABULARY * hidden // whole + hidden // 64)
    program, _ = of_405b()
    assert sum(p.local_bytes(program.mesh) for p in program.parameters.values()) == due == 1_602_122_752
    layouts = {name: p.local_shape(program.mesh) for name, p in program.parameters.items()}
    for layer in (0, 1, 2, 125):
        assert layouts[f"model.layers.{layer}.self_attn.k_proj.weight"] == (kv // 8, hidden // 64)
        assert layouts[f"model.layers.{layer}.self_attn.q_proj.weight"] == (hidden // 16, hidden // 64)


def test_inspect_shows_the_bytes_of_a_rank() -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(parameters_table(of_405b()[0]))
    assert re.search(r"all +. +1137 +. +1\.5 GiB +. +1,602,122,752", console.export_text())


def of_405b_alone() -> tuple[float, int]:
    """CPU seconds, and this process's largest memory in bytes."""
    _, seconds = of_405b()
    return seconds, largest()


def test_405b_takes_seconds_and_fits_on_a_laptop() -> None:
    """In a process of its own, whose memory no other test has used; the bar of the design is 25 s, and 3 GB."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        seconds, held = pool.apply(of_405b_alone)
    assert seconds < 25
    assert held < 3e9


def of_8b_alone(layers: int) -> tuple[float, int]:
    """CPU seconds of the first compilation of a process, and the lines of the source."""
    model = llama(layers, 4096, 14_336, 32)
    begin = time.process_time()
    program = nd.compile(model, "dp_shard=32, tp=8")
    return time.process_time() - begin, len(str(program).splitlines())


def test_depth_costs_nothing() -> None:
    """80 blocks of an 8B Llama in less than 1.3 times the CPU time of 8, each in a process of its own, and under 300
    lines of source for both. The best of up to three, as other work may share the core.
    """
    seconds: dict[int, list[float]] = {8: [], 80: []}
    while len(seconds[80]) < 3 and not (seconds[80] and min(seconds[80]) < 1.3 * min(seconds[8])):
        for layers, found in seconds.items():
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                taken, lines = pool.apply(of_8b_alone, (layers,))
            found.append(taken)
            assert lines < 300
    assert min(seconds[80]) < 1.3 * min(seconds[8])


def test_the_types_of_32_blocks_are_checked_in_a_fifth_of_a_second() -> None:
    """All checks of a compile, in CPU seconds of this process; the best of three, as other work may share the core."""
    program = nd.compile(llama(32, 4096, 14_336, 32), "dp_shard=32, tp=8")
    seconds = []
    for _ in range(3):
        begin = time.process_time()
        check_types(program.folded, program.mesh)
        seconds.append(time.process_time() - begin)
    assert min(seconds) < 0.2
