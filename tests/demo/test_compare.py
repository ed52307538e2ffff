"""The distance that the demonstration judges by."""

import math

import pytest
import torch

from ndcompile.demo.compare import bar, gradient_distance, holds
from ndcompile.demo.train import Settings, whole_gradients

ONE = {"weight": torch.tensor([3.0, 4.0]), "key.bias": torch.tensor([1e-9, 0.0])}


def test_equal_gradients_have_distance_zero():
    assert gradient_distance(0, ONE, ONE, float64=True).largest == 0.0


def test_the_distance_is_relative_to_the_gradient_on_one_device():
    mesh = ONE | {"weight": torch.tensor([3.0, 4.5])}
    found = gradient_distance(0, mesh, ONE, float64=False)
    assert found.name == "weight"
    assert found.largest == pytest.approx(0.1)


def test_a_gradient_that_is_zero_but_for_rounding_is_listed_in_float32():
    mesh = ONE | {"key.bias": torch.tensor([-1e-9, 0.0])}
    found = gradient_distance(0, mesh, ONE, float64=False)
    assert (found.zero, found.largest) == (("key.bias",), 0.0)


def test_and_measured_by_the_floor_in_float64():
    mesh = ONE | {"key.bias": torch.tensor([-1e-9, 0.0])}
    assert gradient_distance(0, mesh, ONE, float64=True).largest == pytest.approx(2e-9 / 5e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_no_number_never_holds(bad: float):
    found = gradient_distance(0, ONE | {"weight": torch.tensor([3.0, bad])}, ONE, float64=False)
    assert not holds(Settings(), [found])


def test_a_missing_gradient_never_holds():
    found = gradient_distance(0, {"weight": ONE["weight"]}, ONE, float64=False)
    assert math.isinf(found.largest)
    assert "key.bias" in found.name


def test_the_bars():
    assert (bar(Settings(float64=True)), bar(Settings()), bar(Settings(precision="bf16"))) == (1e-10, 1e-5, None)


def test_kept_gradients_are_copies_that_clipping_does_not_change():
    model = torch.nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    kept = whole_gradients(model)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert torch.equal(kept["weight"], torch.ones(2, 2))
