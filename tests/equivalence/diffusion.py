"""Diffusion models written by hand: a U-Net with attention and a text beside it, and a transformer of patches."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = dict[str, Tensor]
Results = dict[str, Tensor]


def waves(t: Tensor, width: int) -> Tensor:
    """A time step as sines and cosines."""
    rates = torch.exp(-math.log(10_000) * torch.arange(width // 2, device=t.device, dtype=torch.float32) * 2 / width)
    angles = t.float()[:, None] * rates
    return torch.cat([angles.cos(), angles.sin()], -1)


class Residual(nn.Module):
    """Two convolutions, to which the time is added between; the way around is a convolution where channels change."""

    def __init__(self, channels: int, out: int, time: int) -> None:
        super().__init__()
        self.n1, self.c1 = nn.GroupNorm(4, channels), nn.Conv2d(channels, out, 3, padding=1)
        self.time = nn.Linear(time, out)
        self.n2, self.c2 = nn.GroupNorm(4, out), nn.Conv2d(out, out, 3, padding=1)
        self.around = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.c1(F.silu(self.n1(x))) + self.time(F.silu(time))[:, :, None, None]
        y: Tensor = self.around(x) + self.c2(F.silu(self.n2(h)))
        return y


class Attention(nn.Module):
    """Of places of a plane to each other, or to a text."""

    def __init__(self, channels: int, text: int | None = None, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.GroupNorm(4, channels)
        self.query, self.pair = nn.Linear(channels, channels), nn.Linear(text or channels, 2 * channels)
        self.out = nn.Linear(channels, channels)

    def forward(self, x: Tensor, text: Tensor | None = None) -> Tensor:
        rows = self.norm(x).flatten(2).transpose(1, 2)
        parts = (self.query(rows), *self.pair(rows if text is None else text).chunk(2, -1))
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        y = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + y.transpose(1, 2).reshape(x.shape)


class UNet(nn.Module):
    """Down by a stride, up by interpolation, with what was there before beside it."""

    def __init__(self, width: int = 8, time: int = 16) -> None:
        super().__init__()
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.first, self.down = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 2 * width, 3, 2, padding=1)
        self.before, self.around = Residual(width, width, time), Attention(width)
        self.middle, self.text = Residual(2 * width, 2 * width, time), Attention(2 * width, text=12)
        self.up, self.after = nn.Conv2d(2 * width, width, 3, padding=1), Residual(2 * width, width, time)
        self.norm, self.last = nn.GroupNorm(4, width), nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, images: Tensor, step: Tensor, text: Tensor, noise: Tensor) -> Results:
        time = self.time(waves(step, self.width).to(images.dtype))
        high = self.around(self.before(self.first(images), time))
        low = self.text(self.middle(self.down(high), time), text)
        low = self.up(F.interpolate(low, scale_factor=2.0))
        y = self.last(F.silu(self.norm(self.after(torch.cat([low, high], 1), time))))
        return {"loss": F.mse_loss(y, noise), "y": y}


class Modulated(nn.Module):
    """A block whose norms are scaled and shifted, and whose branches are weighed, by what conditions it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = (nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale, gate, shift_2, scale_2, gate_2 = self.modulation(F.silu(condition))[:, None].chunk(6, -1)
        y = self.n1(x) * (1 + scale) + shift
        q, k, v = self.qkv(y).reshape(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + gate * self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))
        y = self.n2(x) * (1 + scale_2) + shift_2
        return x + gate_2 * self.down(F.gelu(self.up(y), approximate="tanh"))


class DiffusionTransformer(nn.Module):
    """Patches in and out, positions of another grid that are interpolated, a class that is embedded."""

    def __init__(self, width: int = 16, patch: int = 2, side: int = 8) -> None:
        super().__init__()
        self.width, self.patch, self.grid = width, patch, side // patch
        self.patches, self.positions = nn.Conv2d(3, width, patch, patch), nn.Parameter(torch.randn(1, 9, width))
        self.classes, self.time = nn.Embedding(6, width), nn.Linear(width, width)
        self.blocks = nn.ModuleList(Modulated(width, 2) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 3 * patch * patch)

    def forward(self, images: Tensor, step: Tensor, labels: Tensor, noise: Tensor) -> Results:
        grid = (self.grid, self.grid)
        positions = self.positions.unflatten(1, (3, 3)).permute(0, 3, 1, 2)
        x = self.patches(images) + F.interpolate(positions, size=grid, mode="bicubic")
        x = x.flatten(2).transpose(1, 2)
        condition = self.time(waves(step, self.width).to(images.dtype)) + self.classes(labels)
        for block in self.blocks:
            x = block(x, condition)
        y = F.pixel_shuffle(self.head(self.norm(x)).transpose(1, 2).unflatten(2, grid), self.patch)
        return {"loss": F.mse_loss(y, noise), "y": y}


def maker(kind: Callable[[], nn.Module], more: Callable[[int], Batch]) -> Callable[[int], tuple[nn.Module, Batch]]:
    def make(size: int) -> tuple[nn.Module, Batch]:
        torch.manual_seed(9)
        images, noise = torch.randn(2, size, 3, 8, 8)
        return kind(), dict(images=images, step=torch.randint(1000, (size,)), noise=noise) | more(size)

    return make


DIFFUSION: dict[str, Callable[[int], tuple[nn.Module, Batch]]] = {
    "U-Net": maker(UNet, lambda size: dict(text=torch.randn(size, 5, 12))),
    "diffusion transformer": maker(DiffusionTransformer, lambda size: dict(labels=torch.randint(6, (size,)))),
}
