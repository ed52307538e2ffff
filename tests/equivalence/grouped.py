"""Models whose keys and values have fewer heads than queries: repeated by expand, or shared inside attention."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEAD_DIM, VOCABULARY = 16, 4, 24
Results = dict[str, Tensor]


class Grouped(nn.Module):
    """Two layers of attention in which groups of queries share keys and values, and a head over the vocabulary."""

    def __init__(self, queries: int, keys: int, repeat: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(queries, keys, repeat, dropout) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Results:
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Layer(nn.Module):
    """A norm, attention with biases, a residual; `repeat` repeats keys and values before attention."""

    def __init__(self, queries: int, keys: int, repeat: bool, dropout: float) -> None:
        super().__init__()
        self.keys, self.repeat, self.dropout = keys, repeat, dropout
        self.norm = nn.LayerNorm(WIDTH)
        self.q = nn.Linear(WIDTH, queries * HEAD_DIM)
        self.k = nn.Linear(WIDTH, keys * HEAD_DIM)
        self.v = nn.Linear(WIDTH, keys * HEAD_DIM)
        self.out = nn.Linear(queries * HEAD_DIM, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (made(y).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for made in (self.q, self.k, self.v))
        if self.repeat:
            k, v = (t[:, :, None].expand(-1, -1, q.size(1) // self.keys, -1, -1).flatten(1, 2) for t in (k, v))
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True, enable_gqa=not self.repeat)
        return x + self.out(y.transpose(1, 2).flatten(2))


GROUPED: dict[str, Callable[[], nn.Module]] = {
    "8 heads, 2 of keys, repeated": lambda: Grouped(8, 2, repeat=True),
    "8 heads, 2 of keys, shared": lambda: Grouped(8, 2, repeat=False),
    "8 heads, 2 of keys, shared, dropout": lambda: Grouped(8, 2, repeat=False, dropout=0.1),
    "8 heads, 1 of keys, repeated": lambda: Grouped(8, 1, repeat=True),
    "8 heads, 1 of keys, shared": lambda: Grouped(8, 1, repeat=False),
    "6 heads, 3 of keys, shared": lambda: Grouped(6, 3, repeat=False),
}
