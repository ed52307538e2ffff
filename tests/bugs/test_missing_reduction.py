"""Section A of docs/bugs.md: a collective that is missing, a gradient that is not summed."""

from __future__ import annotations

import re

import pytest

from tests.bugs.models import LATENT_WHOLE, ROUTER, Experts, Latent, batch
from tests.bugs.planted import situation

UNSUMMED = {
    "A1": (Experts, "tp=2", (), "last.weight", "last"),
    "A2": (Experts, "dp_shard=2, tp=2", ROUTER, "router.weight", "router"),
    "A3": (Experts, "tp=2", (), "norm.weight", "norm"),
    "A4": (Experts, "tp=2", (), "norm.bias", "norm_bias"),
    "A5": (Experts, "dp_shard=2, tp=2", ROUTER, "router.weight", "router"),
    "A10, shared gate": (Experts, "tp=2", (), "gate.weight", "gate"),
    "A10, latent": (Latent, "tp=2", LATENT_WHOLE, "kv_a.weight", "kv_a"),
    "A14": (Experts, "dp_replicate=2, tp=2", (), "up", "up"),
    "A18": (Experts, "tp=2", (), "last.bias", "last_bias"),
}
"""Row: a parameter that every rank holds, of which each sees a part of the tokens, of the heads or of the batch, and
its name in the text."""


@pytest.mark.parametrize("row", UNSUMMED)
def test_a_gradient_that_nobody_sums(row: str) -> None:
    model, mesh, pins, parameter, name = UNSUMMED[row]
    found = situation(model, batch, mesh, pins=pins)
    found.assert_equal()
    assert "but it is" in found.types_say("parameter's way is dropped", found.way(parameter))
    line = found.line(f"{name}=weight(")
    assert found.seen_by(line, re.sub(r", reduce=\(.*,\)", "", line)) == "field"


UNREDUCED = {
    "A6": ("tp=2", (), "norm", "all_gather(tokens, tp, dim=2)", "runtime.all_gather_invariant(tokens, tp, dim=2)"),
    "A7": (
        "dp_shard=2, tp=2",
        ROUTER,
        "norm",
        "all_gather(tokens, tp, dim=2)",
        "all_gather(tokens, tp, dim=2).detach()",
    ),
    "A12": ("tp=2", (), "head", "all_gather(last, tp, dim=1)", "runtime.all_gather_invariant(last, tp, dim=1)"),
}
"""Row: a value that is gathered for a module whose ranks each give a part of its gradient."""


@pytest.mark.parametrize("row", UNREDUCED)
def test_a_gradient_of_a_value_that_is_not_reduced(row: str) -> None:
    mesh, pins, module, right, wrong = UNREDUCED[row]
    found = situation(Experts, batch, mesh, pins=pins)
    found.assert_equal()
    at = f"= runtime.all_gather   {module}"
    assert "takes" in found.types_say("a conversion is another of the same forward", at)
    assert found.seen_by(right, wrong) == "field"


def test_a_sum_that_is_cut_but_not_reduced() -> None:
    found = situation(Experts, batch, "tp=2")
    assert "but it is 'tp P'" in found.types_say("a conversion is dropped", "= runtime.reduce_scatter   last")
    right = "reduce_scatter(tokens, tp, dim=1)"
    assert found.seen_by(right, "wrong.shard_of_sum_of_one(tokens, tp, dim=1)") == "field"


def test_a_loss_whose_gradient_is_lost() -> None:
    """The balancing loss is right, and teaches the router nothing."""
    found = situation(Experts, batch, "tp=2")
    assert found.seen_by("total = softmax.sum((0, 1))", "total = softmax.detach().sum((0, 1))") == "field"
