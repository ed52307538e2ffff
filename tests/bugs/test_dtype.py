"""Section K of docs/bugs.md: in which dtype gradients are added."""

from __future__ import annotations

import torch

import ndcompile as nd
from ndcompile.duties import duties
from tests.bugs.models import Tied, batch
from tests.bugs.planted import situation


def test_every_gradient_is_added_in_the_dtype_that_was_asked_for() -> None:
    """Those of tables too; and the duty table says so, a row a parameter and axis."""
    for dtype in (torch.float32, torch.bfloat16):
        precision = nd.Precision(compute=torch.bfloat16, reduce=dtype)
        program = nd.compile(Tied(), "dp_shard=2", batch(), precision=precision)
        due = {d.parameter: d for d in duties(program.folded, program.mesh)}
        assert due.keys() == program.parameters.keys()
        assert all(len(d.reductions) == 1 and d.dtype == dtype for d in due.values())


def test_a_sum_in_half_precision_is_seen() -> None:
    """Not by the field, where a cast changes nothing, but in float64."""
    found = situation(Tied, batch, "dp_shard=2")
    found.assert_equal()
    right = "all_reduce_invariant(loss, dp_shard)"
    assert found.seen_by(right, right.replace("(loss", "(wrong.low(loss)")) == "float64"
