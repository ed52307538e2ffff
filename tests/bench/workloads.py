"""Models to train, at the sizes that the tables name and at sizes for a test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Workload:
    """A model that trains on batches; `per_sample` of what is counted (tokens, images) is in one sample.

    `build` makes the model on the default device, `draw(samples, generator)` one batch on the generator's device,
    `blocks` finds the repeated blocks, which peers compile and shard one by one.
    """

    build: Callable[[], nn.Module]
    draw: Callable[[int, torch.Generator], Batch]
    blocks: Callable[[Any], list[nn.Module]]
    samples: int
    per_sample: int
    counted: str = "tokens"


def _tokens(vocabulary: int, length: int) -> Callable[[int, torch.Generator], Batch]:
    def draw(samples: int, generator: torch.Generator) -> Batch:
        ids = torch.randint(vocabulary, (samples, length), generator=generator, device=generator.device)
        return {"input_ids": ids, "labels": ids.clone()}

    return draw


def llama(layers: int, hidden: int, ffn: int, heads: int, vocabulary: int, samples: int, length: int) -> Workload:
    from transformers import LlamaConfig, LlamaForCausalLM

    settings: dict[str, Any] = dict(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads // 4, max_position_embeddings=length, use_cache=False,
        tie_word_embeddings=False, attn_implementation="sdpa",
    )  # fmt: skip
    return Workload(
        lambda: LlamaForCausalLM(LlamaConfig(**settings)),
        _tokens(vocabulary, length),
        lambda model: list(model.model.layers),
        samples,
        length,
    )


def gpt2(layers: int, hidden: int, heads: int, vocabulary: int, samples: int, length: int) -> Workload:
    from transformers import GPT2Config, GPT2LMHeadModel

    settings: dict[str, Any] = dict(
        n_embd=hidden, n_layer=layers, n_head=heads, n_positions=length, vocab_size=vocabulary, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return Workload(
        lambda: GPT2LMHeadModel(GPT2Config(**settings)),
        _tokens(vocabulary, length),
        lambda model: list(model.transformer.h),
        samples,
        length,
    )


def vit(layers: int, hidden: int, ffn: int, heads: int, image: int, patch: int, samples: int) -> Workload:
    from transformers import ViTConfig, ViTForImageClassification

    settings: dict[str, Any] = dict(
        hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers, num_attention_heads=heads,
        image_size=image, patch_size=patch, num_labels=1000, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip

    def draw(samples: int, generator: torch.Generator) -> Batch:
        device = generator.device
        pixels = torch.randn(samples, 3, image, image, generator=generator, device=device)
        return {"pixel_values": pixels, "labels": torch.randint(1000, (samples,), generator=generator, device=device)}

    return Workload(
        lambda: ViTForImageClassification(ViTConfig(**settings)),
        draw,
        lambda model: [m for m in model.modules() if type(m).__name__ == "ViTLayer"],
        samples,
        1,
        "images",
    )


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "llama-1b": lambda: llama(16, 2048, 8192, 32, 32_000, samples=4, length=4096),
    "llama-1b-32k": lambda: llama(16, 2048, 8192, 32, 32_000, samples=1, length=32_768),
    "llama-8b-widths": lambda: llama(8, 4096, 14_336, 32, 128_256, samples=2, length=4096),
    "gpt2-xl": lambda: gpt2(48, 1600, 25, 50_257, samples=8, length=1024),
    "vit-h": lambda: vit(32, 1280, 5120, 16, 224, 14, samples=64),
    "llama-tiny": lambda: llama(2, 64, 64, 8, 64, samples=2, length=16),
    "gpt2-tiny": lambda: gpt2(2, 32, 4, 64, samples=2, length=16),
    "vit-tiny": lambda: vit(2, 32, 64, 4, 16, 4, samples=2),
}
