"""What the ranks found against what one device found: results, every gradient, its norm, every parameter after."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ndcompile.program import Program
from ndcompile.verify import cancelling
from ndcompile.verify.domain import Domain
from ndcompile.verify.execute import LEARNING_RATE, Step, result, result_layouts
from ndcompile.verify.places import norm, part
from ndcompile.verify.sample import Sample

BAR = {True: 0.0, False: 1e-10}
"""The largest distance, in an exact arithmetic and in float64."""

OF_TERMS = 1e-14
"""In float64, the largest distance of what is further away than that, as a part of the terms that cancel in it: 90
times the rounding of one number.
"""


@dataclass(frozen=True)
class Difference:
    """A tensor that is not what it must be, on the first rank where it is not; one device has no rank."""

    what: str
    rank: int | None
    distance: float

    def __str__(self) -> str:
        far = "another value" if math.isinf(self.distance) else f"{self.distance:.1e} away"
        return f"{self.what}: {far}" + ("" if self.rank is None else f" on rank {self.rank}")


@dataclass
class Comparison:
    """How many tensors and elements were compared, the largest distance, and what is too far; of `cancelled` the
    distances as parts of their terms.
    """

    tensors: int = 0
    elements: int = 0
    worst: float = 0.0
    worst_what: str = ""
    differences: list[Difference] = field(default_factory=list)
    cancelled: dict[str, float] = field(default_factory=dict)

    def join(self, other: Comparison) -> None:
        self.tensors += other.tensors
        self.elements += other.elements
        self.differences += other.differences
        self.cancelled |= other.cancelled
        if other.worst > self.worst:
            self.worst, self.worst_what = other.worst, other.worst_what

    def cancel(self, what: str, part_of_terms: float) -> None:
        self.cancelled[what] = max(part_of_terms, self.cancelled.get(what, 0.0))

    def add(self, what: str, rank: int | None, distance: float, elements: int, bar: float) -> None:
        self.tensors += 1
        self.elements += elements
        if distance > self.worst:
            self.worst, self.worst_what = distance, what
        if not distance <= bar and what not in {d.what for d in self.differences}:
            self.differences.append(Difference(what, rank, distance))


Terms = Callable[[float], Mapping[str, float]]
"""How large what cancels is in each tensor, by its name, as a part of `cancelling.PARTS` shows it; measured when first
asked for.
"""


def terms_of(program: Program, sample: Sample, domain: Domain) -> Terms:
    return cache(lambda part: cancelling.terms_of(program, sample, domain, part))


class Whole:
    """One device holds all."""

    rank: int | None = None

    def results(self, found: Sequence[Any]) -> Iterator[Any]:
        return iter(found)

    def parameter(self, name: str, whole: Tensor) -> Tensor:
        return whole


@dataclass
class OnRank(Whole):
    """What a rank of the program's mesh holds."""

    program: Program
    rank: int

    def results(self, found: Sequence[Any]) -> Iterator[Any]:
        mesh = self.program.mesh
        for y, layout in zip(found, result_layouts(self.program), strict=True):
            yield y if layout is None or not isinstance(y, Tensor) else part(y, layout.dims, mesh, self.rank)

    def parameter(self, name: str, whole: Tensor) -> Tensor:
        return part(whole, self.program.manifest.parameters[name].dims, self.program.mesh, self.rank)


def compare(
    program: Program, sample: Sample, right: Sequence[Step], found: Sequence[Sequence[Step]], domain: Domain,
    first: int = 0, terms: Terms | None = None,
) -> Comparison:  # fmt: skip
    """All steps on all ranks, or on those from `first` on that are given. Who compares often may give `terms_of`."""
    holders = [(OnRank(program, rank), steps) for rank, steps in enumerate(found, first)]
    return _compare(right, holders, domain, terms or terms_of(program, sample, domain))


def compare_wholes(
    program: Program, sample: Sample, right: Sequence[Step], found: Sequence[Step], domain: Domain
) -> Comparison:
    """All steps of two that each run on one device."""
    return _compare(right, [(Whole(), found)], domain, terms_of(program, sample, domain))


def _compare(
    right: Sequence[Step], found: Sequence[tuple[Whole, Sequence[Step]]], domain: Domain, terms: Terms
) -> Comparison:
    comparison, bar = Comparison(), BAR[domain.exact]
    for number, step in enumerate(right):
        for holder, steps in found:
            for name, mine, theirs, least in _pairs(step, steps[number], holder, domain):
                what = f"step {number}: {name}"
                distance, elements = _distance(mine, theirs, least, domain)
                if bar < distance < math.inf:
                    off = norm(mine - theirs)
                    size = next((size for size in _sizes(terms, what) if off <= OF_TERMS * size), None)
                    if size is not None:
                        comparison.cancel(what, off / size)
                        distance = 0.0
                comparison.add(what, holder.rank, distance, elements, bar)
    return comparison


def _sizes(terms: Terms, what: str) -> Iterator[float]:
    """The size of what cancels in a tensor, as each part shows it."""
    return (terms(part).get(what, 0.0) for part in cancelling.PARTS)


def results_differ(program: Program, right: Sequence[Any], found: Sequence[Any], rank: int, domain: Domain) -> bool:
    """Whether a result of one microbatch is too far from what it must be on this rank."""
    pairs = zip(found, OnRank(program, rank).results(right), strict=True)
    return any(not _distance(mine, whole, 1e-30, domain)[0] <= BAR[domain.exact] for mine, whole in pairs)


def _pairs(right: Step, found: Step, holder: Whole, domain: Domain) -> Iterator[tuple[str, Any, Any, float]]:
    """(what, the holder's tensor, what it must be, the least norm that a distance is measured by)."""
    norms = {} if domain.exact else right.norms
    for number, (theirs, mine) in enumerate(zip(right.results, found.results, strict=True)):
        for i, whole in enumerate(holder.results(theirs)):
            yield result(number, i), mine[i], whole, 1e-30
    total = norms.get("gradient norm", 0.0)
    for name, gradient in right.gradients.items():
        expected, what = None if gradient is None else holder.parameter(name, gradient), f"gradient of {name}"
        yield what, found.gradients[name], expected, max(norms.get(what, 0.0), 1e-6 * total, 1e-30)
    yield "gradient norm", found.norm, right.norm, 1e-30
    for name, parameter in right.parameters.items():
        what = f"{name} after it"
        least = max(LEARNING_RATE * parameter.numel() ** 0.5, norms.get(what, 0.0))
        yield what, found.parameters[name], holder.parameter(name, parameter), least


def _distance(mine: Any, theirs: Any, least: float, domain: Domain) -> tuple[float, int]:
    if isinstance(theirs, Tensor) and isinstance(mine, Tensor):
        if mine.shape != theirs.shape or mine.is_floating_point() != theirs.is_floating_point():
            return math.inf, theirs.numel()
        if not theirs.is_floating_point():
            return (0.0 if torch.equal(mine, theirs) else math.inf), theirs.numel()
        return domain.distance(mine, theirs, least), theirs.numel()
    return (0.0 if mine is theirs or (not isinstance(mine, Tensor) and mine == theirs) else math.inf), 1
