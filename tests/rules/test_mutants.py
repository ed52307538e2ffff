"""Bugs planted in rules are seen: by the calls on which all rules are tried, and by `verify` in a program."""

from __future__ import annotations

import random
from functools import cache

import pytest

from ndcompile.verify.rule_mutants import IN_A_RULE, NEGATIVE, RuleMutant, derivation_mutants, rule_mutants
from tests.rules.mutation import SEEN, SEVERAL, drawn, verdict
from tests.rules.tries import Try

CALLS = {"aten.reshape.default": 60, "aten.scaled_dot_product_attention.default": 30}
"""Where a bug needs more of them to be seen: it shows in few shapes."""

HOLD = {
    ("partial values accepted by a nonlinear op", "aten.scaled_dot_product_attention.default", "operand 2"),
    ("a whole dim sharded", "aten.scaled_dot_product_attention.default", "e"),
}
"""No bugs: attention is linear in its values, and may be sharded along their width."""


@cache
def tried(rule: str) -> list[Try]:
    return drawn(rule, CALLS.get(rule, 10))


def sample() -> list[RuleMutant]:
    """Of each operator two sites, drawn with a fixed seed from rules in which all operators apply."""
    found = [m for rule in SEVERAL for m in rule_mutants(rule, (t.trial().signature for t in tried(rule)), True)]
    by_operator = {operator: [m for m in found if m.operator == operator] for operator in [*IN_A_RULE, NEGATIVE]}
    choose = random.Random(0)
    return [m for several in by_operator.values() for m in choose.sample(several, min(len(several), 2))]


def test_every_operator_applies_somewhere_and_is_seen() -> None:
    planted = sample()
    assert {m.operator for m in planted} == {*IN_A_RULE, NEGATIVE}
    verdicts = {m: verdict(m, tried(m.op), []) for m in planted}
    held = {m: why for m, (seen, why) in verdicts.items() if seen == "rows that hold"}
    assert {(m.operator, m.op, m.site) for m in held} <= HOLD, held
    assert sum(seen in SEEN for seen, _ in verdicts.values()) > len(verdicts) / 2


@pytest.mark.parametrize("mutant", derivation_mutants(), ids=str)
def test_a_bug_in_how_rows_follow_is_seen(mutant: RuleMutant) -> None:
    seen, why = verdict(mutant, (each for rule in SEVERAL for each in tried(rule)), [])
    assert seen in SEEN, (seen, why)
