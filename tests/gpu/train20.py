"""Twenty steps in bfloat16 on two ranks beside one device: Llama, GPT-2, ViT on `dp_shard=2`, `tp=2`, `dp_replicate=2`.

    python -m torch.distributed.run --nproc-per-node 2 -m tests.gpu.train20

NCCL where each rank has a GPU, else gloo and small sizes. Each rank also trains the untouched model on its own device
and the global batch, once in float64 (what is right) and once in bfloat16 with float32 masters (what rounding does).
Each step's loss, and in the first step each gradient, must hold

    ‖mesh − float64‖ ≤ 4 · max(‖bfloat16 − float64‖, u · √blocks · ‖float64‖)        u = 2⁻⁸

Rank 0 prints a JSON line for each model and mesh: the largest ratio of the two sides without the 4 and where, and the
smallest error of that loss that would have been rejected. Gradients that are zero by mathematics (below 1e-6 of all)
are named, not divided by. `--out FILE` takes every step.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ndcompile as nd
from ndcompile.inputs import Inputs
from ndcompile.mesh import MeshSpec
from ndcompile.runtime.agreement import everyones
from ndcompile.verify import training
from ndcompile.verify.error_model import ALLOWED, ErrorModel, floor, unit
from ndcompile.verify.measure import Ruler, assembled
from tests.equivalence.compare import own_rows
from tests.torchrun import join

STEPS, SAMPLES = 20, 8
LEARNING_RATE, CLIP = 3e-4, 1.0
MESHES = ("dp_shard=2", "tp=2", "dp_replicate=2")
LOW = nd.Precision(compute=torch.bfloat16, reduce=torch.float32)
UNIT = unit(torch.bfloat16)
RECIPE = training.Recipe(STEPS, LEARNING_RATE, CLIP, eps=1e-8)
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Sizes:
    """What grows with the machine."""

    width: int
    blocks: int
    heads: int
    tokens: int
    image: int


TINY, LARGE = Sizes(32, 2, 4, 16, 16), Sizes(512, 8, 8, 256, 64)


def llama(sizes: Sizes) -> tuple[nn.Module, Batch]:
    from transformers import LlamaConfig, LlamaForCausalLM

    settings: dict[str, Any] = dict(
        hidden_size=sizes.width, intermediate_size=3 * sizes.width, num_hidden_layers=sizes.blocks, vocab_size=8191,
        num_attention_heads=sizes.heads, num_key_value_heads=sizes.heads // 2, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**settings)), tokens(8191, sizes)


def gpt2(sizes: Sizes) -> tuple[nn.Module, Batch]:
    from transformers import GPT2Config, GPT2LMHeadModel

    settings: dict[str, Any] = dict(
        n_embd=sizes.width, n_layer=sizes.blocks, n_head=sizes.heads, n_positions=sizes.tokens, vocab_size=50257,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(GPT2Config(**settings)), tokens(50257, sizes)


def vit(sizes: Sizes) -> tuple[nn.Module, Batch]:
    from transformers import ViTConfig, ViTForImageClassification

    settings: dict[str, Any] = dict(
        hidden_size=sizes.width, intermediate_size=3 * sizes.width, num_hidden_layers=sizes.blocks,
        num_attention_heads=sizes.heads, image_size=sizes.image, patch_size=sizes.image // 8, num_labels=10,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    images = torch.randn(SAMPLES, 3, sizes.image, sizes.image)
    return ViTForImageClassification(ViTConfig(**settings)), {"pixel_values": images, "labels": torch.arange(SAMPLES)}


MODELS: dict[str, Callable[[Sizes], tuple[nn.Module, Batch]]] = {"Llama": llama, "GPT-2": gpt2, "ViT": vit}


def tokens(vocabulary: int, sizes: Sizes) -> Batch:
    """Tokens of which sample i has no labels for its first 2 · i."""
    ids = torch.randint(vocabulary, (SAMPLES, sizes.tokens))
    labels = ids.clone()
    for i in range(SAMPLES):
        labels[i, : 2 * i] = -100
    return {"input_ids": ids, "labels": labels}


# ---- the three ways to train ---------------------------------------------------------------------------------------


@dataclass
class Trained:
    """The loss of each step, and the gradients of the first: of a mesh this rank's parts."""

    losses: list[float]
    gradients: dict[str, Tensor]

    @classmethod
    def of(cls, steps: Iterable[training.Trained]) -> Trained:
        found = cls([], {})
        for step in steps:
            found.losses.append(float(step.results["loss"]))
            found.gradients = found.gradients or step.gradients
        return found


