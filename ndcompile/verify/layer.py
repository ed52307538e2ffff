"""One arithmetic: samples through the reference and the ranks, and what was found so far."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ndcompile.program import Program
from ndcompile.verify import rings
from ndcompile.verify.compare import Comparison, compare
from ndcompile.verify.domain import FAILURES, Domain, NotInDomain, ZeroDenominator
from ndcompile.verify.execute import on_one_device, on_ranks
from ndcompile.verify.localise import begins_at
from ndcompile.verify.sample import Sample, draw

ATTEMPTS = 20
"""How often a sample is drawn until chance brings no zero denominator."""


@dataclass(frozen=True)
class Subject:
    """What is run, with how many microbatches a step: `source`, or the program's own text, beside `model`'s graph."""

    program: Program
    model: nn.Module | None
    microbatches: int
    source: str | None
    device: torch.device | str = "cpu"


class Layer:
    """What one arithmetic found so far."""

    def __init__(self) -> None:
        self.comparison = Comparison()
        self.differences: list[str] = []
        self.begins = ""
        self.located = False
        """Whether it is known already where differences begin."""
        self.unknown = ""
        self.rings: dict[Any, rings.Ring] = {}
        self.ran = self.drawn_again = self.degree = 0
        self.seconds = 0.0

    @property
    def held(self) -> bool | None:
        if self.differences:
            return False
        return True if self.ran and not self.unknown else None

    def run(self, subject: Subject, kind: type[Domain], seed: int) -> None:
        """One sample; another one where chance brings a zero denominator."""
        begin = time.perf_counter()
        for attempt in range(ATTEMPTS):
            domain = kind(seed + 1000 * attempt, subject.device)
            sample = draw(subject.program, domain, subject.model, subject.microbatches)
            try:
                self._compare(subject, sample, domain)
            except ZeroDenominator:
                self.drawn_again += 1
                continue
            except NotInDomain as error:
                self.unknown = str(error)
            break
        else:
            self.differences.append(f"{ATTEMPTS} samples gave a zero denominator")
        self.seconds += time.perf_counter() - begin

    def _compare(self, subject: Subject, sample: Sample, domain: Domain) -> None:
        right = on_one_device(subject.program, sample, domain)
        self.degree = max(self.degree, getattr(domain, "degree", 0))
        try:
            with rings.met() as met:
                found = on_ranks(subject.program, sample, domain, subject.source)
            self.rings |= met
        except NotInDomain:
            raise
        except FAILURES as error:
            self.differences.append(f"the emitted text does not run: {type(error).__name__}: {error}")
            return
        comparison = compare(subject.program, sample, right, found, domain)
        self.comparison.join(comparison)
        self.differences += [str(d) for d in comparison.differences]
        if comparison.differences and not self.located:
            self.begins = begins_at(subject.program, sample, domain, subject.source, comparison.differences)
        self.ran += 1
