"""Every registered rule is tried on drawn calls, and none without a description of its calls."""

from __future__ import annotations

import pytest

from ndcompile.rules.registry import RULES
from tests.rules.calls import CALLS
from tests.rules.tries import search

WHOLE = {
    "runtime.fold",
    "runtime.literal",
    *(f"aten.{name}.default" for name in "mean max argmax prod any all".split()),
}
"""Rules that let no dim be sharded."""


@pytest.mark.parametrize("rule", RULES)
def test_rows_hold(rule: str) -> None:
    assert ("S" in search(rule, 6).kinds) == (rule not in WHOLE)


def test_all_drawn_calls_are_of_rules() -> None:
    assert set(CALLS) - set(RULES) == set()
