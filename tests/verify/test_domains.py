"""The program's own dtypes and small integers: right programs pass, and what they are for is seen there."""

from __future__ import annotations

import pytest
import torch

import ndcompile as nd
from ndcompile.inputs import Inputs
from ndcompile.verify.domain import NotInDomain
from ndcompile.verify.integers import EXACT, VALUES, Integers
from ndcompile.verify.own_dtypes import OwnDtypes
from ndcompile.verify.report import Claim
from ndcompile.verify.training import Recipe, rounded
from tests.equivalence.zoo import ALL

LOW = nd.Precision(compute=torch.bfloat16, reduce=torch.float32)


def last_claim(program: nd.Program, model: torch.nn.Module, also: list[str], source: str | None = None) -> Claim:
    report = nd.verify(program, model, seeds=1, microbatches=1, also=also, source=source)
    assert bool(report) == all(claim.held is not False for claim in report.claims)
    return report.claims[-1]


def test_a_right_program_in_bfloat16_passes_and_a_gradient_that_is_not_reduced_does_not() -> None:
    model, batch = ALL["gpt"](8)
    program = nd.compile(model, "tp=2", batch, precision=LOW)
    right = last_claim(program, model, [])
    assert right.kind == "tested (bfloat16)" and right.held, right
    line = 'mlp_norm_bias=weight("mlp_norm.bias", reduce=("tp",))'
    wrong = str(program).replace(line, 'mlp_norm_bias=weight("mlp_norm.bias")')
    assert wrong != str(program)
    assert last_claim(program, model, [], wrong).held is False


@pytest.mark.parametrize("mesh", ["dp_shard=2", "tp=2"])
def test_floating_inputs_are_cast_to_the_dtype_of_compute(mesh: str) -> None:
    """In their own dtype a product with a parameter would not run. Whole numbers stay what they are."""
    model, batch = ALL["mlp"](8)
    program = nd.compile(model, mesh, batch, precision=LOW)
    claim = last_claim(program, model, [])
    assert claim.kind == "tested (bfloat16)" and claim.held, claim
    text, taken = str(program), {plan.name: plan.dtype for plan in program.manifest.input_plans}
    casts = [f"{name} = {name}.to(torch.bfloat16)" for name in taken]
    assert set(taken.values()) == {"torch.float32"} and all(cast in text for cast in casts), text
    found = last_claim(program, model, [], text.replace(casts[0], casts[0].partition(".to")[0]))
    assert found.held is False and "does not run in these dtypes" in found.evidence[0]


def test_one_device_in_low_precision_takes_inputs_in_it() -> None:
    """As real ranks compare it: the untouched model."""
    model = torch.nn.Linear(4, 3)
    inputs, recipe = Inputs.of(torch.ones(2, 4)), Recipe(steps=1, eps=1e-3)
    (step,) = rounded(model, lambda low: low, inputs, lambda name, shape: torch.ones(shape), recipe, torch.bfloat16)
    assert step.results["result 0"].dtype == torch.bfloat16 and step.parameters["weight"].dtype == torch.float32


def test_a_cast_before_a_reduction_is_seen_in_the_programs_own_dtypes() -> None:
    """The field has no dtypes, and float64 widens all of them."""
    model, batch = ALL["gpt"](8)
    program = nd.compile(model, "tp=2", batch)
    assert last_claim(program, model, ["dtypes"]).held
    call = "mlp_2 = reduce_scatter(mlp_2, tp, dim=1)"
    assert call in str(program)
    wrong = str(program).replace(call, "mlp_2 = reduce_scatter(mlp_2.bfloat16(), tp, dim=1).float()", 1)
    report = nd.verify(program, model, seeds=1, microbatches=1, also=["dtypes"], source=wrong)
    assert [claim.held for claim in report.claims] == [True] * 4 + [False], report
    assert report.claims[-1].kind == "tested (float32)" and not report and report.differences


def test_a_sum_in_low_precision_is_rounded_after_each_rank() -> None:
    ones = [torch.tensor([256.0]).bfloat16(), *[torch.tensor([1.0]).bfloat16()] * 3]
    assert OwnDtypes(0).reduce("sum", ones).item() == 256.0, "257 is no number in bfloat16"
    assert torch.stack(ones).sum(0).item() == 260.0, "as one sum in float32 would be"


@pytest.mark.parametrize("name, mesh", [("fused attention", "tp=3"), ("towers", "dp_replicate=2, tp=2")])
def test_right_programs_are_equal_over_small_integers(name: str, mesh: str) -> None:
    model, batch = ALL[name](12)
    claim = last_claim(nd.compile(model, mesh, batch), model, ["integers"])
    assert claim.kind == "equal over small integers" and claim.held, claim


def test_a_value_reduced_twice_is_seen_over_small_integers_and_growth_is_said() -> None:
    model, batch = ALL["mlp"](8)
    program = nd.compile(model, "tp=2", batch)
    call = "down = all_reduce_invariant(down, tp)"
    assert call in str(program), program
    wrong = str(program).replace(call, f"{call} * 2")
    assert last_claim(program, model, ["integers"], wrong).held is False
    deep, batch = ALL["gpt"](8)
    grown = last_claim(nd.compile(deep, "tp=2", batch), deep, ["integers"])
    assert grown.held is None and "2⁵³" in grown.evidence[0], "nothing is claimed"


def test_integers_are_the_integers() -> None:
    integers = Integers(0)
    assert integers.number(-3.0) == -3.0 and integers.number(0.3) in VALUES and integers.number(1e30) in VALUES
    a, b = (integers.draw((50, 40)) for _ in range(2))
    assert torch.equal((a @ b.T).long(), a.long() @ b.T.long())
    assert set(integers.function("exp", torch.arange(-9.0, 9.0).double()).tolist()) <= set(VALUES)
    assert integers.order(torch.tensor([3.0, -1.0])).tolist() == [3.0, -1.0]
    with pytest.raises(NotInDomain, match="2⁵³"):
        integers.mod(torch.tensor([EXACT]))


def test_another_arithmetic_is_refused_by_name() -> None:
    model, batch = ALL["mlp"](8)
    with pytest.raises(nd.CompileError, match="also='reals' is no option"):
        nd.verify(nd.compile(model, "tp=2", batch), also=["reals"])


class Waves(torch.nn.Module):
    """Numbers of which no dtype is said, in an op that wants one dtype of all."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(8, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        waves = torch.einsum("i,j->ij", torch.arange(0, 6, 1.0), torch.arange(0, 8, 1.0) / 8)
        return x @ torch.einsum("ij,jk->ik", waves, self.w)


def test_numbers_without_a_dtype_are_float64_too() -> None:
    assert nd.verify(nd.compile(Waves(), "dp_shard=2", torch.zeros(4, 6)), seeds=1)
