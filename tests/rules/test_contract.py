"""Contractions and reductions: each rule's rows, split against whole."""

from __future__ import annotations

import pytest

from ndcompile.errors import CompileError
from ndcompile.placement import P, R, S
from ndcompile.rules.rows import rows
from ndcompile.size import Size
from tests.rules.case import Case, bools, case, each, every_row_holds, f, ints

B = Size(12, ("b",))

CASES: list[Case] = [
    case("aten.mm.default", f(12, 6), f(6, 5)),
    case("aten.mm.default", f(5, 7), f(7, 12)),
    case("aten.mm.default", f(1, 6), f(6, 4)),
    case("aten.bmm.default", f(4, 5, 6), f(4, 6, 12)),
    case("aten.matmul.default", f(6), f(6)),
    case("aten.matmul.default", f(5, 6), f(6)),
    case("aten.matmul.default", f(6), f(6, 5)),
    case("aten.matmul.default", f(6), f(4, 6, 5)),
    case("aten.matmul.default", f(4, 5, 6), f(6)),
    case("aten.matmul.default", f(4, 5, 6), f(6, 12)),
    case("aten.matmul.default", f(1, 3, 5, 6), f(4, 1, 6, 2)),
    case("aten.matmul.default", f(5, 6), f(4, 6, 3)),
    case("aten.matmul.default", f(B, 6), f(6, 5)),
    case("aten.addmm.default", f(5), f(12, 6), f(6, 5)),
    case("aten.addmm.default", f(12), f(5, 7), f(7, 12), beta=2, alpha=3),
    case("aten.addmm.default", f(12, 5), f(12, 6), f(6, 5)),
    case("aten.addmm.default", f(12, 1), f(12, 6), f(6, 5)),
    case("aten.addmm.default", f(), f(4, 6), f(6, 5)),
    case("aten.baddbmm.default", f(4, 5, 12), f(4, 5, 6), f(4, 6, 12)),
    case("aten.baddbmm.default", f(4, 1, 12), f(4, 5, 6), f(4, 6, 12), beta=2, alpha=3),
    case("aten.baddbmm.default", f(12), f(4, 5, 6), f(4, 6, 12)),
    case("aten.linear.default", f(4, 5, 6), f(12, 6)),
    case("aten.linear.default", f(4, 5, 6), f(12, 6), f(12)),
    case("aten.linear.default", f(6), f(5, 6), f(5)),
    case("aten.linear.default", f(B, 5), f(7, 5), f(7)),
    case("aten.sum.default", f(6, 5)),
    case("aten.sum.default", ints(6, 5, high=9)),
    case("aten.sum.default", bools(12)),
    case("aten.sum.default", f()),
    case("aten.sum.default", f(B, 5)),
    case("aten.sum.dim_IntList", f(4, 6, 5), [-1]),
    case("aten.sum.dim_IntList", f(4, 6, 5), [0, -2], True),
    case("aten.sum.dim_IntList", f(4, 6), []),
    case("aten.sum.dim_IntList", f(4, 6), None),
    case("aten.sum.dim_IntList", f(12, 1, 5), [1]),
    case("aten.mean.default", f(6, 5)),
    case("aten.mean.dim", f(4, 6, 5), [-1], True),
    case("aten.mean.dim", f(4, 6, 5), [0, 2]),
    case("aten.amax.default", f(4, 6, 5), [-1]),
    case("aten.amax.default", f(6, 5)),
    case("aten.amin.default", f(4, 6, 5), [1], True),
    case("aten.max.default", f(6, 5)),
    case("aten.argmax.default", f(6, 5)),
    case("aten.argmax.default", f(6, 5), -1),
    case("aten.var.correction", f(4, 6, 5), [-1], correction=0, keepdim=True),
    case("aten.var.correction", f(6, 5)),
    case("aten.prod.default", f(6, 5)),
    case("aten.prod.dim_int", f(6, 5), -1),
    case("aten.logsumexp.default", f(4, 6, 5), [-1]),
    case("aten.linalg_vector_norm.default", f(6, 5)),
    case("aten.linalg_vector_norm.default", f(4, 6, 5), 2.0, [1], True),
    case("aten.einsum.default", "bsh, enh -> bsen", [f(2, 6, 5), f(4, 3, 5)]),
    case("aten.einsum.default", "...i,ji", [f(4, 6, 5), f(12, 5)]),
    case("aten.einsum.default", "bq,bk,qkv->bv", [f(6, 4), f(6, 5), f(4, 5, 2)]),
    case("aten.einsum.default", "ij->i", [f(6, 12)]),
    case("aten.any.default", bools(6, 5)),
    case("aten.all.default", bools(6, 5)),
]


@each(CASES)
def test_rows_hold(given: Case) -> None:
    every_row_holds(given)


def test_a_bias_is_partial_where_the_contraction_is_sharded() -> None:
    found = rows(case("aten.addmm.default", f(4), f(6, 6), f(6, 4)).trial().signature, 2)
    assert [row.operands for row in found if row.factor == "k"] == [(P(), S(1), S(0))]


def test_a_bias_is_sharded_with_the_columns() -> None:
    found = rows(case("aten.addmm.default", f(4), f(6, 6), f(6, 4)).trial().signature, 2)
    assert [row.operands for row in found if row.output == S(1)] == [(S(0), R, S(1))]


def test_a_diagonal_has_no_rule() -> None:
    with pytest.raises(CompileError, match="einsum 'bii->bi' takes a diagonal"):
        case("aten.einsum.default", "bii->bi", [f(4, 6, 6)]).trial()
