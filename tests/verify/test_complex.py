"""Rotary embeddings by complex numbers, as Llama 4 has them: pairs of residues in the prime field."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ndcompile as nd
from ndcompile.verify.field import Field
from ndcompile.verify.lockstep import run_one
from ndcompile.verify.report import Claim, Report


class Rotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[1], device=x.device)[:, None] * torch.tensor([1.0, 0.3], device=x.device)
        turns = torch.polar(torch.ones_like(angles), angles)
        pairs = torch.view_as_complex(self.up(x).unflatten(-1, (3, 2, 2)))
        y: Tensor = self.down(torch.view_as_real(pairs * turns[:, None]).flatten(2))
        return y


def gaussian(*shape: int) -> Tensor:
    return torch.complex(*(torch.randint(-9, 10, shape).double() for _ in range(2)))


def residues(x: Tensor) -> Tensor:
    return torch.view_as_real(x).remainder(Field.prime)


def test_products_and_gradients_are_those_of_gaussian_integers() -> None:
    torch.manual_seed(0)
    a, b, g = gaussian(3, 4), gaussian(4), gaussian(3, 4)
    of_a, of_b = torch.autograd.functional.vjp(torch.mul, (a, b), g)[1]
    inside = [torch.view_as_complex(residues(x)) for x in (a, b, g)]

    def run() -> list[Tensor]:
        one, two = (x.requires_grad_() for x in inside[:2])
        product = one * two
        return [product.detach(), *torch.autograd.grad(product, (one, two), inside[2])]

    for found, right in zip(run_one(Field(0), run), (a * b, of_a, of_b), strict=True):
        assert torch.equal(torch.view_as_real(found), residues(right))


@pytest.mark.parametrize("mesh", ["dp_shard=2, tp=3", "cp=2"])
def test_a_rotary_embedding_by_complex_numbers_is_equal_over_the_field(mesh: str) -> None:
    torch.manual_seed(0)
    program = nd.compile(Rotated(), mesh, torch.zeros(4, 8, 8), dynamic_dims={"x": {0: "b", 1: "s"}})
    assert exact(nd.verify(program, seeds=1)).held
    other_way = str(program).replace("view_as_complex * polar", "view_as_complex * polar.conj()")
    assert other_way != str(program) and exact(nd.verify(program, seeds=1, source=other_way)).held is False


def exact(report: Report) -> Claim:
    return next(claim for claim in report.claims if claim.kind == "equal over F_p")
