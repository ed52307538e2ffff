"""Small models that several tests compile."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Mlp(nn.Module):
    """Two linear layers with biases, and a gelu between."""

    def __init__(self, width: int = 12, hidden: int = 20) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Residual(nn.Module):
    """A norm and an MLP around which the input passes: one block of a stack."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = Mlp(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Stack(nn.Module):
    """Tokens to logits through equal blocks: [batch, sequence] to [batch, sequence, vocabulary]."""

    def __init__(self, depth: int = 2, width: int = 12, hidden: int = 20, vocabulary: int = 31) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Residual(width, hidden) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def seeded(kind: type[nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
    """The same weights on every rank."""
    torch.manual_seed(0)
    return kind(*args, **kwargs)


def tokens(size: int = 4, length: int = 8, vocabulary: int = 31) -> dict[str, Tensor]:
    ids = torch.randint(vocabulary, (size, length), generator=torch.Generator().manual_seed(1))
    return {"ids": ids, "labels": ids.roll(-1, 1)}


def llama(vocabulary: int = 131, layers: int = 2, heads: int = 4) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=48, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=2, max_position_embeddings=32, use_cache=False,
        attn_implementation="sdpa",
    )  # fmt: skip
    config = LlamaConfig(**sizes)
    model = LlamaForCausalLM(config)
    assert isinstance(model, nn.Module)
    return model


def stack_and_tokens() -> tuple[nn.Module, dict[str, Tensor]]:
    """For commands that name a model by the function that makes it."""
    return seeded(Stack), tokens()


class Chunked(nn.Module):
    """Mixes the places of each chunk of 8: pads a sequence to whole chunks, and takes the pads away if there are any.

    As mixers of states do, it takes what it made for as long as what it was given, by a view.
    """

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.gate, self.mix = nn.Linear(width, width), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        pads = (8 - length % 8) % 8
        chunks = nn.functional.pad(x, (0, 0, 0, pads)).reshape(batch, -1, 8, 2, width // 2)
        y = self.mix(chunks.transpose(2, 4)).transpose(2, 4).reshape(batch, -1, width)
        if pads > 0:
            y = y[:, :length]
        out: Tensor = self.gate(x).sigmoid() * y.reshape(batch, length, width)
        return out
