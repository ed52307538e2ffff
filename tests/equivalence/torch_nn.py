"""torch.nn's own attention and transformers, as they come, between an embedding and a head."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.equivalence.zoo import Batch, masked

VOCABULARY, WIDTH, HEADS = 19, 16, 4
Results = dict[str, Tensor]


class _Tokens(nn.Module):
    """An embedding and a head; tokens from number 15 on are padding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def results(self, y: Tensor, labels: Tensor) -> Results:
        logits = self.head(y)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}

    def padding(self, ids: Tensor) -> Tensor:
        """True where a token is padding, as torch.nn has it; the first token of a sample never is."""
        return (ids >= 15) & (torch.arange(ids.shape[1], device=ids.device) > 0)


class Attends(_Tokens):
    """`nn.MultiheadAttention` alone, with a causal mask and a padding mask."""

    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.need_weights = need_weights
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, ids: Tensor, labels: Tensor) -> Results:
        x = self.tokens(ids)
        length = ids.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=ids.device).triu(1)
        y, shares = self.attention(
            x, x, x, key_padding_mask=self.padding(ids), attn_mask=mask, need_weights=self.need_weights
        )
        return self.results(x + y, labels) | ({"shares": shares} if self.need_weights else {})


class Encodes(_Tokens):
    """`nn.TransformerEncoder` with a padding mask."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 24, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Results:
        return self.results(self.encoder(self.tokens(ids), src_key_padding_mask=self.padding(ids)), labels)


class Translates(_Tokens):
    """`nn.Transformer`: an encoder of the tokens backwards, a causal decoder, attention between them."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.transformer = nn.Transformer(WIDTH, HEADS, 2, 2, 24, dropout=dropout, batch_first=True)

    def forward(self, ids: Tensor, labels: Tensor) -> Results:
        x = self.tokens(ids)
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device, dtype=x.dtype)
        return self.results(self.transformer(x.flip(1), x, tgt_mask=mask, tgt_is_causal=True), labels)


def _maker(kind: Callable[[], nn.Module]) -> Callable[[int], tuple[nn.Module, Batch]]:
    def make(size: int) -> tuple[nn.Module, Batch]:
        torch.manual_seed(6)
        return kind(), masked("ids", VOCABULARY, size)

    return make


TORCH_NN = {
    "nn.MultiheadAttention": _maker(lambda: Attends(need_weights=False)),
    "nn.MultiheadAttention with weights": _maker(lambda: Attends(need_weights=True)),
    "nn.TransformerEncoder": _maker(Encodes),
    "nn.Transformer": _maker(Translates),
    "nn.Transformer with dropout": _maker(lambda: Translates(0.1)),
}
"""The models of this file; each takes `ids` and `labels`, and returns a loss."""
