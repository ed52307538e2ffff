"""Views: negative dims, and tensors without elements."""

from __future__ import annotations

from typing import Any

import pytest

from ndcompile.placement import S
from ndcompile.rules.rows import rows
from tests.rules.case import case, f


def test_a_negative_dim_is_whole_where_the_op_acts_along_it() -> None:
    for given in (
        case("aten.cumsum.default", f(6, 6), -1),
        case("aten.slice.Tensor", f(6, 6), -1, 1, 4),
        case("aten.cat.default", [f(6, 6), f(6, 6)], -1),
        case("aten.flip.default", f(6, 6), [-1]),
        case("aten.select.int", f(6, 6), -1, 0),
    ):
        shards = {row.operands[0] for row in rows(given.trial().signature, 2) if row.factor}
        assert shards == {S(0)}, f"{given} shards {shards}"


@pytest.mark.parametrize("op, args", [
    ("aten.flatten.using_ints", (f(0, 6, 5), 1)), ("aten.reshape.default", (f(4, 0), [4, 3, 0])),
    ("aten.unsqueeze.default", (f(5, 0), 1)), ("aten.squeeze.default", (f(0, 6, 1),)),
])  # fmt: skip
def test_a_tensor_without_elements_has_a_rule(op: str, args: tuple[Any, ...]) -> None:
    """Its sizes have no common factors: a division by zero once."""
    trial = case(op, *args).trial()
    assert any(row.factor for rows in trial.check(2) for row in rows)
    trial.check(2, 2)
