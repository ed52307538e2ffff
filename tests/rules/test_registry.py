"""Every registered rule is tried on drawn calls, and none without a description of its calls."""

from __future__ import annotations

import pytest

from ndcompile.rules.registry import RULES
from tests.rules.calls import CALLS, pointwise
from tests.rules.sequences import hold
from tests.rules.tries import Try, each, search

WHOLE = {
    "runtime.fold",
    "runtime.literal",
    *(
        f"aten.{name}.default"
        for name in "mean max min argmax argmin median prod any all trace eye linspace logspace tril_indices "
        "triu_indices".split()
    ),
    "aten.norm.Scalar",
    "aten.eye.m",
    *(
        f"aten.{name}_window.{overload}"
        for name in ("hann", "hamming", "blackman")
        for overload in ("default", "periodic")
    ),
}
"""Rules that let no dim be sharded."""

OF_SEQUENCES = [
    f"aten.{name}"
    for name in "reshape.default linear.default add.Tensor sum.dim_IntList transpose.int expand.default cumsum.default "
    "embedding.default index_select.default where.self stack.default".split()
]


@pytest.mark.parametrize("rule", RULES)
def test_rows_hold(rule: str) -> None:
    count = 3 if rule in pointwise.CALLS else 6  # few lines of rules are those of a hundred ops there
    assert ("S" in search(rule, count).kinds) == (rule not in WHOLE)


def test_all_drawn_calls_are_of_rules() -> None:
    assert set(CALLS) - set(RULES) == set()


@pytest.mark.parametrize("rule", OF_SEQUENCES)
def test_rows_that_shard_a_sequence_hold(rule: str) -> None:
    """Head–tail, also in a dim that joins it with the batch."""
    held = 0

    def add(tried: Try) -> None:
        nonlocal held
        held += hold(tried, 2)

    each(rule, 30, add, start=100)
    assert held > 0
