"""Plant every bug in every rule, and count what the tries of rules see; a log that a later run goes on with.

python -m tests.rules.mutation LOG.jsonl --seconds 3600 --jobs 32    the rules that the log lacks, then the table
python -m tests.rules.mutation LOG.jsonl --seconds 0                 the table
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ndcompile.rules.notation import RuleError
from ndcompile.rules.registry import RULES
from ndcompile.rules.trial import Rows, Trial
from ndcompile.verify.rule_mutants import RuleMutant, derivation_mutants, rule_mutants
from tests.rules.search import Row, rows, run
from tests.rules.tries import Try, each

TRIES, BEYOND, ROWS = 40, 150, 60
"""Calls on which a bug is to be seen, those that tell an equivalent from one alive, rows of each."""

SEVERAL = tuple(
    "aten.linear.default aten.div.Tensor aten.where.self aten.embedding.default runtime.cross_entropy "
    "aten.cumsum.default aten.scaled_dot_product_attention.default aten.reshape.default aten.amax.default".split()
)
"""Rules in which every operator finds a site."""

SEEN = ("value", "gradient", "does not run")
VERDICTS = (*SEEN, "no other row", "rows that hold", "alive")
"""What is wrong where the bug is seen. Else `no other row`: the rule offers none that the right one lacks, on any call;
`rows that hold`: it does, and on all of many more calls they hold, so that it is no bug; `alive`: there they do not.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--rules", nargs="*", default=["", *RULES])
    given = parser.parse_args()
    known = {row["op"] for row in rows(given.log)}
    run(given.log, one, iter([(rule,) for rule in given.rules if rule not in known]), given.seconds, given.jobs)
    raise SystemExit(show(rows(given.log)))


def one(rule: str) -> list[Row]:
    """All bugs of a rule; of "" those in how rows follow from rules, which any rule may show."""
    tried = drawn(rule) if rule else [each_try for name in SEVERAL for each_try in drawn(name)]
    found = rule_mutants(rule, (t.trial().signature for t in tried), True) if rule else derivation_mutants()
    beyond = [] if not rule else drawn(rule, BEYOND, start=TRIES)
    judged = [(mutant, verdict(mutant, tried, beyond)) for mutant in found]
    return [dict(operator=m.operator, op=m.op, site=m.site, verdict=seen, why=why) for m, (seen, why) in judged]


def drawn(rule: str, count: int = TRIES, start: int = 0) -> list[Try]:
    """Tries of a rule; on tensors without elements nothing is wrong, whatever the row."""
    found: list[Try] = []
    each(rule, count, found.append, start)
    return [tried for tried in found if not tried.call.empty]


def verdict(mutant: RuleMutant, tried: Iterable[Try], beyond: Iterable[Try]) -> tuple[str, str]:
    """What becomes of a bug, and on which call, or by which row."""
    offers = ""
    for one_try in tried:
        seen, why = look(mutant, one_try)
        if seen in SEEN:
            return seen, why
        offers = offers or why
    if not offers:
        return "no other row", ""
    for one_try in beyond:
        seen, why = look(mutant, one_try)
        if seen in SEEN:
            return "alive", why
    return "rows that hold", offers


def look(mutant: RuleMutant, tried: Try) -> tuple[str, str]:
    """What is wrong with the rows that the bug adds; else a row that holds, if it adds one."""
    known = offered(tried.trial(), tried.ways)
    try:
        with mutant.planted():
            more = [rows for key, rows in offered(tried.trial(), tried.ways).items() if key not in known]
            if more:
                tried.check(ROWS, more)
    except RuleError as error:
        seen = "gradient" if "the gradient of" in str(error) or "no gradient" in str(error) else "value"
        return "does not run" if "fails on the parts" in str(error) else seen, f"{tried.call}: {error}"
    except Exception as error:  # a rule that makes anything fail is seen
        return "does not run", f"{tried.call}: {type(error).__name__}: {error}"
    return "", f"{tried.call}: {' and then '.join(map(str, more[0]))}" if more else ""


def offered(trial: Trial, ways: Sequence[int]) -> dict[object, Rows]:
    """The combinations of rows, by their placements and by what of the op is done with an algorithm of its own."""
    done = trial.signature.masked, trial.signature.special
    return {(done, *((row.operands, row.output) for row in rows)): rows for rows in trial.combinations(*ways)}


def show(found: Sequence[Row]) -> int:
    """The table, what was not seen, and the exit status."""
    console = Console(width=150)
    for row in found:
        if row["verdict"] not in SEEN:
            console.print(*(row[key] for key in ("verdict", "operator", "op", "site", "why")), sep="   ", markup=False)
    console.print(table(found))
    return int(any(row["verdict"] == "alive" for row in found))


def table(found: Sequence[Row]) -> Table:
    counts = Counter((row["operator"], row["verdict"]) for row in found)
    shown = Table(title="bugs in rules", caption=f"{score(found):.1%} of those that are bugs were seen")
    for name in ("operator", "sites", *VERDICTS):
        shown.add_column(name, justify="left" if name == "operator" else "right")
    operators = dict.fromkeys(row["operator"] for row in found)
    for operator in operators:
        line = [counts[operator, v] for v in VERDICTS]
        shown.add_row(operator, *(str(n) if n else "–" for n in (sum(line), *line)))
    shown.add_section()
    shown.add_row("all", str(len(found)), *(str(sum(counts[o, v] for o in operators)) for v in VERDICTS))
    return shown


def score(found: Sequence[Row]) -> float:
    """The share of the bugs that are seen; a rule that offers no wrong row is no bug."""
    seen, alive = (sum(row["verdict"] in verdicts for row in found) for verdicts in (SEEN, ("alive",)))
    return seen / (seen + alive) if seen + alive else 1.0


if __name__ == "__main__":
    main()
