"""Real text that every machine has: the source of Python's standard library, as bytes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ndcompile.demo.model import IGNORED
from ndcompile.mesh import MeshSpec

END_OF_TEXT = 256
LINE_END = ord("\n")
MOST_BYTES = 2_000_000


@cache
def standard_library() -> Tensor:
    """The files `*.py` of Python's library folder in name order, each closed by an end of text: int64 [bytes]."""
    tokens: list[int] = []
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        if len(tokens) > MOST_BYTES:
            break
        tokens += [*path.read_bytes(), END_OF_TEXT]
    return torch.tensor(tokens)


@dataclass(frozen=True)
class Batch:
    ids: Tensor
    labels: Tensor


def global_batch(step: int, sequences: int, context: int, seed: int) -> Batch:
    """The same batch for the same step and seed, on every rank and on one device: int64 [sequences, context].

    Not scored are the torn line at a window's start, and what follows an end of text, which is another file. So rows,
    and with them ranks, have unequal numbers of labels: a loss that averaged ranks instead of tokens would show.
    """
    text = standard_library()
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(text) - context, (sequences, 1), generator=generator)
    ids = text[starts + torch.arange(context)]
    torn = _seen_before(ids, LINE_END) == 0
    other_file = _seen_before(ids, END_OF_TEXT) > 0
    return Batch(ids, ids.masked_fill(torn | other_file, IGNORED))


def _seen_before(ids: Tensor, token: int) -> Tensor:
    """How often `token` stands to the left of each position, in its row."""
    here = (ids == token).long()
    return here.cumsum(1) - here


def own_part(batch: Batch, mesh: MeshSpec, rank: int) -> Batch:
    """The rows of this rank: ranks that differ on a data axis take different ones, the others the same."""
    place = mesh.coordinate(rank)
    parts, index = 1, 0
    for axis in mesh.of_kind("dp_replicate", "dp_shard"):
        parts, index = parts * mesh.size(axis), index * mesh.size(axis) + place[axis]
    return Batch(batch.ids.chunk(parts)[index], batch.labels.chunk(parts)[index])