def on_mesh(parallel: nn.Module, batch: Batch, mesh: MeshSpec) -> Trained:
    """This rank's share of the same training; the losses are those of the global batch."""
    mine = Inputs((), own_rows(batch, mesh, dist.get_rank()))
    return Trained.of(training.on_mesh(parallel, mine, no_cotangent, RECIPE))


def no_cotangent(name: str, shape: Sequence[int]) -> Tensor:
    raise AssertionError("all these models return a loss")


# ---- the comparison ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compared:
    """One model on one mesh: losses by step, and the ratio of each gradient."""

    model: str
    mesh: str
    blocks: int
    losses: dict[str, list[float]]
    gradients: dict[str, float]
    zero: list[str]
    seconds: float

    def ratio(self, step: int) -> float:
        exact, low, found = (losses[step] for losses in self.losses.values())
        return abs(found - exact) / floor(abs(low - exact), abs(exact), self.blocks, UNIT)

    @property
    def holds(self) -> bool:
        return all(ratio <= ALLOWED for ratio in (*map(self.ratio, range(STEPS)), *self.gradients.values()))

    def row(self) -> dict[str, Any]:
        step, name = max(range(STEPS), key=self.ratio), max(self.gradients, key=lambda name: self.gradients[name])
        exact, low, _ = (losses[step] for losses in self.losses.values())
        return dict(
            model=self.model, mesh=self.mesh, holds=self.holds, loss_ratio=round(self.ratio(step), 3), step=step,
            rejects=float(f"{ALLOWED * floor(abs(low - exact), abs(exact), self.blocks, UNIT):.3g}"),
            gradient_ratio=round(self.gradients[name], 3), gradient=name, gradients=len(self.gradients),
            zero=len(self.zero), seconds=round(self.seconds, 1),
            losses={way: [round(losses[0], 5), round(losses[-1], 5)] for way, losses in self.losses.items()},
        )  # fmt: skip

    def step_rows(self) -> list[dict[str, Any]]:
        at = [{way: losses[step] for way, losses in self.losses.items()} for step in range(STEPS)]
        rows = [dict(model=self.model, mesh=self.mesh, step=i, ratio=self.ratio(i)) | at[i] for i in range(STEPS)]
        return [*rows, dict(model=self.model, mesh=self.mesh, gradients=self.gradients, zero=self.zero)]


def compared(name: str, sizes: Sizes, device: torch.device) -> Iterator[Compared]:
    torch.manual_seed(0)
    model, batch = MODELS[name](sizes)
    model, batch = model.to(device), {k: v.to(device) for k, v in batch.items()}
    before, inputs = dict(model.named_parameters()), Inputs((), batch)
    exact = Trained.of(training.exactly(model, same, inputs, no_cotangent, RECIPE))
    low = Trained.of(training.rounded(model, same, inputs, no_cotangent, RECIPE, LOW.compute))
    for mesh in MESHES:
        begin = time.perf_counter()
        program = nd.compile(model, mesh, batch, precision=LOW)
        found = on_mesh(nd.parallelize(model, mesh, batch, precision=LOW), batch, program.mesh)
        assert all(theirs == found.losses for theirs in everyones(found.losses)), f"{name} on {mesh}: losses differ"
        losses = {"float64": exact.losses, "bfloat16": low.losses, "on mesh": found.losses}
        ruler = Ruler(program, before, RECIPE.learning_rate, exact=False)
        rows = list(ruler.gradients(dist.get_rank(), found.gradients, exact.gradients, low.gradients))
        measured, error_model = assembled(everyones(rows), program.mesh), ErrorModel(torch.bfloat16, sizes.blocks)
        ratios = {m.what.removeprefix("gradient of "): error_model.ratio(m) for m in measured}
        zero = sorted(ruler.zero(exact.gradients))
        yield Compared(name, mesh, sizes.blocks, losses, ratios, zero, time.perf_counter() - begin)


def same(model: nn.Module) -> nn.Module:
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    device = join()
    sizes = LARGE if device.type == "cuda" else TINY
    found = []
    for name in asked.only:
        for result in compared(name, sizes, device):
            found.append(result)
            if dist.get_rank() == 0:
                print(json.dumps(result.row()), flush=True)
    if asked.out and dist.get_rank() == 0:
        asked.out.write_text("".join(json.dumps(row) + "\n" for result in found for row in result.step_rows()))
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(0 if all(result.holds for result in found) else 1)


if __name__ == "__main__":
    main()
