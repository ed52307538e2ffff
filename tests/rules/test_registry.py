"""Every registered rule is tried."""

from __future__ import annotations

from ndcompile.rules.registry import RULES
from tests.rules import test_contract, test_layers, test_pointwise, test_routing, test_views


def test_every_rule_has_a_case() -> None:
    cases = [*test_pointwise.CASES, *test_contract.CASES, *test_views.CASES, *test_layers.CASES, *test_routing.CASES]
    tried = {given.op for given in cases}
    assert set(RULES) - tried == set()
    assert tried - set(RULES) == set()
