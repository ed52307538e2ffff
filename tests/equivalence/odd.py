"""Small models that do what larger ones do somewhere: each takes `ids`, `labels` or `x`, and returns a loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Results = dict[str, Tensor]


class FusedAttention(nn.Module):
    """One matrix for query, key and value, cut in three; softmax by hand, a mask from comparisons."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.tokens = nn.Embedding(19, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, 19)

    def forward(self, ids: Tensor, labels: Tensor) -> Results:
        b, s = ids.shape
        q, k, v = self.qkv(self.tokens(ids)).chunk(3, -1)
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        places = torch.arange(s, device=ids.device)
        scores = q @ k.transpose(-1, -2) / q.size(-1) ** 0.5
        scores = scores.masked_fill(places[None, :] > places[:, None], -1e9)
        y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, s, -1)
        logits = self.out(y)
        return {"loss": F.cross_entropy(logits.view(-1, 19), labels.view(-1), label_smoothing=0.1), "logits": logits}


class Pooled(nn.Module):
    """Mean over the sequence, a class a sample; two losses, one of them a norm of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(19, 16)
        self.norm = nn.LayerNorm(16)
        self.hidden = nn.Linear(16, 10)
        self.head = nn.Linear(10, 5)

    def forward(self, ids: Tensor, labels: Tensor) -> Results:
        x = torch.tanh(self.hidden(self.norm(self.tokens(ids))))
        logits = self.head(x.mean(1))
        loss = F.cross_entropy(logits, labels[:, 0].clamp(min=0) % 5)
        penalty = x.pow(2).mean() + x.abs().sum(-1).mean()
        return {"loss": loss + 0.1 * penalty, "penalty": penalty, "logits": logits}


class Shared(nn.Module):
    """One block called three times, a matrix used straight and transposed, an input that is used late."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(12, 20) / 4)
        self.block = nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 24), nn.SiLU(), nn.Linear(24, 12))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, target: Tensor) -> Results:
        y = x
        for _ in range(3):
            y = y + self.scale * self.block(y)
        z = torch.relu(y @ self.w) @ self.w.t()
        z = torch.where(x > 0, z, y * 0.5) - 0.1
        return {"loss": F.mse_loss(z, target), "z": z}


class Gated(nn.Module):
    """Gate and up in one matrix, a width that divides over nothing, a tied pair, a frozen matrix, an unused one."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 2 * 9)
        self.down = nn.Linear(9, 12, bias=False)
        self.again = nn.Linear(9, 12, bias=False)
        self.again.weight = self.down.weight
        self.frozen = nn.Linear(12, 12)
        self.unused = nn.Linear(3, 3)
        for parameter in self.frozen.parameters():
            parameter.requires_grad_(False)

    def forward(self, x: Tensor, target: Tensor) -> Results:
        gate, up = self.up(self.frozen(x)).split(9, dim=-1)
        h = F.silu(gate) * up
        y = self.down(h) + self.again(h.tanh())
        with torch.no_grad():
            shift = y.mean(0, keepdim=True)
        y = y - shift
        return {"loss": (y - target).pow(2).sum(-1).sqrt().mean(), "y": y}


class Towers(nn.Module):
    """Two lists of blocks, of which the second sees the first's result; blocks that differ in one number."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.GELU()) for _ in range(3))
        self.right = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 8 * (i + 1)), nn.Linear(8 * (i + 1), 12)) for i in range(2)
        )

    def forward(self, x: Tensor, target: Tensor) -> Results:
        skips = []
        for block in self.left:
            x = block(x) + x
            skips.append(x)
        for block, skip in zip(self.right, skips, strict=False):
            x = block(x + skip)
        return {"loss": F.mse_loss(x, target) + torch.cat(skips, -1).mean(), "x": x, "first": skips[0]}


