"""Tensors that are 0 by mathematics are measured by what cancels in them, and by no more than its rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ndcompile as nd
from ndcompile.verify.cancelling import PARTS, Shaken, terms
from ndcompile.verify.domain import Domain, Float64
from ndcompile.verify.lockstep import run_one
from ndcompile.verify.report import Claim, Report


class SumsOfShares(nn.Module):
    """The first result is 0, and so is its gradient: the shares of a softmax add up to 1."""

    def __init__(self) -> None:
        super().__init__()
        self.m = nn.Linear(8, 6)

    def forward(self, x):
        y = self.m(x).softmax(-1)
        return (y - 1 / 6).sum(), y


def program() -> nd.Program:
    torch.manual_seed(0)
    return nd.compile(SumsOfShares(), "dp_shard=2, tp=2", torch.zeros(4, 6, 8))


def float64(report: Report) -> Claim:
    return next(claim for claim in report.claims if claim.kind == "tested (float64)")


def test_a_sum_that_is_0_is_measured_by_its_terms() -> None:
    claim = float64(nd.verify(program(), seeds=1))
    assert claim.held
    assert claim.evidence[1].startswith("but for ") and claim.evidence[1].endswith("1e-14 would fail")


@pytest.mark.parametrize("off", ["1e-12", "1e-13"])
def test_what_is_further_away_than_rounding_is_a_difference(off: str) -> None:
    """Where each share is off by a part of itself, the sum is off by that part of 36."""
    made = program()
    assert "softmax(-1)" in str(made)
    wrong = str(made).replace("softmax(-1)", f"softmax(-1) * (1 + {off})")
    claim = float64(nd.verify(made, seeds=1, source=wrong))
    assert claim.held is False and "result 0 of microbatch 0" in claim.evidence[0]


def test_terms_are_the_root_of_the_sum_of_squares() -> None:
    """Of p = x · y, q = 3 · x · y and p + q − q: the rounding of each product, of the sum and of the difference."""
    x, y = 0.5 + torch.rand(2, 4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def run(domain: Domain) -> dict[str, Tensor]:
        def alone() -> dict[str, Tensor]:
            p, q = x * y, 3 * (x * y)
            return {"left": p + q - q, "p": p}

        return run_one(domain, alone)

    p = float((x * y).norm())
    for part in PARTS:
        found = terms(run, Float64(0), part)
        assert found["p"] == pytest.approx(p, rel=0.1)
        assert found["left"] == pytest.approx(p * (1 + 4**2 + 1) ** 0.5, rel=0.1)


def test_what_moves_further_than_it_is_long_is_moved_by_less() -> None:
    """A map that doubles what it is off by, 44 times: 2⁻⁴⁰ moves a number anywhere in its range, 2⁻⁵⁰ does not."""
    x = 0.1 + 0.8 * torch.rand(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def run(domain: Domain) -> dict[str, Tensor]:
        def alone() -> dict[str, Tensor]:
            y = x
            for _ in range(44):
                y = 4 * y * (1 - y)
            return {"y": y}

        return run_one(domain, alone)

    coarse, fine = (terms(run, Float64(0), part)["y"] for part in PARTS)
    assert coarse < float(x.norm()) / PARTS[0] < 2.0**44 < fine / float(x.norm())


def test_shaken_runs_choose_as_the_one_that_is_not_shaken() -> None:
    """Of equal numbers the largest is any, once they are shaken."""
    equal, factors = torch.full((64,), 1 / 3, dtype=torch.float64), torch.arange(64.0, dtype=torch.float64)

    def run(domain: Domain) -> dict[str, Tensor]:
        return run_one(domain, lambda: {"of the largest": (equal * factors)[(equal * equal).argmax()]})

    assert terms(run, Float64(0)) == {"of the largest": 0.0}


def test_what_cancels_inside_of_an_op_counts() -> None:
    """A group of one element is its mean, and its gradient the difference of two that are larger by 1 / √eps."""
    x, gradient = (torch.rand(8, 1, 1, generator=torch.Generator().manual_seed(i)).double() for i in range(2))

    def run(domain: Domain) -> dict[str, Tensor]:
        backward = torch.ops.aten.native_group_norm_backward.default
        mean, scale = x.view(8, 1), torch.full((8, 1), 1e-5, dtype=torch.float64).rsqrt()

        def alone() -> dict[str, Tensor]:
            return {"of x": backward(gradient, x, mean, scale, None, 8, 1, 1, 1, [True, False, False])[0]}

        return run_one(domain, alone)

    assert terms(run, Float64(0))["of x"] > 1e5**0.5 * float(gradient.norm())


def test_whole_numbers_are_exact() -> None:
    x = torch.tensor([0.0, 2.0, -5.0, 0.5, torch.inf], dtype=torch.float64)
    found = run_one(Shaken(Float64(0), PARTS[0], 0), lambda: x * 1)
    assert found.tolist()[:3] == [0, 2, -5] and found[4] == torch.inf
    assert 0 < abs(float(found[3]) - 0.5) < 10 * PARTS[0]


def test_a_change_in_place_stays_one() -> None:
    x = torch.full((3,), 1 / 3, dtype=torch.float64)
    held, before = x.clone(), x.clone()
    assert run_one(Shaken(Float64(0), PARTS[0], 0), lambda: held.add_(x)) is held
    assert torch.equal(x, before) and 0 < float((held - 2 * x).norm()) < 1e3 * PARTS[0]
