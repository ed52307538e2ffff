"""Three steps on one sequence of 262,144 tokens on `cp=2`, of a model that one GPU cannot hold without recomputation.

    python -m torch.distributed.run --nproc-per-node 2 -m tests.gpu.long

A Llama of transformers: width D = 2048, 16 heads of 128 over 4 of keys and values, feed-forward F = 5632, V = 8192
words, 6 blocks; float32 masters, bfloat16 compute. What its blocks keep for the backward, in bytes a token and block,
counted by hand of the eager model:

    two norms           2 · (4D + 4D + 2D)     the input in float32, the normed in float32, the result in bfloat16
    queries, result     2D + 2D + 2D           before and after the kernel, and what the last product takes
    keys, values        4 · 512
    feed-forward        4 · 2F                 gate, its silu, up, their product
                        26D + 2048 + 8F  =  100,352

With 262,144 tokens that is 24.5 GiB a block and 147 GiB for 6, beside logits of 14V bytes a token (28 GiB): more than
the 139 GiB of one H200. Half of it, 88 GiB, is a rank's on `cp=2`. With checkpointing one GPU keeps 2D bytes a token
and block, and one block's 24.5 GiB: 59 GiB with the logits.

Rank 0 trains the untouched model with `gradient_checkpointing_enable` on its GPU, while rank 1 shows that it runs out
of memory without. Then both train on the mesh. A step's loss, and in the first step the gradients, must hold

    |mesh − one GPU| ≤ 4 · u · |one GPU|      ‖mesh − one GPU‖ ≤ 4 · u · √blocks · max(‖one GPU‖, ‖all‖ / 100)

with u = 2⁻⁸: both round, so neither is right. Attention takes 2 · s² · D = 2.8e14 FLOP a block forward: 4.5 times that
a step with checkpointing, 7.6e15 FLOP, about 20 s; on the mesh 3.5 times, on two GPUs, about 9 s a step.

Rank 0 prints JSON lines. Without a GPU sizes are small, on gloo; `--blocks` and `--tokens` change them. `--one-gpu`
puts both ranks on one GPU, by copies over gloo: numbers then tell something, times do not.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import ndcompile as nd
from ndcompile.verify.error_model import ALLOWED, unit
from tests.torchrun import join, join_on_one_gpu

STEPS, LEARNING_RATE = 3, 1e-3
LOW = nd.Precision(compute=torch.bfloat16, reduce=torch.float32)
UNIT = unit(torch.bfloat16)
LARGE: dict[str, Any] = dict(
    hidden_size=2048, intermediate_size=5632, num_attention_heads=16, num_key_value_heads=4, vocab_size=8192
)
TINY: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, vocab_size=97
)
Batch = dict[str, Tensor]


def make(sizes: dict[str, Any], blocks: int, tokens: int) -> tuple[nn.Module, Batch]:
    """The same model and batch on every rank; the second half of the sequence repeats the first."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(num_hidden_layers=blocks, max_position_embeddings=tokens, use_cache=False, **sizes)
    ids = torch.randint(sizes["vocab_size"], (1, tokens // 2)).repeat(1, 2)
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids.clone()}


def alone(model: nn.Module, batch: Batch, device: torch.device) -> Iterator[tuple[float, dict[str, Tensor]]]:
    """The untouched model's steps: in bfloat16 with float32 masters, each block computed again in the backward."""
    masters, low = copy.deepcopy(model).to(device), in_bfloat16(model, device)
    low.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(masters.parameters(), lr=LEARNING_RATE)
    pairs = dict(zip(masters.parameters(), low.parameters(), strict=True))
    for _ in range(STEPS):
        for master, parameter in pairs.items():
            parameter.data.copy_(master.data)
            parameter.grad = None
        loss = low(**{k: v.to(device) for k, v in batch.items()}).loss
        loss.backward()
        for master, parameter in pairs.items():
            assert parameter.grad is not None, "every parameter has a gradient"
            master.grad = parameter.grad.float()
        yield float(loss.detach()), {n: p.grad.cpu() for n, p in masters.named_parameters() if p.grad is not None}
        optimizer.step()


def in_bfloat16(model: nn.Module, device: torch.device) -> Any:
    """A copy whose parameters are bfloat16. Its buffers stay: a rotary frequency of 8 bits is off by whole turns at the
    end of a long sequence.
    """
    low = copy.deepcopy(model).to(device)
    for parameter in low.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return low


def runs_out(model: nn.Module, batch: Batch, device: torch.device) -> bool:
    """Whether one GPU has too little memory for a step without recomputation."""
    try:
        low = in_bfloat16(model, device)
        low(**{k: v.to(device) for k, v in batch.items()}).loss.backward()
    except torch.OutOfMemoryError:
        return True
    return False


def on_mesh(
    model: nn.Module, batch: Batch, device: torch.device, **options: Any
) -> Iterator[tuple[float, dict[str, Tensor]]]:
    parallel = nd.parallelize(model, f"cp={dist.get_world_size()}", batch, precision=LOW, **options)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=LEARNING_RATE)
    for _ in range(STEPS):
        loss = parallel(**{k: v.to(device) for k, v in batch.items()}).loss
        loss.backward()
        gradients = {n: gathered(p.grad) for n, p in parallel.named_parameters() if p.grad is not None}
        yield float(loss.detach()), gradients
        optimizer.step()
        optimizer.zero_grad()


