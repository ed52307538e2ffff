"""Routing: rows that are to be there, and calls that have no rule."""

from __future__ import annotations

import pytest

from ndcompile.errors import CompileError
from ndcompile.placement import P, R, S
from ndcompile.rules.rows import rows
from tests.rules.case import Case, case, f, ints
from tests.rules.tries import in_field


def test_experts_shard_rows_and_both_widths_but_never_the_experts() -> None:
    given = case("runtime.grouped_linear", f(12, 6), f(4, 8, 6), ints(12, high=4)).trial().signature
    found = {row.operands: row.output for row in rows(given, 2, grads=[True, True, False]) if row.factor}
    assert found == {(S(0), R, S(0)): S(0), (S(1), S(2), R): P(), (R, S(1), R): S(1)}


def test_a_count_of_sharded_elements_is_partial_and_a_partial_value_cannot_be_counted() -> None:
    given = case("runtime.histogram", f(12), 3, 0.0, 1.0).trial().signature
    assert {(row.operands, row.output) for row in rows(given, 2) if P() in (*row.operands, row.output)} == {
        ((S(0),), P())
    }


def test_what_is_scattered_from_shards_is_partial_where_it_is_added_to_zeros_without_a_gradient() -> None:
    given = case("aten.scatter_add.default", f(5), 0, ints(12, high=5), f(12)).trial().signature
    found = [row for row in rows(given, 2, grads=[False, False, False]) if row.factor]
    assert [(row.operands, row.output) for row in found] == [((P(), S(0), S(0)), P())]


def test_a_repetition_that_states_its_size_has_no_rule() -> None:
    with pytest.raises(CompileError, match="counts the elements of all ranks"):
        case("aten.repeat_interleave.self_int", f(4), 2, 0, output_size=8).trial()


def test_an_index_that_is_shorter_than_what_it_scatters_has_no_rule() -> None:
    with pytest.raises(CompileError, match="shorter than its source has no rule"):
        case("aten.scatter.src", f(6, 8), 0, ints(1, 4, high=6), f(1, 8)).trial()


@pytest.mark.parametrize("size, ways", [(1, (2,)), (2, (2, 2))])
def test_repetitions_are_whole(size: int, ways: tuple[int, ...]) -> None:
    """They were sharded where the dim was of size 1, or full."""
    trial = case("aten.repeat_interleave.self_int", f(size, 6), 4, 0).trial()
    assert all(row.factor != "n" for rows in trial.check(*ways) for row in rows)


@pytest.mark.parametrize("given", [
    case("aten.argsort.default", f(4, 6), 0, True),
    case("aten.index_put.default", f(6, 4), [ints(3, high=6), None], f(3, 4), True),
], ids=str)  # fmt: skip
def test_what_the_field_did_otherwise(given: Case) -> None:
    """It sorted along the last dim whatever dim was given by position, and failed where a dim has no index."""
    assert any(row.factor for rows in given.trial(in_field()).check(2) for row in rows)
