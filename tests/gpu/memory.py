"""What `Program.memory` says beside what a rank measures: a Llama, by mesh, remat, kept weights, eager and compiled.

    python -m torch.distributed.run --nproc-per-node 2 -m tests.gpu.memory --out memory.jsonl
    python -m tests.gpu.memory --others 1         one GPU: a rank whose other rank is not there, and brings nothing

On GPUs `torch.cuda.max_memory_allocated` of the third training step (bfloat16, fused AdamW), less what is allocated
before the model is there; on CPU ranks small sizes, and the bytes of all storages that ops make. A JSON line for each,
in bytes of rank 0: `ratio` is measured / estimate. Exit status 1 where eager execution is more than a tenth away. The
estimate is of eager execution; compiled, torch's partitioner decides what is kept, and the ratio is told only.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ndcompile as nd
from ndcompile.ledger import Ledger
from ndcompile.program import Program
from ndcompile.runtime import private
from ndcompile.runtime.agreement import everyones
from tests.torchrun import alone, join

STEPS = 3
ALLOWED = 0.1
SAVED = ("linear", "attention")
Remat = str | tuple[str, ...]


@dataclass(frozen=True)
class Sizes:
    """What grows with the machine."""

    width: int
    blocks: int
    vocabulary: int
    samples: int
    tokens: int


LARGE, TINY = Sizes(2048, 10, 32_000, 4, 4096), Sizes(64, 3, 96, 4, 64)


@dataclass(frozen=True)
class Case:
    """One line."""

    mesh: str
    remat: Remat = "none"
    reshard: bool = True
    how: str = "eager"


CASES = (
    *(Case(mesh, remat) for mesh in ("dp_shard=2", "tp=2", "cp=2") for remat in ("none", SAVED, "block")),
    Case("dp_shard=2", "block", reshard=False),
    Case("dp_replicate=2"),
    *(Case("dp_shard=2", remat, how="compiled") for remat in ("none", SAVED, "block")),
    Case("tp=2", "block", how="compiled"),
)
"""All eager ones first: compiling takes long."""


def llama(sizes: Sizes) -> nn.Module:
    """Parameters have no memory, and become zeros where they are sharded."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=sizes.vocabulary, hidden_size=sizes.width, intermediate_size=sizes.width * 11 // 4,
        num_hidden_layers=sizes.blocks, num_attention_heads=max(4, sizes.width // 64),
        num_key_value_heads=max(2, sizes.width // 128), use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffer needs values
    assert isinstance(model, nn.Module)
    return model


def row(case: Case, sizes: Sizes, device: torch.device, backend: str) -> dict[str, Any]:
    """One case, compiled, estimated and measured."""
    begin = time.perf_counter()
    low = nd.Precision(compute=torch.bfloat16) if device.type == "cuda" else None
    program = nd.compile(llama(sizes), case.mesh, precision=low, remat=case.remat, reshard_after_forward=case.reshard)
    samples = sizes.samples // program.mesh.size(*(a.name for a in program.mesh.axes if a.kind.startswith("dp_")))
    estimate = program.memory({"b": samples, "s": sizes.tokens})
    found = measured(program, case, samples, sizes, device, backend)
    remat = case.remat if isinstance(case.remat, str) else ", ".join(case.remat)
    return {
        "model": "Llama", "mesh": case.mesh, "remat": remat, "reshard": case.reshard, "how": case.how,
        "estimate": estimate.peak, "measured": found, "ratio": round(found / estimate.peak, 4), **vars(estimate),
        "seconds": round(time.perf_counter() - begin, 1),
    }  # fmt: skip


def measured(program: Program, case: Case, samples: int, sizes: Sizes, device: torch.device, backend: str) -> int:
    """Bytes at the height of the last step."""
    clean(device)
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    with tempfile.TemporaryDirectory() as folder:
        program.save(Path(folder) / "program.py")
        parallel = nd.load(Path(folder) / "program.py", llama(sizes))
    if case.how == "compiled":
        parallel.compile(backend=backend)
    optimizer = torch.optim.AdamW(parallel.parameters(), fused=True)
    ids = torch.arange(samples * sizes.tokens, device=device).view(samples, -1) % sizes.vocabulary
    for _ in range(STEPS - 1):
        step(parallel, optimizer, ids)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step(parallel, optimizer, ids)
        return torch.cuda.max_memory_allocated() - before
    ledger = Ledger()
    states = [x for state in optimizer.state.values() for x in state.values() if x.dim()]
    for tensor in (*parallel.parameters(), *parallel.buffers(), *states, ids):
        ledger.add(private.local(tensor))
    with ledger.counting():
        step(parallel, optimizer, ids)
    return ledger.most


def step(parallel: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> None:
    optimizer.zero_grad()
    parallel(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()


def clean(device: torch.device) -> None:
    gc.collect()
    torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--how", nargs="+", choices=["eager", "compiled"], default=["eager", "compiled"])
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--seconds", type=float, default=120.0, help="start nothing after this")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--others", type=int, default=0, help="so many ranks, which are not there; without torchrun")
    asked, begin = parser.parse_args(), time.perf_counter()
    device = alone(1 + asked.others) if asked.others else join()
    cases = [case for case in CASES if case.how in asked.how]
    far = []
    for case in cases:
        if everyones(time.perf_counter() - begin > asked.seconds)[0]:
            break
        found = row(case, LARGE if device.type == "cuda" else TINY, device, asked.backend)
        far += [found] if case.how == "eager" and abs(found["ratio"] - 1) > ALLOWED else []
        if dist.get_rank() == 0:
            print(json.dumps(found), flush=True)
            if asked.out:
                with asked.out.open("a") as lines:
                    lines.write(json.dumps(found) + "\n")
    if dist.get_rank() == 0:
        print(f"{len(far)} further than {ALLOWED:.0%}, in {time.perf_counter() - begin:.0f} s", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(1 if far else 0)


if __name__ == "__main__":
    main()
