"""Models that look along a sequence by windows and running sums: convolutions as in Mamba, gates that add up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.equivalence.zoo import Batch, masked

WIDTH = 8


class Block(nn.Module):
    """A convolution over the tokens, and a state that every token adds to, as linear attention does."""

    def __init__(self, how: str, window: int, groups: int, dilation: int) -> None:
        super().__init__()
        self.how, self.before = how, dilation * (window - 1)
        padding: Any = {"cut": self.before, "padded": 0, "same": "same"}[how]
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Conv1d(WIDTH, WIDTH, window, padding=padding, groups=groups, dilation=dilation)
        self.keys, self.gate = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x).transpose(1, 2)
        if self.how == "padded":
            y = F.pad(y, (self.before, 0))
        y = F.silu(self.mix(y)[..., : x.shape[1]]).transpose(1, 2)
        state = (self.keys(y).sigmoid()[..., None] * y[..., None, :]).cumsum(1)
        return x + (self.gate(y)[..., None, :] @ state)[..., 0, :]


class Mixing(nn.Module):
    """Two blocks and a loss over tokens."""

    def __init__(self, how: str, window: int = 4, groups: int = WIDTH, dilation: int = 1) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(19, WIDTH), nn.Linear(WIDTH, 19)
        self.blocks = nn.ModuleList(Block(how, window, groups, dilation) for _ in range(2))

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def _mixing(
    how: str, window: int = 4, groups: int = WIDTH, dilation: int = 1
) -> Callable[[int], tuple[nn.Module, Batch]]:
    def make(size: int) -> tuple[nn.Module, Batch]:
        torch.manual_seed(6)
        return Mixing(how, window, groups, dilation), masked("ids", 19, size)

    return make


ALONG: dict[str, Callable[[int], tuple[nn.Module, Batch]]] = {
    "windows, causal": _mixing("cut"),
    "windows, padded": _mixing("padded", window=3, groups=1, dilation=2),
    "windows, both ways": _mixing("same", window=4, groups=2),
}
