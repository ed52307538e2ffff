"""How many planted bugs verify finds: each mutant of a program's text is run, and put down to what saw it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table
from torch import nn

from ndcompile.program import Program
from ndcompile.verify import ATTEMPTS, FAILURES
from ndcompile.verify.arithmetic import AsWritten, Domain, Field, NotInDomain, ZeroDenominator
from ndcompile.verify.compare import compare
from ndcompile.verify.execute import Step, on_one_device, on_ranks
from ndcompile.verify.graph_mutants import GraphMutant, seen_by_types
from ndcompile.verify.lockstep import NeverWaitedFor, RanksDisagree
from ndcompile.verify.mutants import Mutant
from ndcompile.verify.sample import Sample, draw

VERDICTS = ("types", "does not run", "collectives", "field", "float64", "equivalent", "alive")
"""What saw a mutant, the first of these. `collectives`: the ranks' do not fit together, or are not waited for.
`equivalent`: nothing saw it, and with more samples and on other seeds the difference is exactly 0 as well; `alive`:
there it was not.
"""


@dataclass
class Trial:
    """A sample with the right answers."""

    domain: Domain
    sample: Sample
    right: list[Step]

    @classmethod
    def of(
        cls, program: Program, model: nn.Module | None, kind: Callable[[int], Domain], seed: int, **sizes: int
    ) -> Trial:
        for attempt in range(ATTEMPTS):
            domain = kind(seed + 1000 * attempt)
            sample = draw(program, domain, model, **sizes)
            try:
                return cls(domain, sample, on_one_device(program, sample, domain))
            except ZeroDenominator:
                continue
        raise NotInDomain(f"{ATTEMPTS} samples gave a zero denominator")

    def verdict(self, program: Program, source: str) -> str:
        """What sees the text on this sample; empty if all is equal."""
        try:
            found = on_ranks(program, self.sample, self.domain, source)
        except (RanksDisagree, NeverWaitedFor):
            return "collectives"
        except ZeroDenominator:
            return self.domain.name
        except FAILURES:
            return "does not run"
        return self.domain.name if compare(program, self.right, found, self.domain).differences else ""


@dataclass
class Judge:
    """Decides what sees a mutant of a program, which is to be one in float64 mode."""

    program: Program
    model: nn.Module | None = None
    trials: dict[str, list[Trial]] = field(default_factory=dict)

    def __call__(self, mutant: Mutant | GraphMutant) -> str:
        if isinstance(mutant, GraphMutant):
            return "types" if seen_by_types(mutant, self.program.mesh) else "alive"
        for stage in (self._quick, self._as_verify, self._float64):
            for trial in stage():
                seen = trial.verdict(self.program, mutant.source)
                if seen:
                    return {Field.name: "field", AsWritten.name: "float64"}.get(seen, seen)
        beyond = [trial.verdict(self.program, mutant.source) for trial in self._beyond()]
        return "alive" if any(beyond) else "equivalent"

    def _kept(self, name: str, make: Callable[[], list[Trial]]) -> list[Trial]:
        if name not in self.trials:
            self.trials[name] = make()
        return self.trials[name]

    def _trial(self, kind: Callable[[int], Domain], seed: int, **sizes: int) -> Trial:
        return Trial.of(self.program, self.model, kind, seed, **sizes)

    def _quick(self) -> list[Trial]:
        return self._kept("quick", lambda: [self._trial(Field, 0, microbatches=1, steps=1)])

    def _as_verify(self) -> list[Trial]:
        return self._kept("verify", lambda: [self._trial(Field, seed, microbatches=2, steps=2) for seed in (0, 1, 2)])

    def _float64(self) -> list[Trial]:
        return self._kept("float64", lambda: [self._trial(AsWritten, 0, microbatches=2, steps=2)])

    def _beyond(self) -> list[Trial]:
        return self._kept(
            "beyond", lambda: [self._trial(Field, 10 + t, microbatches=1, steps=1, times=t) for t in (2, 3)]
        )


@dataclass
class Score:
    """Verdicts by operator, and the mutants that no layer saw."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    unseen: list[tuple[Mutant | GraphMutant, str]] = field(default_factory=list)

    def add(self, mutant: Mutant | GraphMutant, verdict: str) -> None:
        self.counts.setdefault(mutant.operator, Counter())[verdict] += 1
        if verdict in ("equivalent", "alive"):
            self.unseen.append((mutant, verdict))

    @property
    def total(self) -> Counter[str]:
        return sum(self.counts.values(), Counter[str]())

    @property
    def score(self) -> float:
        """The share of the mutants, but for equivalent ones, that verify sees."""
        total = self.total
        alive, other = total["alive"], sum(total.values()) - total["equivalent"]
        return 1.0 if not other else 1 - alive / other

    def table(self) -> Table:
        """For the terminal."""
        table = Table(title="mutants", caption=f"{self.score:.1%} of those that are not equivalent were seen")
        table.add_column("operator")
        for name in ("sites", *VERDICTS):
            table.add_column(name, justify="right")
        *rows, total = self.rows()
        for row in rows:
            table.add_row(*(str(value) if value else "–" for value in row))
        table.add_section()
        table.add_row(*map(str, total))
        return table

    def rows(self) -> list[Sequence[Any]]:
        """A row an operator, and one for all: sites, and how many each verdict has."""
        listed = [*self.counts.items(), ("all", self.total)]
        return [(operator, sum(found.values()), *(found[v] for v in VERDICTS)) for operator, found in listed]


def score(judge: Judge, mutants: Iterable[Mutant | GraphMutant]) -> Score:
    found = Score()
    for mutant in mutants:
        found.add(mutant, judge(mutant))
    return found
