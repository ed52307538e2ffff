"""Contractions and reductions: rows that are to be there."""

from __future__ import annotations

import pytest

from ndcompile.errors import CompileError
from ndcompile.placement import P, R, S
from ndcompile.rules.rows import rows
from tests.rules.case import case, f


def test_a_bias_is_partial_where_the_contraction_is_sharded() -> None:
    found = rows(case("aten.addmm.default", f(4), f(6, 6), f(6, 4)).trial().signature, 2)
    assert [row.operands for row in found if row.factor == "k"] == [(P(), S(1), S(0))]


def test_a_bias_is_sharded_with_the_columns() -> None:
    found = rows(case("aten.addmm.default", f(4), f(6, 6), f(6, 4)).trial().signature, 2)
    assert [row.operands for row in found if row.output == S(1)] == [(S(0), R, S(1))]


def test_a_diagonal_has_no_rule() -> None:
    with pytest.raises(CompileError, match="einsum 'bii->bi' takes a diagonal"):
        case("aten.einsum.default", "bii->bi", [f(4, 6, 6)]).trial()
