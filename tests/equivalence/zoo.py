"""The models of the equivalence matrix: each returns a model with seeded weights, and a batch of `size` samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.equivalence.deep import DEEP
from tests.equivalence.diffusion import DIFFUSION
from tests.equivalence.grouped import GROUPED, VOCABULARY
from tests.equivalence.images import IMAGES
from tests.equivalence.odd import ODD
from tests.equivalence.recurrent import RECURRENT

Batch = dict[str, Tensor]


class Mlp(nn.Module):
    """Two layers, biases, a mean squared error inside."""

    def __init__(self, width: int = 12, hidden: int = 16) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        y = self.down(F.gelu(self.up(x)))
        return {"loss": F.mse_loss(y, target), "y": y}


def mlp(size: int) -> tuple[nn.Module, Batch]:
    torch.manual_seed(1)
    model = Mlp()
    return model, {"x": torch.randn(size, 12), "target": torch.randn(size, 12)}


def gpt(dropout: float) -> Callable[[int], tuple[nn.Module, Batch]]:
    def make(size: int) -> tuple[nn.Module, Batch]:
        from ndcompile.demo.model import ByteGPT

        torch.manual_seed(2)
        model = ByteGPT(width=32, depth=2, heads=8, context=16, dropout=dropout)
        return model, masked("ids", 257, size)

    return make


def llama(size: int) -> tuple[nn.Module, Batch]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    settings: dict[str, Any] = dict(
        vocab_size=131, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=32, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**settings)), masked("input_ids", 131, size)


def masked(name: str, vocabulary: int, size: int, length: int = 8) -> Batch:
    """Tokens, and labels of which sample i masks its first i tokens: unequal between ranks."""
    ids = torch.randint(vocabulary, (size, length))
    labels = ids.clone()
    for i in range(size):
        labels[i, : i % length] = -100
    return {name: ids, "labels": labels}


def odd(name: str) -> Callable[[int], tuple[nn.Module, Batch]]:
    def make(size: int) -> tuple[nn.Module, Batch]:
        torch.manual_seed(4)
        model = (ODD | DEEP | RECURRENT)[name]()
        if "ids" in model.forward.__code__.co_varnames:
            return model, masked("ids", 19, size)
        return model, {"x": torch.randn(size, 12), "target": torch.randn(size, 12)}

    return make


def grouped(name: str) -> Callable[[int], tuple[nn.Module, Batch]]:
    def make(size: int) -> tuple[nn.Module, Batch]:
        torch.manual_seed(6)
        return GROUPED[name](), masked("ids", VOCABULARY, size, length=24)

    return make


ZOO: dict[str, Callable[[int], tuple[nn.Module, Batch]]] = {
    "mlp": mlp,
    "gpt": gpt(0.0),
    "gpt with dropout": gpt(0.1),
    "llama": llama,
}
"""The models of the matrix."""

BY_NAME = {name: odd(name) for name in (*ODD, *DEEP, *RECURRENT)} | {name: grouped(name) for name in GROUPED}
ALL = ZOO | BY_NAME | IMAGES | DIFFUSION
"""And those of `odd`, `deep`, `recurrent`, `grouped`, `images` and `diffusion`."""
