"""The smallest models that have the situations of the reports: each takes `ids` and `labels`, and returns a loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ndcompile as nd

Results = dict[str, Tensor]
VOCABULARY, WIDTH = 22, 12


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batch(size: int = 4, length: int = 8) -> Results:
    """Tokens of which sample i masks its first 2 i labels: ranks have unequally many."""
    ids = torch.randint(VOCABULARY, (size, length), generator=torch.Generator().manual_seed(1))
    labels = ids.roll(-1, 1)
    for i in range(size):
        labels[i, : 2 * i] = -100
    return {"ids": ids, "labels": labels}


class Experts(nn.Module):
    """Norms, a router, experts of which each token takes a mixture, a gated shared expert, a balancing loss."""

    def __init__(self, experts: int = 4, hidden: int = 8, by_sample: bool = False) -> None:
        super().__init__()
        self.by_sample = by_sample
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, WIDTH, hidden) / 4)
        self.down = nn.Parameter(torch.randn(experts, hidden, WIDTH) / 4)
        self.gate = nn.Linear(WIDTH, 1, bias=False)
        self.shared = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))
        self.last = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Results:
        x = self.tokens(ids)
        h = self.norm(x)
        scores = self.router(h).softmax(-1)
        each = torch.einsum("besh,ehw->besw", F.gelu(torch.einsum("bsw,ewh->besh", h, self.up)), self.down)
        x = x + torch.einsum("besw,bse->bsw", each, scores) + self.gate(h).sigmoid() * self.shared(h)
        logits = self.head(self.last(x))
        use = scores.mean(1) if self.by_sample else scores.mean((0, 1))
        balance = use.square().sum(-1).mean()
        return {"loss": cross_entropy(logits, labels) + 0.1 * balance, "balance": balance, "logits": logits}


ROUTER = (("router.weight", nd.I),)
"""Every rank has the whole router."""


class Latent(nn.Module):
    """Attention whose queries and keys come from small shared vectors; a part of the keys is one for all heads."""

    def __init__(self, heads: int = 4, rank: int = 6, each: int = 4) -> None:
        super().__init__()
        self.heads, self.rank, self.each = heads, rank, each
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.q_a = nn.Linear(WIDTH, rank, bias=False)
        self.q_b = nn.Linear(rank, heads * 2 * each, bias=False)
        self.kv_a = nn.Linear(WIDTH, rank + each, bias=False)
        self.kv_b = nn.Linear(rank, heads * 2 * each, bias=False)
        self.out = nn.Linear(heads * each, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Results:
        (b, s), each = ids.shape, self.each
        x = self.tokens(ids)
        h = self.norm(x)
        q = self.q_b(self.q_a(h)).view(b, s, self.heads, 2 * each).transpose(1, 2)
        small, common = self.kv_a(h).split([self.rank, each], -1)
        k, v = self.kv_b(small).view(b, s, self.heads, 2 * each).transpose(1, 2).split(each, -1)
        k = torch.cat([k, common.unsqueeze(1).expand(b, self.heads, s, each)], -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits = self.head(x + self.out(y.transpose(1, 2).flatten(2)))
        return {"loss": cross_entropy(logits, labels), "logits": logits}


LATENT_WHOLE = (("q_a.weight", nd.I), ("kv_a.weight", nd.I))
"""Every rank computes the small vectors, for the heads of its own."""


class Tied(nn.Module):
    """Tokens to logits with one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Results:
        logits = self.head(self.norm(self.tokens(ids)))
        return {"loss": cross_entropy(logits, labels), "logits": logits}


class Fused(Tied):
    """And between the two uses of the matrix a gated layer, whose gate and values are one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * 10)
        self.down = nn.Linear(10, WIDTH)

    def forward(self, ids: Tensor, labels: Tensor) -> Results:
        x = self.tokens(ids)
        gate, values = self.up(self.norm(x)).split(10, -1)
        logits = self.head(x + self.down(F.silu(gate) * values))
        return {"loss": cross_entropy(logits, labels), "logits": logits}


class Padded(nn.Module):
    """Padding is kept out of the residual and of a router's statistics, which are a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, real: Tensor, labels: Tensor) -> Results:
        x = self.norm(self.tokens(ids)) * real.unsqueeze(-1)
        scores = self.router(x).softmax(-1) * real.unsqueeze(-1)
        balance = (scores.sum((0, 1)) / real.sum()).square().sum()
        logits = self.head(x + self.mlp(x))
        return {"loss": cross_entropy(logits, labels) + 0.1 * balance, "balance": balance, "logits": logits}


def padded() -> Results:
    """The last 3 − i tokens of sample i are padding."""
    given = batch()
    real = torch.ones(4, 8)
    for i in range(4):
        real[i, 5 + i :] = 0.0
    return {"ids": given["ids"], "real": real, "labels": given["labels"]}


class Documents(nn.Module):
    """A balancing loss by document, of several in a row, on what each token's router says."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, which: Tensor, labels: Tensor) -> Results:
        """`which` [b, s] is the document of each token: 0 or 1."""
        x = self.norm(self.tokens(ids))
        scores = self.router(x).softmax(-1)
        member = (which.unsqueeze(-1) == torch.arange(2)).to(scores.dtype)
        use = torch.einsum("bse,bsd->bde", scores, member) / (1 + member.sum(1).unsqueeze(-1))
        balance = use.square().sum(-1).mean()
        logits = self.head(x)
        return {"loss": cross_entropy(logits, labels) + 0.1 * balance, "balance": balance, "logits": logits}


SEQUENCE = (("norm", nd.S(1)), ("router", nd.S(1)))
"""The sequence lies on tp."""


def documents() -> Results:
    which = (torch.arange(8) >= torch.tensor([[3], [4], [5], [6]])).long()
    return batch() | {"which": which}
