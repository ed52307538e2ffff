"""Small whole numbers, without a modulus: sums and products are those of the integers, maxima are in their order.

What the prime field does not say: that nothing is a multiple of p away, and that maxima and comparisons go by size.
Quotients and nonlinear functions are random functions with small values. What is drawn is sparse, so that values stay
below 2⁵³, where float64 is exact in any order of summation. Where they grow beyond it (a norm does not norm here, so a
transformer of two blocks does) that is said, and nothing is claimed. Zeros hide more than random residues do: this goes
beside the field, not in its place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ndcompile.verify.domain import NotInDomain
from ndcompile.verify.field import Field, look_up, scrambled

EXACT = 2.0**53
TABLE = 1 << 16
VALUES = (-1.0, 1.0, 2.0)
"""What random functions give."""

CONSTANT = 2.0**20
"""The largest constant that is itself; others stand for a small number."""


class Integers(Field):
    """Whole numbers in float64, each op exact or said not to be."""

    name = "integers"
    optimizes = False

    def draw(self, shape: Sequence[int], positive: bool = False) -> Tensor:
        size = tuple(shape)
        x = torch.randint(1, 3, size, generator=self.generator).double()
        if positive:
            return x.to(self.device)
        signs = torch.randint(0, 2, size, generator=self.generator) * 2 - 1
        if len(size) < 2:
            return (x * signs).to(self.device)
        some = torch.rand(size, generator=self.generator) < 1.5 / max(1, size[-1])
        return (signs * some).double().to(self.device)

    def number(self, x: float | int | bool) -> float:
        """A constant: itself if it is whole and not large, else a small number that stands for it."""
        if isinstance(x, float) and not math.isfinite(x):
            return super().number(x)
        if x == int(x) and abs(x) <= CONSTANT:
            return float(x)
        return VALUES[scrambled(self.seed, "constant", x) % len(VALUES)]

    def encode(self, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        distinct, where = torch.unique(x.double(), return_inverse=True)
        numbers = torch.tensor([self.number(v) for v in distinct.tolist()], dtype=torch.float64, device=x.device)
        return numbers[where].view(x.shape)

    def mod(self, x: Tensor) -> Tensor:
        """The number itself, if it is exact."""
        finite = (x[x.isfinite()] if self.infinite else x).detach()
        if finite.numel() and not float(finite.abs().max()) < EXACT:
            raise NotInDomain("values grew beyond 2⁵³, where whole numbers in float64 are not exact")
        return x

    def inverse(self, x: Tensor | float) -> Tensor:
        x = x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64, device=self.device)
        return self.function("inverse", x)

    def function(self, name: Any, x: Tensor) -> Tensor:
        """A random function with small values, the same for the same name; of minus infinity it is 0."""
        if name not in self._functions:
            chance = torch.Generator().manual_seed(scrambled(self.seed, name))
            picked = torch.randint(0, len(VALUES), (TABLE,), generator=chance)
            self._functions[name] = torch.tensor(VALUES, dtype=torch.float64)[picked].to(self.device)
        finite = torch.where(x.isfinite(), x, 0.0)
        return torch.where(x.isfinite(), look_up(self._functions[name], finite.remainder(TABLE)), 0.0)

    def order(self, x: Tensor) -> Tensor:
        """The integers' own order."""
        return x
