"""Routing: sorted, picked, counted, and rows that choose their matrix, each rule's rows split against whole."""

from __future__ import annotations

import pytest

from ndcompile.errors import CompileError
from ndcompile.placement import P, R, S
from ndcompile.rules.rows import rows
from ndcompile.size import Size
from tests.rules.case import Case, case, each, every_row_holds, f, ints

B = Size(12, ("b",))

CASES: list[Case] = [
    case("aten.topk.default", f(12, 7), 3),
    case("aten.topk.default", f(B, 6, 5), 2, 1),
    case("aten.sort.default", f(6, 5)),
    case("aten.sort.default", f(6, 5, 4), 0, True),
    case("aten.sort.stable", ints(12, 7, high=4), stable=True),
    case("aten.argsort.default", f(12, 5), -1),
    case("aten.argsort.stable", ints(6, 8, high=3), stable=True, dim=0),
    case("aten.max.dim", f(12, 5), -1),
    case("aten.min.dim", f(4, 6, 5), 1, True),
    case("aten.scatter_add.default", f(5, 12), 0, ints(6, 12, high=5), f(6, 12)),
    case("aten.scatter_add.default", f(5), 0, ints(12, high=5), f(12)),
    case("aten.scatter_add.default", f(6, 8), -1, ints(6, 4, high=8), f(6, 4)),
    case("aten.scatter_add.default", f(6, 8), 1, ints(4, 12, high=8), f(4, 12)),
    case("aten.scatter.src", f(12, 8), 1, ints(12, 1, high=8), f(12, 1)),
    case("aten.scatter.src", f(6, 8), 0, ints(1, 4, high=6), f(1, 4)),
    case("aten.scatter.value", f(12, 8), -1, ints(12, 3, high=8), 0.5),
    case("aten.index_add.default", f(5, 12), 0, ints(6, high=5), f(6, 12)),
    case("aten.index_add.default", f(4, 7, 6), -2, ints(12, high=7), f(4, 12, 6)),
    case("aten.index_select.default", f(5, 12), 0, ints(6, high=5)),
    case("aten.index_select.default", f(6, 5, 4), -2, ints(12, high=5)),
    case("aten.one_hot.default", ints(B, 5, high=4), 4),
    case("runtime.histogram", ints(12, 4, high=5), 5, 0, 5),
    case("runtime.histogram", f(7), 3, -1.0, 1.0),
    case("aten.repeat_interleave.self_int", f(12, 5), 2, 0),
    case("aten.repeat_interleave.self_int", f(4, 6, 5), 3, -2),
    case("aten.repeat_interleave.self_int", f(12), 2),
    case("aten.repeat_interleave.self_int", f(4, 6), 1),
    case("runtime.grouped_linear", f(12, 6), f(4, 8, 6), ints(12, high=4)),
    case("runtime.grouped_linear", f(7, 5), f(3, 5, 7), ints(7, high=3), True),
]


@each(CASES)
def test_rows_hold(given: Case) -> None:
    every_row_holds(given)


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
