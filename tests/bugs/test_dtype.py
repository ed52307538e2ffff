"""Section K of docs/bugs.md: in which dtype gradients are added."""

from __future__ import annotations

import torch

import ndcompile as nd
from ndcompile.duties import duties
from tests.bugs.models import Experts, batch
from tests.bugs.planted import situation


def test_every_gradient_is_added_in_the_dtype_that_was_asked_for() -> None:
    """Those of tables too; and the duty table says so, a row a parameter and axis."""
    precision = nd.Precision(compute=torch.bfloat16, reduce=torch.float32)
    program = nd.compile(Experts(), "dp_shard=2", batch(), precision=precision)
    due = {d.parameter: d for d in duties(program.folded, program.mesh)}
    assert due.keys() == program.parameters.keys()
    assert {(d.reductions, d.dtype) for d in due.values()} == {(("reduce_scatter",), torch.float32)} | {
        (d.reductions, torch.float32) for d in due.values() if d.reductions == ("all_reduce",)
    }


def test_a_sum_in_half_precision_is_seen() -> None:
    """Not by the field, where a cast changes nothing, but in float64."""
    found = situation(Experts, batch, "dp_shard=2")
    found.assert_equal()
    right = "all_reduce_invariant(ratio, dp_shard)"
    assert found.seen_by(right, right.replace("(ratio", "(wrong.low(ratio)")) == "float64"
