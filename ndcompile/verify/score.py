"""How many planted bugs verify finds: each mutant of a program's text is run, and put down to what saw it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rich.table import Table
from torch import nn

from ndcompile.program import Program
from ndcompile.verify import rings
from ndcompile.verify.compare import Terms, compare, results_differ, terms_of
from ndcompile.verify.domain import FAILURES, AsWritten, Domain, NotInDomain, ZeroDenominator
from ndcompile.verify.execute import Step, on_one_device, on_ranks
from ndcompile.verify.field import Field
from ndcompile.verify.graph_mutants import GraphMutant, seen_by_types
from ndcompile.verify.layer import ATTEMPTS
from ndcompile.verify.lockstep import NeverWaitedFor, RanksDisagree
from ndcompile.verify.mutants import Mutant
from ndcompile.verify.numbered import Graph, Known, Numbered
from ndcompile.verify.sample import Sample, draw

SEEN = ("types", "does not run", "collectives", "field", "float64")
UNSEEN = ("equivalent", "not said", "too long", "alive")
VERDICTS = (*SEEN, *UNSEEN)
"""What saw a mutant, the first of these. `collectives`: the ranks' do not fit together, or are not waited for.
`equivalent`: nothing saw it, and with more samples and on other seeds the difference is exactly 0 as well; `alive`:
there it was not. `not said`: nothing saw it, and the prime field has no meaning for an op of its program. `too long`:
it was given up (by who runs many, not here).
"""


@dataclass
class Trial:
    """A sample with the right answers."""

    domain: Domain
    sample: Sample
    right: list[Step]
    terms: Terms

    @classmethod
    def of(
        cls, program: Program, model: nn.Module | None, kind: Callable[[int], Domain], seed: int, **sizes: int
    ) -> Trial:
        for attempt in range(ATTEMPTS):
            domain = kind(seed + 1000 * attempt)
            sample = draw(program, domain, model, **sizes)
            try:
                right = on_one_device(program, sample, domain)
                return cls(domain, sample, right, terms_of(program, sample, domain))
            except ZeroDenominator:
                continue
        raise NotInDomain(f"{ATTEMPTS} samples gave a zero denominator")

    def numbered(self, known: Known | None = None) -> Numbered:
        """For a run on this sample."""
        return Numbered(self.domain, self.sample.named(), known)

    def verdict(self, program: Program, source: str, numbered: Numbered | None = None) -> str:
        """What sees the text on this sample; empty if all is equal, or an op has no meaning in this arithmetic.

        It is run as far as the first result that is wrong.
        """

        def look(rank: int, number: int, found: Sequence[Any]) -> None:
            if results_differ(program, self.right[0].results[number], found, rank, self.domain):
                raise _Seen

        try:
            found = on_ranks(program, self.sample, self.domain, source, look, numbered)
        except (RanksDisagree, NeverWaitedFor):
            return "collectives"
        except (ZeroDenominator, _Seen):
            return self.domain.name
        except NotInDomain:
            return ""
        except FAILURES:
            return "does not run"
        if numbered is not None:
            numbered.end([[(s.results, s.gradients, s.norm, s.parameters) for s in steps] for steps in found])
        compared = compare(program, self.sample, self.right, found, self.domain, terms=self.terms)
        return self.domain.name if compared.differences else ""


class _Seen(Exception):
    """A result is wrong: the rest need not run."""


@dataclass
class Judge:
    """Decides what sees a mutant of a program, which is to be one in float64 mode."""

    program: Program
    model: nn.Module | None = None
    trials: dict[str, list[Trial]] = field(default_factory=dict)

    def __call__(self, mutant: Mutant | GraphMutant) -> str:
        if isinstance(mutant, GraphMutant):
            return "types" if seen_by_types(mutant, self.program.mesh) else "alive"
        seen = self._seen_at_once(mutant.source)
        if seen or not self.exact:
            return seen or "not said"
        if not self._seen(mutant.source, "more samples"):
            return "equivalent"
        return self._seen(mutant.source, "more seeds") or "alive"

    @cached_property
    def exact(self) -> bool:
        """Whether the prime field has a meaning for all ops of the program."""
        try:
            return bool(self._of("quick"))
        except NotInDomain:
            return False

    def _seen_at_once(self, source: str) -> str:
        """What sees a text on the samples from the cheapest. On those where it computes the right one's graph, that is
        what sees the right one.
        """
        if not self.exact:
            return self._seen(source, "float64")
        (quick,) = self._of("quick")
        numbered = quick.numbered(self._right_graph.known)
        if seen := quick.verdict(self.program, source, numbered):
            return TOLD.get(seen, seen)
        right = self._where_right(source, numbered.graph)
        return next(filter(None, (self._right[n] if n in right else self._seen(source, n) for n in LATER)), "")

    @cached_property
    def _right_graph(self) -> Graph:
        (quick,) = self._of("quick")
        numbered = quick.numbered()
        quick.verdict(self.program, str(self.program), numbered)
        return numbered.graph

    @cached_property
    def _right(self) -> dict[str, str]:
        """What sees the right text."""
        return {name: self._seen(str(self.program), name) for name in LATER}

    def _where_right(self, source: str, found: Graph) -> tuple[str, ...]:
        """Where a text computes the right one's graph if it does so on `quick`: on samples of its sizes.

        In the field a ring is another text.
        """
        right = self._right_graph
        if found.ends is None or found.ends != right.ends or found.depends or right.depends or rings.CALLED in source:
            return ()
        return LATER[:1] if found.casts or right.casts else LATER

    def _seen(self, source: str, name: str) -> str:
        seen = next(filter(None, (trial.verdict(self.program, source) for trial in self._of(name))), "")
        return TOLD.get(seen, seen)

    def _of(self, name: str) -> list[Trial]:
        """The samples of that name, which are drawn once."""
        if name not in self.trials:
            kind = AsWritten if name == "float64" else Field
            self.trials[name] = [Trial.of(self.program, self.model, kind, **sizes) for sizes in SAMPLES[name]]
        return self.trials[name]


TOLD = {Field.name: "field", AsWritten.name: "float64"}
"""The verdict of each arithmetic."""

SAMPLES: dict[str, list[dict[str, int]]] = {
    "quick": [dict(seed=0, microbatches=1, steps=1)],
    "verify": [dict(seed=0, microbatches=2, steps=2)],
    "float64": [dict(seed=0, microbatches=2, steps=2)],
    "more samples": [dict(seed=10 + times, microbatches=1, steps=1, times=times) for times in (2, 3)],
    "more seeds": [dict(seed=seed, microbatches=2, steps=2) for seed in (1, 2)],
}
"""What a mutant runs on, from the cheapest. `verify` and `more seeds` are what `nd.verify` runs; `more samples` only
tells an equivalent from one that is alive.
"""


LATER = ("verify", "float64")
"""What a text that `quick` does not see runs on."""


@dataclass
class Score:
    """Verdicts by operator, and the mutants that no layer saw."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    unseen: list[tuple[Mutant | GraphMutant, str]] = field(default_factory=list)

    def add(self, mutant: Mutant | GraphMutant, verdict: str) -> None:
        self.counts.setdefault(mutant.operator, Counter())[verdict] += 1
        if verdict in UNSEEN:
            self.unseen.append((mutant, verdict))

    @property
    def total(self) -> Counter[str]:
        return sum(self.counts.values(), Counter[str]())

    @property
    def score(self) -> float:
        """The share that verify sees, of the mutants that are not equivalent and of which something can be said."""
        seen, alive = (sum(self.total[v] for v in verdicts) for verdicts in (SEEN, ("too long", "alive")))
        return seen / (seen + alive) if seen + alive else 1.0

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
