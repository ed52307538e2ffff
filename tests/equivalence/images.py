"""Convolution nets of torch.nn, with what stands between convolutions: each takes images and labels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = dict[str, Tensor]
CLASSES = 5


class Classifies(nn.Module):
    """A net from images `[b, 3, 16, …]` to scores, and the loss of their classes."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(*layers)

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(images)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def normed(dropout: float) -> nn.Module:
    """Batch norm, in-place ReLU, groups, dropout of channels; the last convolution has a bias."""
    return Classifies(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1, groups=2, bias=False), nn.BatchNorm2d(8, affine=False), nn.ReLU(inplace=True),
        nn.Dropout2d(dropout), nn.Conv2d(8, 12, 3, stride=2), nn.ReLU(), nn.Dropout(dropout),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, CLASSES),
    )  # fmt: skip


def grouped() -> nn.Module:
    """Group norm, a batch norm that keeps no statistics, dilation, average pooling."""
    return Classifies(
        nn.Conv2d(3, 8, 3, padding="same", dilation=2), nn.GroupNorm(4, 8), nn.SiLU(), nn.AvgPool2d(2),
        nn.Conv2d(8, 12, 2, stride=2, bias=False), nn.BatchNorm2d(12, track_running_stats=False), nn.GELU(),
        nn.Conv2d(12, 6, 1), nn.Flatten(), nn.LayerNorm(96), nn.Linear(96, CLASSES),
    )  # fmt: skip


def other_spaces(space: int) -> nn.Module:
    """One or three dims of space."""
    conv: type[nn.Module] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[space - 1]
    norm: type[nn.Module] = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[space - 1]
    pool: type[nn.Module] = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)[space - 1]
    return Classifies(conv(3, 8, 3, bias=False), norm(8), nn.ReLU(), pool(1), nn.Flatten(), nn.Linear(8, CLASSES))


def maker(kind: Callable[[], nn.Module], shape: tuple[int, ...]) -> Callable[[int], tuple[nn.Module, Batch]]:
    def make(size: int) -> tuple[nn.Module, Batch]:
        torch.manual_seed(8)
        return kind(), {"images": torch.randn(size, 3, *shape), "labels": torch.randint(CLASSES, (size,))}

    return make


IMAGES: dict[str, Callable[[int], tuple[nn.Module, Batch]]] = {
    "batch norm": maker(lambda: normed(0.0), (16, 16)),
    "batch norm with dropout": maker(lambda: normed(0.2), (16, 16)),
    "group norm": maker(grouped, (16, 16)),
    "convolution in 1d": maker(lambda: other_spaces(1), (64,)),
    "convolution in 3d": maker(lambda: other_spaces(3), (6, 6, 6)),
}
