"""Small integer inputs that tell masks apart: padding, packed documents, positions, ids."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Draw = Callable[[int, Sequence[int], torch.Generator], Tensor]
"""From a length, the numbers worth trying and a generator to a row of integers."""


def _integers(n: int, low: int, high: int, g: torch.Generator) -> Tensor:
    return torch.randint(low, high, (n,), generator=g)


def _length(n: int, g: torch.Generator) -> int:
    return int(_integers(1, 0, n + 1, g))


def _documents(n: int, g: torch.Generator) -> Tensor:
    """Ids 0, 1, 2, … of documents of random lengths, many of length 1."""
    return (torch.rand(n, generator=g) < 0.4).cumsum(0)


def _positions(n: int, g: torch.Generator) -> Tensor:
    """Positions in those documents: they restart."""
    ids = _documents(n, g)
    place = torch.arange(n)
    start = torch.where(ids != ids.roll(1), place, 0).cummax(0).values
    return place - start


ROWS: dict[str, Draw] = {
    "all padding": lambda n, pool, g: torch.zeros(n, dtype=torch.long),
    "no padding": lambda n, pool, g: torch.ones(n, dtype=torch.long),
    "padding on the left": lambda n, pool, g: (torch.arange(n) >= _length(n, g)).long(),
    "padding on the right": lambda n, pool, g: (torch.arange(n) < _length(n, g)).long(),
    "padding anywhere": lambda n, pool, g: _integers(n, 0, 2, g),
    "positions": lambda n, pool, g: torch.arange(n),
    "positions that restart": lambda n, pool, g: _positions(n, g),
    "positions that fall": lambda n, pool, g: torch.arange(n).flip(0),
    "documents": lambda n, pool, g: _documents(n, g),
    "documents, padded": lambda n, pool, g: (_documents(n, g) + 1) * (torch.arange(n) < _length(n, g)),
    "documents that return": lambda n, pool, g: _integers(n, 0, 3, g),
    "numbers of the graph": lambda n, pool, g: torch.tensor(pool)[_integers(n, 0, len(pool), g)],
    "few numbers of the graph": lambda n, pool, g: torch.tensor(pool)[_integers(n, 0, len(pool), g)]
    * _integers(n, 0, 2, g),
}  # fmt: skip
"""What a row may be."""


def draw(shape: Sequence[int], dtype: torch.dtype, pool: Sequence[int], shift: int, g: torch.Generator) -> Tensor:
    """An integer or bool tensor: row i of dim 0 is of the kind `i + shift`; a single number a row is anything there."""
    kinds = list(ROWS.values())
    if not shape:
        return kinds[-2](1, pool, g)[0].to(dtype)
    width = math.prod(shape[1:])
    if len(shape) == 1:
        drawn = _integers(shape[0], 0, max(pool) + 2, g)
    else:
        drawn = torch.stack([kinds[(i + shift) % len(kinds)](width, pool, g) for i in range(shape[0])])
    return (drawn.reshape(*shape) != 0) if dtype == torch.bool else drawn.reshape(*shape).to(dtype)
