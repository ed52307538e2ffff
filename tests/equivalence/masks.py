"""Models under named masks: sliding windows, padding on either side, packed documents, several at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.equivalence.hf import maker
from tests.equivalence.zoo import Batch, llama

LENGTH = 8
LENGTHS = (8, 5, 1, 7, 3, 8, 2, 6)
"""How many tokens of each sample are no padding."""


def _padded(batch: Batch, place: Tensor) -> Batch:
    mask = torch.stack([place < n for n in LENGTHS])[: len(batch["labels"])]
    return batch | {"attention_mask": mask.long(), "labels": batch["labels"].masked_fill(~mask, -100)}


def _left(batch: Batch) -> Batch:
    return _padded(batch, torch.arange(LENGTH).flip(0))


def _right(batch: Batch) -> Batch:
    return _padded(batch, torch.arange(LENGTH))


def _packed(batch: Batch) -> Batch:
    """Positions restart: each sample is cut at another place, one of them into documents of one token."""
    rows = [[*range(n), *range(LENGTH - n)] for n in LENGTHS]
    rows[2] = [0] * LENGTH
    return batch | {"position_ids": torch.tensor(rows)[: len(batch["labels"])]}


Maker = Callable[[int], tuple[nn.Module, Batch]]


def _with(maker: Maker, change: Callable[[Batch], Batch]) -> Maker:
    def make(size: int) -> tuple[nn.Module, Batch]:
        model, batch = maker(size)
        return model, change(batch)

    return make


class Attending(nn.Module):
    """One attention layer under a mask that is made from an id of a document for each token; 0 is padding."""

    def __init__(self, mask: Callable[[Tensor], Tensor], dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(19, 16), nn.Linear(16, 19)
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.mask, self.dropout = mask, dropout

    def forward(self, ids: Tensor, documents: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.tokens(ids)
        q, k, v = (f(x).unflatten(-1, (4, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        p = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, self.mask(documents), p)
        logits = self.head(out.transpose(1, 2).flatten(2))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def places(documents: Tensor) -> tuple[Tensor, Tensor]:
    at = torch.arange(documents.shape[1], device=documents.device)
    return at[:, None], at[None, :]


def windowed_documents(documents: Tensor) -> Tensor:
    """Causal, within a window, within a document, and none of the padding: rows of padding see nothing."""
    q, k = places(documents)
    same = documents[:, :, None] == documents[:, None, :]
    return ((q >= k) & (q - k < 3) & same & (documents != 0)[:, None, :])[:, None]


def chunks(documents: Tensor) -> Tensor:
    q, k = places(documents)
    return (q >= k) & (q // 3 == k // 3)


def prefix(documents: Tensor) -> Tensor:
    """All see the tokens of document 1, and what is before."""
    q, k = places(documents)
    return ((q >= k) | (documents == 1)[:, None, :])[:, None]


def unnamed(documents: Tensor) -> Tensor:
    """Every other key, in two heads of four."""
    q, k = places(documents)
    heads = torch.arange(4, device=documents.device)[:, None, None]
    return ((q - k) % 2 == 0) | (heads < 2)


def _attending(mask: Callable[[Tensor], Tensor], dropout: float = 0.0) -> Maker:
    def make(size: int) -> tuple[nn.Module, Batch]:
        torch.manual_seed(6)
        ids = torch.randint(19, (size, LENGTH))
        documents = torch.randint(3, (size, LENGTH)).sort(1, descending=True).values
        return Attending(mask, dropout), {"ids": ids, "documents": documents, "labels": ids.roll(1, 1)}

    return make


class FromBuffer(nn.Module):
    """Two blocks of attention, causal by a buffer of 32 tokens: by torch's op, or written out."""

    def __init__(self, written_out: bool) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(19, 16), nn.Linear(16, 19)
        self.blocks = nn.ModuleList(FromBufferBlock(written_out) for _ in range(2))

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class FromBufferBlock(nn.Module):
    mask: Tensor

    def __init__(self, written_out: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.register_buffer("mask", torch.ones(32, 32).tril().view(1, 1, 32, 32))
        self.written_out = written_out

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (4, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        length = x.shape[1]
        mask = self.mask[:, :, :length, :length]
        if self.written_out:
            scores = (q @ k.transpose(-2, -1) / 2).masked_fill(mask == 0, -torch.inf)
            given = scores.softmax(-1) @ v
        else:
            given = F.scaled_dot_product_attention(q, k, v, mask != 0)
        return x + self.out(given.transpose(1, 2).flatten(2))


def _from_buffer(written_out: bool) -> Maker:
    def make(size: int) -> tuple[nn.Module, Batch]:
        torch.manual_seed(7)
        ids = torch.randint(19, (size, LENGTH))
        return FromBuffer(written_out), {"ids": ids, "labels": ids.roll(1, 1)}

    return make


MASKED: dict[str, Maker] = {
    "Llama, padded left": _with(llama, _left),
    "Llama, padded right": _with(llama, _right),
    "Llama, packed": _with(llama, _packed),
    "Mistral, padded left": _with(maker("Mistral"), _left),
    "Mistral, packed": _with(maker("Mistral"), _packed),
    "GPT-2 with dropout, padded left": _with(maker("GPT-2 with dropout"), _left),
    "windowed documents": _attending(windowed_documents),
    "windowed documents with dropout": _attending(windowed_documents, 0.2),
    "chunks": _attending(chunks),
    "prefix": _attending(prefix),
    "unnamed mask": _attending(unnamed),
    "mask from a buffer": _from_buffer(written_out=False),
    "attention written out": _from_buffer(written_out=True),
}
