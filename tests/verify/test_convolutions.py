"""Convolutions in the prime field: sums of more products than one piece holds, groups, and the way back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ndcompile.verify.domain import NotInDomain
from ndcompile.verify.field import Field
from ndcompile.verify.lockstep import run_one

CHANNELS = 1200
"""Times the nine places of a kernel: more than 8,192 products are added up."""


def residues(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, Field.prime, shape, generator=generator, dtype=torch.int64)


def total(products: Tensor, *dims: int) -> list[int]:
    rest = products.remainder(Field.prime)
    return (rest.sum(dims).remainder(Field.prime) if dims else rest).flatten().tolist()


def convolved(x: Tensor, weight: Tensor, gradient: Tensor, groups: int = 1, transposed: bool = False) -> list[Tensor]:
    given = [t.double() for t in (x, weight, gradient)]

    def run() -> list[Tensor]:
        one, two = (t.requires_grad_() for t in given[:2])
        convolution = torch.nn.functional.conv_transpose2d if transposed else torch.nn.functional.conv2d
        y = convolution(one, two, groups=groups)
        return [y.detach(), *torch.autograd.grad(y, (one, two), given[2])]

    return [found.long() for found in run_one(Field(0), run)]


def test_many_channels_in() -> None:
    x, weight, gradient = (
        residues(2, CHANNELS, 3, 3, seed=0),
        residues(1, CHANNELS, 3, 3, seed=1),
        residues(2, 1, 1, 1, seed=2),
    )
    y, of_x, of_weight = convolved(x, weight, gradient)
    assert y.flatten().tolist() == total(x * weight, 1, 2, 3)
    assert of_x.flatten().tolist() == total(weight * gradient)
    assert of_weight.flatten().tolist() == total(x * gradient, 0)


@pytest.mark.parametrize("transposed", [False, True])
def test_many_channels_out(transposed: bool) -> None:
    """Whose gradients are added up in that of what came in."""
    kernel = (1, CHANNELS) if transposed else (CHANNELS, 1)
    side = 3 if transposed else 1
    x, weight = residues(3, 1, 4 - side, 4 - side, seed=0), residues(*kernel, 3, 3, seed=1)
    gradient = residues(3, CHANNELS, side, side, seed=2)
    _, of_x, of_weight = convolved(x, weight, gradient, transposed=transposed)
    if transposed:
        assert of_x.flatten().tolist() == total(weight * gradient, 1, 2, 3)
        assert of_weight.flatten().tolist() == total(x * gradient, 0)
    else:
        assert of_x.flatten().tolist() == total(weight.transpose(0, 1) * gradient, 1)
        assert of_weight.flatten().tolist() == total(x * gradient, 0)


def test_a_convolution_within_each_channel() -> None:
    x, weight, gradient = (
        residues(2, CHANNELS, 3, 3, seed=0),
        residues(CHANNELS, 1, 3, 3, seed=1),
        residues(2, CHANNELS, 1, 1, seed=2),
    )
    y, of_x, of_weight = convolved(x, weight, gradient, groups=CHANNELS)
    assert y.flatten().tolist() == total(x * weight[:, 0], 2, 3)
    assert of_x.flatten().tolist() == total(weight[:, 0] * gradient)
    assert of_weight.flatten().tolist() == total(x * gradient, 0)


def test_the_mean_of_all_places() -> None:
    """Which torch, as it makes one place of them, gives other strides in place."""
    x = residues(2, 5, 8, seed=0)
    given = x.double().transpose(1, 2)
    (y,) = run_one(Field(0), lambda: [F.adaptive_avg_pool1d(given, 1)])
    assert (5 * y.long()).remainder(Field.prime).flatten().tolist() == total(x, 1)


def test_what_is_not_exact_is_not_said() -> None:
    with pytest.raises(NotInDomain, match="16384 places"):
        convolved(residues(1, 1, 128, 128, seed=0), residues(1, 1, 1, 1, seed=1), residues(1, 1, 128, 128, seed=2))
    with pytest.raises(NotInDomain, match="10800 products an element, of 2 groups"):
        x, weight = residues(1, 2 * CHANNELS, 3, 3, seed=0), residues(2, CHANNELS, 3, 3, seed=1)
        convolved(x, weight, residues(1, 2, 1, 1, seed=2), groups=2)
