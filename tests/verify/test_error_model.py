"""What rounding explains is let pass, four times of it; what is more is rejected, and so is what is no number."""

from __future__ import annotations

import math

import pytest
import torch

import ndcompile as nd
from ndcompile.verify.error_model import ErrorModel, Measured, unit
from ndcompile.verify.measure import Local, Ruler, assembled
from tests.models import Mlp, seeded


def test_an_error_is_measured_by_the_rounding_of_one_device() -> None:
    model = ErrorModel(torch.bfloat16, depth=4)
    assert unit(torch.bfloat16) * 2 * 100 == 0.78125
    rounds_little = Measured("loss", error=3.1, rounding=0.5, size=100.0)
    assert model.limit(rounds_little) == 3.125 and not model.rejected([rounds_little])
    assert model.rejected([Measured("loss", 3.13, 0.5, 100.0)])
    rounds_much = Measured("gradient", error=7.9, rounding=2.0, size=100.0)
    assert not model.rejected([rounds_much]) and model.ratio(rounds_much) == 3.95
    assert model.worst([rounds_little, rounds_much]) == Measured("loss", 3.1, 0.5, 100.0)
    assert model.relative_limit(rounds_much) == 0.08


@pytest.mark.parametrize("error", [math.nan, math.inf])
def test_what_is_no_number_is_rejected(error: float) -> None:
    wrong = Measured("loss", error, 0.5, 100.0)
    assert ErrorModel(torch.bfloat16).rejected([wrong]) and ErrorModel(torch.bfloat16).ratio(wrong) == math.inf


def test_what_should_be_zero_and_is_not_is_rejected() -> None:
    assert ErrorModel(torch.float32).rejected([Measured("a gradient, which has none", 1e-12, 0.0, 0.0)])
    assert not ErrorModel(torch.float32).rejected([Measured("a frozen parameter", 0.0, 0.0, 0.0)])


def test_float64_has_a_bar_of_its_own() -> None:
    model = ErrorModel(torch.float64)
    assert not model.rejected([Measured("w", 0.9e-10, 0.0, 1.0)]) and model.rejected([Measured("w", 1.1e-10, 0.0, 1.0)])
    assert not model.rejected([Measured("key bias", 0.9e-10, 0.0, 1e-20, least=1.0)])


def test_parts_are_put_together_and_the_worst_replica_counts() -> None:
    mesh = nd.MeshSpec.parse("dp_replicate=2, tp=2")

    def share(error: float) -> list[Local]:
        return [Local("w", (("tp",),), error, 1.0, 10.0, 0.0)]

    (found,) = assembled([share(0.0), share(1.0), share(3.0), share(4.0)], mesh)
    assert (found.error, found.rank) == (5.0, 2)
    (broken,) = assembled([share(0.0), share(math.nan), share(3.0), share(4.0)], mesh)
    assert math.isnan(broken.error) and broken.rank == 0


def test_a_gradient_that_is_zero_by_mathematics_is_named_and_one_that_must_not_be_is_found() -> None:
    program = nd.compile(seeded(Mlp), "tp=2", torch.zeros(4, 12))
    exact = {"up.weight": torch.ones(20, 12).double(), "up.bias": torch.full((20,), 1e-9).double()}
    ruler = Ruler(program, {}, 1e-2, exact=False)
    assert ruler.zero(exact) == {"up.bias"}
    mine = {"up.weight": torch.ones(10, 12), "up.bias": torch.zeros(10), "down.bias": torch.ones(12)}
    rows = list(ruler.gradients(0, mine, exact, exact))
    assert [(row.what, row.error) for row in rows] == [
        ("gradient of up.weight", 0.0), ("gradient of down.bias, which has none", 12**0.5),
    ]  # fmt: skip
    assert [row.error for row in ruler.gradients(0, {}, exact, exact)] == [math.inf]