class Remembers(nn.Module):
    """Buffers that a forward changes: a count, a mean over the batch, a table by row; changes through views."""

    count: Tensor
    mean: Tensor
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 20)
        self.down = nn.Linear(20, 12)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(20))
        self.register_buffer("table", torch.zeros(3, 12))

    def forward(self, x: Tensor, target: Tensor) -> Results:
        self.count += 1
        h = self.up(x)
        before = self.mean.clone()
        self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        h = torch.tanh(h - before) + x[:, :1]
        h[:, :4] *= 2
        h[:, -1] = x[:, 0]
        y = self.down(h)
        y[x > 1] = 0
        with torch.no_grad():
            self.table[1] += y.sum(0)
            self.table[:, 2].copy_(self.count + h.pow(2).mean())
        return {"loss": F.mse_loss(y, target) + (h * self.mean).mean() / self.count, "y": y}


def paths(x: Tensor, keep: float) -> Tensor:
    """Stochastic depth as transformers has it."""
    return x.div(keep) * (keep + torch.rand((x.shape[0], 1, 1), dtype=x.dtype, device=x.device)).floor_()


def paths_in_place(x: Tensor, keep: float) -> Tensor:
    """Stochastic depth as timm and torchvision have it."""
    return x * x.new_empty((x.shape[0], 1, 1)).bernoulli_(keep).div_(keep)


class Skips(nn.Module):
    """Blocks of which a sample skips some at random, after a gate that noise jitters; normal noise on the tokens."""

    class Block(nn.Module):
        def __init__(self, keep: float) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(16)
            self.gate = nn.Linear(16, 24)
            self.up = nn.Linear(16, 24)
            self.down = nn.Linear(24, 16)
            self.keep = keep

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            gate = self.gate(y)
            gate = gate * torch.empty_like(gate).uniform_(0.9, 1.1)
            x = x + paths(self.down(torch.sigmoid(gate) * self.up(y)), self.keep)
            return x + paths_in_place(F.gelu(y), self.keep)

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(19, 16)
        self.blocks = nn.ModuleList(Skips.Block(0.6) for _ in range(3))
        self.head = nn.Linear(16, 19)

    def forward(self, ids: Tensor, labels: Tensor) -> Results:
        x = self.tokens(ids)
        x = x + 0.1 * torch.randn_like(x)
        for block in self.blocks:
            if torch.rand([]) < 0.0:
                continue
            x = block(x)
        logits = self.head(x)
        noise = torch.empty_like(logits).exponential_().log()
        shares = (logits - noise).softmax(-1)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss + shares.square().sum(-1).mean(), "logits": logits}


class _Quantises(torch.autograd.Function):
    """To whole steps between two bounds, with a gradient for numbers between them, and one for the step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: Tensor) -> Tensor:
        ctx.save_for_backward(x, step)
        return (x / step).round().clamp(-8, 7) * step

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, step = ctx.saved_tensors
        q = x / step
        inside = (q > -8) & (q < 7)
        of_step = torch.where(inside, q.round() - q, q.clamp(-8, 7))
        return gradient * inside, (gradient * of_step).sum().reshape(step.shape)


class _Reverses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -0.5 * gradient


class Quantised(nn.Module):
    """Layers of quantised weights and activations with learned steps, and a second loss that works against the first:
    each is an `autograd.Function` whose backward is not the derivative of its forward.
    """

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)
            self.steps = nn.Parameter(torch.tensor([0.05, 0.2]))

        def forward(self, x: Tensor) -> Tensor:
            weight, of_values = self.steps.chunk(2)
            y = F.linear(x, _Quantises.apply(self.up.weight, weight), self.up.bias).relu()
            return x + self.down(_Quantises.apply(y, of_values))

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(19, 16)
        self.blocks = nn.ModuleList(Quantised.Block() for _ in range(3))
        self.head, self.other = nn.Linear(16, 19), nn.Linear(16, 5)

    def forward(self, ids: Tensor, labels: Tensor) -> Results:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        others = self.other(_Reverses.apply(x))
        return {"loss": loss + F.cross_entropy(others.flatten(0, 1), (ids % 5).flatten()), "logits": logits}


ODD = {
    "fused attention": FusedAttention, "pooled": Pooled, "shared block": Shared, "gated": Gated, "towers": Towers,
    "remembers": Remembers, "drop path": Skips, "quantised": Quantised,
}  # fmt: skip
