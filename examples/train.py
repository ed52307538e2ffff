"""A training loop as it is written for one device, on any mesh.

    torchrun --nproc-per-node 4 examples/train.py --mesh "dp_shard=2, tp=2" --folder checkpoint

Run again, with the same mesh or with another, it goes on where it stopped. What has to do with parallelism is the line
with `nd.parallelize`, and that a rank takes the rows of its data-parallel part: ranks that differ only in cp or tp take
the same.
"""

from __future__ import annotations

import argparse
import os
import pathlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import LlamaConfig, LlamaForCausalLM

import ndcompile as nd

TEXT = torch.tensor(list(pathlib.Path(argparse.__file__).read_bytes()))  # something to learn
EVALUATION = 1_000_000  # a number that no training step has


def make_model() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def batch(step: int, part: int, parts: int) -> dict[str, Tensor]:
    """This part's rows of the global batch of a step: 8 windows of 64 bytes."""
    starts = torch.randint(len(TEXT) - 64, (8, 1), generator=torch.Generator().manual_seed(step))
    ids = TEXT[starts + torch.arange(64)].chunk(parts)[part]
    return {"input_ids": ids, "labels": ids.clone()}


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--mesh", default="dp_shard=-1")
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("checkpoint"))
    given = options.parse_args()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    sharing = nd.MeshSpec.parse(given.mesh, world_size).size("cp", "tp")  # ranks with the same rows
    part, parts = rank // sharing, world_size // sharing

    model = nd.parallelize(make_model(), given.mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    done = 0
    if (given.folder / ".metadata").exists():
        parameters, moments = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": parameters, "optimizer": moments, "done": done}
        checkpoint.load(state, checkpoint_id=given.folder)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        done = state["done"]
    for step in range(done, done + given.steps):
        loss = model(**batch(step, part, parts)).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step:>3}   loss {loss.item():.6f}   gradient norm {norm.item():.6f}", flush=True)
    model.eval()
    with torch.no_grad():
        loss = model(**batch(EVALUATION, part, parts)).loss
    if rank == 0:
        print(f"evaluation   loss {loss.item():.6f}", flush=True)
    parameters, moments = get_state_dict(model, optimizer)
    state = {"model": parameters, "optimizer": moments, "done": done + given.steps}
    checkpoint.save(state, storage_writer=checkpoint.FileSystemWriter(given.folder, overwrite=True))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
