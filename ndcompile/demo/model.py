"""A small byte-level GPT, written for one device: nothing in this file knows about meshes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 257  # 256 bytes and an end of text: odd, so it divides over no mesh
IGNORED = -100


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(project(x)) for project in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)


class DecoderBlock(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class ByteGPT(nn.Module):
    """Predicts the next byte: ids [batch, sequence] to logits [batch, sequence, 257], and to a loss with labels."""

    def __init__(
        self, width: int = 128, depth: int = 4, heads: int = 4, context: int = 128, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(DecoderBlock(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(_initialize)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        at = torch.arange(ids.size(1), device=ids.device)
        x = self.dropout(self.tokens(ids) + self.positions(at))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return {"logits": logits} if labels is None else {"loss": next_token_loss(logits, labels), "logits": logits}


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean cross-entropy of each position's successor, over the labels that are not -100."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
