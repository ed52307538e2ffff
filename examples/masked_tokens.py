"""Tokens masked unequally between ranks: FSDP2 averages the ranks, one device and ndcompile average the tokens.

    torchrun --nproc-per-node 2 examples/masked_tokens.py
    python examples/masked_tokens.py --float64              starts the two ranks itself

The same small Llama with the same weights takes one batch three times: whole on one device, split over two ranks of
torch's FSDP2 as its guide shows it, and split over two ranks of `dp_shard=2`. What is printed is measured in this run:
the loss, and for the gradients the largest ‖a − b‖ / max(‖b‖, 1e-6 · G), b on one device, G the norm of all of them.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

import ndcompile as nd

VOCABULARY, SAMPLES, LENGTH = 131, 8, 32
Batch = dict[str, Tensor]


def make_model(float64: bool) -> LlamaForCausalLM:
    """The same weights on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    return model.double() if float64 else model


def make_batch(equal: bool) -> Batch:
    """Samples whose prompts have no label: all of one length, or from none at all to nearly the whole sample."""
    ids = torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    for sample in range(SAMPLES):
        labels[sample, : LENGTH // 2 if equal else sample * (LENGTH - 2) // (SAMPLES - 1)] = -100
    return {"input_ids": ids, "labels": labels}


def step(call: nn.Module, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and the whole gradient of every parameter."""
    loss = call(**batch).loss
    loss.backward()
    return loss.detach(), {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def on_one_device(batch: Batch, float64: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """The model itself; in float64 its graph without the casts to float32 that transformers writes inside."""
    model = make_model(float64)
    return step(nd.compile(model, "", batch, float64=True).one_device(model) if float64 else model, model, batch)


def on_fsdp2(own: Batch, float64: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Each rank's loss is the mean over its own tokens; FSDP2 averages the gradients, and users log the mean loss."""
    model, mesh = make_model(float64), init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    loss, gradients = step(model, model, own)
    dist.all_reduce(loss)
    return loss / 2, gradients


def on_ndcompile(own: Batch, float64: bool) -> tuple[Tensor, dict[str, Tensor]]:
    model = nd.parallelize(make_model(float64), "dp_shard=2", own, float64=float64)
    return step(model, model, own)


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    total = torch.stack([g.norm() for g in expected.values()]).norm()
    far = [(found[name] - g).norm() / torch.maximum(g.norm(), 1e-6 * total) for name, g in expected.items()]
    return max(far).item()


def compare(equal: bool, float64: bool) -> None:
    batch = make_batch(equal)
    own = {name: value.chunk(2)[dist.get_rank()] for name, value in batch.items()}
    loss, gradients = on_one_device(batch, float64)
    rows = [("FSDP2 fully_shard", *on_fsdp2(own, float64)), ("ndcompile dp_shard=2", *on_ndcompile(own, float64))]
    if dist.get_rank() == 0:
        counts = [int((half[:, 1:] != -100).sum()) for half in batch["labels"].chunk(2)]
        print(f"\nrank 0 has {counts[0]} tokens with a label, rank 1 has {counts[1]}")
        print(f"{'':<22}{'loss':>14}{'off by':>12}{'gradients off by':>20}")
        print(f"{'one device':<22}{loss:>14.10f}")
        for name, its_loss, its_gradients in rows:
            off = abs(its_loss - loss) / loss
            print(f"{name:<22}{its_loss:>14.10f}{off:>12.1e}{distance(its_gradients, gradients):>20.1e}", flush=True)


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--float64", action="store_true", help="compute in float64, where equal means 1e-10")
    float64 = options.parse_args().float64
    dist.init_process_group("gloo")
    for equal in (True, False):
        compare(equal, float64)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:  # started by python alone
        run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        os.execv(sys.executable, [sys.executable, *run, *sys.argv])
    main()
