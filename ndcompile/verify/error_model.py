"""How far rounding may take a result: measured in what rounding does to the same model on one device.

    ‖parallel − float64‖ ≤ 4 · max(‖one device, low precision − float64‖, u · √depth · ‖float64‖)

The 4 and the distance are the same for every model. What is in floating point of 53 bits itself has the bar 1e-10.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

ALLOWED = 4.0
"""How much further from float64 than one device in low precision."""

EXACT = 1e-10
"""The bar of a comparison in float64, relative to the tensor's norm."""


def unit(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding to `dtype`: 2⁻⁸ for bfloat16, 2⁻²⁴ for float32."""
    return torch.finfo(dtype).eps / 2


def floor(rounding: float, size: float, depth: int, unit: float) -> float:
    """What rounding explains: the larger side of the model, without the factor of 4."""
    return max(rounding, unit * depth**0.5 * size)


@dataclass(frozen=True)
class Measured:
    """The norms of one tensor: `error` on the mesh and `rounding` on one device, each against float64, whose own norm
    is `size`. `least` is what a size is taken for at least where float64 is compared.
    """

    what: str
    error: float
    rounding: float
    size: float
    least: float = 0.0
    rank: int = 0


@dataclass(frozen=True)
class ErrorModel:
    """What a dtype and a depth (the number of blocks) let pass; float64 is measured by its own bar."""

    dtype: torch.dtype
    depth: int = 1

    def limit(self, of: Measured) -> float:
        """The largest error that is not rejected."""
        if self.dtype == torch.float64:
            return EXACT * max(of.size, of.least)
        return ALLOWED * floor(of.rounding, of.size, self.depth, unit(self.dtype))

    def ratio(self, of: Measured) -> float:
        """The error in units of what rounding explains (in float64: of the bar): up to 4 (1) is allowed."""
        limit, allowed = self.limit(of), 1.0 if self.dtype == torch.float64 else ALLOWED
        if math.isnan(of.error) or of.error == math.inf:
            return math.inf
        return allowed * of.error / limit if limit else (0.0 if of.error == 0 else math.inf)

    def rejected(self, found: Iterable[Measured]) -> list[Measured]:
        return [m for m in found if not m.error <= self.limit(m)]

    def worst(self, found: Sequence[Measured]) -> Measured:
        return max(found, key=self.ratio)

    def told(self, found: Iterable[Measured]) -> list[str]:
        """What is rejected, the worst first; of many the first five."""
        worst = sorted(self.rejected(found), key=self.ratio, reverse=True)
        more = [f"and {len(worst) - 5} more"] if len(worst) > 5 else []
        told = [f"{m.what} is {m.error:.2e} away on rank {m.rank}, {self.limit(m):.2e} is allowed" for m in worst[:5]]
        return told + more

    def evidence(self, found: Sequence[Measured]) -> list[str]:
        """The worst ratio and where; the smallest errors that would have been rejected, of the tightest tensor and of
        the loosest."""
        worst, count = self.worst(found), f"{len(found):,} tensors"
        where = f"{worst.what}, rank {worst.rank}"
        if self.dtype == torch.float64:
            return [f"{count}: the furthest is {self.ratio(worst) * EXACT:.1e} away ({where}); {EXACT:.0e} would fail"]
        some = [m for m in found if m.size]
        tight, loose = min(some, key=self.relative_limit), max(some, key=self.relative_limit)
        return [
            f"{count}: the largest error is {self.ratio(worst):.2f} times what rounding explains ({where}); "
            f"{ALLOWED:g} would fail",
            f"rejected would be an error of {self.relative_limit(tight):.1e} ({tight.what}) "
            f"to {self.relative_limit(loose):.1e} ({loose.what}) of a tensor",
        ]

    def relative_limit(self, of: Measured) -> float:
        """The smallest error that would have been rejected, relative to the tensor's norm."""
        return self.limit(of) / of.size if of.size else math.inf
