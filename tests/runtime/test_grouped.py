"""Rows that choose their matrix, and counts, against the plain way to write them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ndcompile.runtime import grouped_linear, histogram
from ndcompile.runtime.grouped import fast

IDS = torch.tensor([3, 0, 2, 2, 3, 0, 0, 3, 3, 2])
"""Expert 1 is chosen by no row."""


def plain(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    return torch.einsum("sk,snk->sn", x, weight[ids])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("dtype", "width", "grouped", "bar"),
    [
        (torch.float64, 16, False, 1e-14),
        (torch.float32, 16, True, 1e-6),
        (torch.float32, 7, False, 1e-6),
        (torch.bfloat16, 16, True, 1e-2),
    ],
    ids=str,
)
def test_each_row_meets_its_matrix(dtype: torch.dtype, width: int, grouped: bool, bar: float, transposed: bool) -> None:
    torch.manual_seed(0)
    x, weight, cotangent = (torch.randn(shape, dtype=dtype) for shape in ((10, width), (4, 8, width), (10, 8)))
    assert fast(x, 8, width) == grouped
    exact = [t.double().requires_grad_() for t in (x, weight)]
    wanted = plain(exact[0], exact[1], IDS)
    gradients = torch.autograd.grad(wanted, exact, cotangent.double())
    x.requires_grad_()
    weight = (weight.transpose(1, 2).contiguous() if transposed else weight).requires_grad_()
    y = grouped_linear(x, weight, IDS, transposed)
    of_x, of_weight = torch.autograd.grad(y, (x, weight), cotangent)
    of_weight = of_weight.transpose(1, 2) if transposed else of_weight
    for found, exactly in ((y, wanted), (of_x, gradients[0]), (of_weight, gradients[1])):
        assert found.dtype == dtype
        assert (found.double() - exactly).norm() < bar * exactly.norm()
    assert torch.equal(of_weight[1], torch.zeros_like(of_weight[1]))


def test_a_gradient_that_is_one_number_expanded_is_taken() -> None:
    x, weight = torch.randn(10, 8, requires_grad=True), torch.randn(4, 8, 8, requires_grad=True)
    grouped_linear(x, weight, IDS).sum().backward()
    assert x.grad is not None and torch.allclose(x.grad, weight.detach().sum(1)[IDS], atol=1e-5)


def test_an_id_that_no_matrix_has_is_an_error() -> None:
    with pytest.raises(IndexError):
        grouped_linear(torch.randn(2, 4), torch.randn(3, 4, 4), torch.tensor([0, 3]))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_a_histogram_counts_the_upper_bound_in_the_last_bin(dtype: torch.dtype) -> None:
    found = histogram(torch.tensor([0, 1, 1, 2, 3, 7], dtype=dtype), 3, 0, 3)
    assert found.dtype == dtype
    assert found.tolist() == [1, 2, 2]