def gathered(gradient: Any) -> Tensor:
    """The whole of a gradient on the CPU, by no collective of the GPU's: gloo has few."""
    own: Tensor = gradient.to_local().float().cpu()
    dims = [place.dim for place in gradient.placements if isinstance(place, Shard)]
    if not dims:
        return own
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    return torch.cat(parts, dims[0])


def ratios(own: dict[str, Tensor], other: dict[str, Tensor], blocks: int) -> dict[str, float]:
    """Each gradient's distance by what rounding explains."""
    total = float(torch.stack([g.norm() for g in other.values()]).norm())
    assert own.keys() == other.keys(), "the same parameters"
    return {
        name: float((own[name] - g).norm()) / (UNIT * blocks**0.5 * max(float(g.norm()), total / 100))
        for name, g in other.items()
    }


def timed(steps: Iterator[tuple[float, dict[str, Tensor]]], device: torch.device) -> Iterator[tuple[Any, float, float]]:
    """Each step with its seconds, and the most GiB that were allocated."""
    gpu = device.type == "cuda"
    while True:
        if gpu:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        found = next(steps, None)
        if found is None:
            return
        peak = torch.cuda.max_memory_allocated() / 2**30 if gpu else 0.0
        yield found, round(time.perf_counter() - start, 2), round(peak, 1)


def tell(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--one-gpu", action="store_true")
    arguments = parser.parse_args()
    shared = arguments.one_gpu
    device = join_on_one_gpu(170) if shared else join(170)
    gpu, rank, begin = device.type == "cuda", dist.get_rank(), time.perf_counter()
    blocks, tokens = arguments.blocks or (6 if gpu else 2), arguments.tokens or (262_144 if gpu else 64)
    model, batch = make(LARGE if gpu else TINY, blocks, tokens)
    right: list[float] = []
    first: dict[str, Tensor] = {}
    if rank == 0:
        for number, ((loss, gradients), seconds, peak) in enumerate(timed(alone(model, batch, device), device)):
            right, first = [*right, loss], first or gradients
            tell({"one device, checkpointed": number, "loss": loss, "seconds": seconds, "peak_gib": peak})
    elif rank == 1 and gpu and not shared:
        tell({"one GPU without recomputation runs out of memory": runs_out(model, batch, device)})
    free(device)
    dist.barrier()
    correct = True
    options = {"transport": "symmetric"} if shared and gpu else {}
    steps = on_mesh(model, batch, device, **options)
    for number, ((loss, gradients), seconds, peak) in enumerate(timed(steps, device)):
        if rank == 0:
            far = abs(loss - right[number]) / (UNIT * abs(right[number]))
            line = {
                "on the mesh": number,
                "loss": loss,
                "loss_ratio": round(far, 4),
                "seconds": seconds,
                "peak_gib": peak,
            }
            worst = {"gradient": "", "ratio": 0.0}
            if number == 0:
                found = ratios(gradients, first, blocks)
                name = max(found, key=lambda n: found[n])
                worst = {"gradient": name, "ratio": round(found[name], 3)}
            correct = correct and far <= ALLOWED and worst["ratio"] <= ALLOWED  # type: ignore[operator]
            tell(line | (worst if number == 0 else {}))
    if rank == 0:
        tell({"correct": correct, "tokens": tokens, "blocks": blocks, "seconds": round(time.perf_counter() - begin, 1)})
    dist.destroy_process_group()
    sys.exit(not correct)


if __name__ == "__main__":
    main()
