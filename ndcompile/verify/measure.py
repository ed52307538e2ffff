"""The distances of some training steps on a mesh from float64, beside those of one device in low precision."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ndcompile.mesh import MeshSpec
from ndcompile.program import Program
from ndcompile.verify.error_model import Measured
from ndcompile.verify.execute import result_layouts
from ndcompile.verify.places import norm, part
from ndcompile.verify.precise import precise
from ndcompile.verify.training import Results, Trained

ZERO = 1e-6
"""A gradient below this part of all of them is zero by mathematics."""

TINY = 1e-30


@dataclass(frozen=True)
class Local:
    """One rank's share of a `Measured`: how far its part of a tensor is away."""

    what: str
    dims: tuple[tuple[str, ...], ...]
    error: float
    rounding: float
    size: float
    least: float


@dataclass(frozen=True)
class Ruler:
    """Measures on a rank what the program's training there gave; `before` are the whole parameters that it began with.

    Gradients that are zero by mathematics are all rounding: they are left out, unless `exact` says that all is float64.
    """

    program: Program
    before: Mapping[str, Tensor]
    learning_rate: float
    exact: bool

    def steps(
        self, rank: int, mine: Sequence[Trained], exact: Sequence[Trained], low: Sequence[Trained]
    ) -> Iterator[Local]:
        """Results, gradients, their norm, what became of parameters and of written buffers, of every step."""
        for number, (a, b, c) in enumerate(zip(mine, exact, low, strict=True)):
            for row in self._step(rank, a, b, c):
                yield Local(f"step {number}: {row.what}", row.dims, row.error, row.rounding, row.size, row.least)

    def _step(self, rank: int, mine: Trained, exact: Trained, low: Trained) -> Iterator[Local]:
        for name, dims in result_dims(self.program, exact.results).items():
            y = exact.results[name]
            if y.is_floating_point():
                yield self._local(rank, name, dims, mine.results[name], y, low.results[name], TINY)
        yield from self.gradients(rank, mine.gradients, exact.gradients, low.gradients)
        yield self._local(rank, "gradient norm", (), mine.norm, exact.norm, low.norm, TINY)
        zero = self.zero(exact.gradients)
        for name in (n for n in exact.parameters if n not in zero):
            yield self._change(rank, name, mine.parameters[name], exact.parameters[name], low.parameters[name])
        for name in self.program.manifest.updates:
            y = exact.buffers[name]
            yield self._local(rank, f"buffer {name}", (), mine.buffers[name], y, low.buffers[name], TINY)

    def gradients(
        self, rank: int, mine: Mapping[str, Tensor], exact: Mapping[str, Tensor], low: Mapping[str, Tensor]
    ) -> Iterator[Local]:
        """Those of all parameters, also one that should have none."""
        total, zero = _total(exact), self.zero(exact)
        for name, g in exact.items():
            if name not in zero:
                dims = self.program.manifest.parameters[name].dims
                yield self._local(rank, f"gradient of {name}", dims, mine.get(name), g, low[name], ZERO * total)
        for name in sorted(mine.keys() - exact.keys()):
            yield Local(f"gradient of {name}, which has none", (), norm(mine[name]), 0.0, 0.0, 0.0)

    def _change(self, rank: int, name: str, mine: Tensor, exact: Tensor, low: Tensor) -> Local:
        """What the steps so far have done to a parameter: smaller than it, so that more shows."""
        before, dims = self.before[name].double(), self.program.manifest.parameters[name].dims
        own = mine.double() - part(before, dims, self.program.mesh, rank)
        least = max(self.learning_rate * exact.numel() ** 0.5, norm(before))
        return self._local(rank, f"change of {name}", dims, own, exact - before, low - before, least)

    def zero(self, exact: Mapping[str, Tensor]) -> set[str]:
        """The gradients that are zero by mathematics."""
        total = _total(exact)
        return set() if self.exact else {name for name, g in exact.items() if norm(g) <= ZERO * total}

    def _local(
        self, rank: int, what: str, dims: Any, mine: Tensor | None, exact: Tensor, low: Tensor, least: float
    ) -> Local:
        right = part(exact, dims, self.program.mesh, rank) if dims else exact
        fits = mine is not None and mine.shape == right.shape
        error = _apart(mine, right) if fits and mine is not None else float("inf")
        return Local(what, tuple(dims), error, _apart(low, exact), norm(exact), least)


def _apart(a: Tensor, b: Tensor) -> float:
    """‖a − b‖, in which equal infinities are 0 apart."""
    return float(torch.where(a == b, 0.0, precise(a) - precise(b)).norm())


def _total(gradients: Mapping[str, Tensor]) -> float:
    return float(sum(norm(g) ** 2 for g in gradients.values()) ** 0.5)


def result_dims(program: Program, results: Results) -> dict[str, Any]:
    """How each result that is a tensor lies."""
    layouts = zip(results, itertools.cycle(result_layouts(program)), strict=False)  # of each microbatch the same
    return {name: layout.dims for name, layout in layouts if layout is not None}


def assembled(everyone: Sequence[Sequence[Local]], mesh: MeshSpec) -> list[Measured]:
    """From what all ranks measured of their parts, in rank order: each tensor's error on the replica that is furthest.

    A part alone may be close to right by chance; the error model is about whole tensors.
    """
    return [_assembled(rows, mesh) for rows in zip(*everyone, strict=True)]


def _assembled(rows: Sequence[Local], mesh: MeshSpec) -> Measured:
    axes = [axis for axis in mesh.names if any(axis in dim for dim in rows[0].dims)]
    groups = mesh.groups(*axes) if axes else [[rank] for rank in range(len(rows))]
    errors = [sum(rows[rank].error ** 2 for rank in group) ** 0.5 for group in groups]
    worst = max(range(len(groups)), key=lambda i: (errors[i] != errors[i], errors[i]))
    row = rows[0]
    return Measured(row.what, errors[worst], row.rounding, row.size, row.least, groups[worst][0])
