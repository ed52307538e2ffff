"""`nd.verify(program, model)`: the reference graph beside the model's own modules, by torch's autograd."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import ndcompile as nd
from ndcompile import capture
from ndcompile.passes import lower_draws
from ndcompile.runtime.leaves import call_of, named_leaves
from ndcompile.verify import untouched
from ndcompile.verify.report import Claim
from tests.equivalence.registry import MODELS


class Between(nn.Module):
    """Two layers with a function between them."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.between = nn.Linear(12, 20), nn.Linear(20, 12), between

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.between(self.one(x)))


def claim_of(traced: nn.Module, model: nn.Module | None = None, mesh: str = "dp_shard=2") -> Claim:
    program = nd.compile(traced, mesh, torch.zeros(4, 12))
    return untouched.claim(program, model or traced, 2, "cpu")


@pytest.mark.parametrize("name", [
    "gpt with dropout", "fused attention", "batch norm with dropout", "drop path", "skips", "shared block",
    "tied layers", "nn.LSTM, both ways, with dropout", "nn.TransformerEncoder", "diffusion transformer",
    "mask from a buffer", "Mixtral, balanced, padded", "GPT-2 with dropout, padded left", "T5 with dropout", "ALBERT",
])  # fmt: skip
def test_the_reference_graph_is_the_model(name: str) -> None:
    model, batch = MODELS[name](4)
    found = untouched.claim(nd.compile(model, "dp_shard=2", batch), model, 2, "cpu")
    assert found.held, found.evidence


DRAWS = {
    "dropout, twice, and a draw": lambda x: F.dropout(x, 0.1) * torch.rand_like(x) + F.dropout(x, 0.5),
    "dropout1d": lambda x: F.dropout1d(x[:, :, None], 0.3, True)[:, :, 0],
    "Gumbel": lambda x: F.gumbel_softmax(x, hard=True),
    "noise": lambda x: x + torch.randn_like(x) * 0.1,
    "normal": lambda x: x + torch.normal(x, x.abs()),
    "normal_": lambda x: x * torch.empty_like(x).normal_(1, 2),
    "rand": lambda x: x * torch.rand(x.shape),
    "uniform_": lambda x: x + torch.empty_like(x).uniform_(-1, 2),
    "bernoulli": lambda x: x * torch.bernoulli(torch.sigmoid(x)),
    "bernoulli_": lambda x: x * x.new_empty((*x.shape[:1], 1)).bernoulli_(0.7),
    "a draw that decides nothing": lambda x: x if torch.rand([]) < 0.0 else x * torch.rand_like(x),
    "draws that nothing uses": lambda x: (
        (F.dropout(x, 0.2), torch.randn(3), F.dropout(x, 0.1))[2] + torch.randn_like(x)
    ),
}


@pytest.mark.parametrize("between", DRAWS.values(), ids=DRAWS)
def test_the_model_draws_the_numbers_of_the_graph(between: Callable[[Tensor], Tensor]) -> None:
    found = claim_of(Between(between))
    assert found.held, found.evidence


class Other(torch.autograd.Function):
    """A gradient that is not the derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def test_a_trace_that_leaves_something_out_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "derivatives_alone", nullcontext)
    model = Between(Other.apply)
    program = nd.compile(model, "dp_shard=2", torch.zeros(4, 12))
    assert nd.verify(program, seeds=1), "the program is its graph"
    report = nd.verify(program, model, seeds=1)
    assert not report.equal
    assert "the reference graph is not the model: step 0: gradient of one.weight" in report.differences[0]


def test_a_gradient_that_a_draw_has_and_torchs_has_not_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lower_draws, "_without_gradient", lambda build, x: x)
    found = claim_of(Between(DRAWS["normal"]))
    assert found.held is False and "gradient of one" in found.evidence[0]


@pytest.mark.parametrize("other, what", [
    (lambda x: F.gelu(x, approximate="tanh"), "result 0"),
    (lambda x: F.gelu(x).detach() + 0 * x, "gradient of one.weight"),
    (lambda x: F.gelu(F.dropout(x, 0.1)), None),
])  # fmt: skip
def test_another_model_is_none(other: Callable[[Tensor], Tensor], what: str | None) -> None:
    found = claim_of(Between(F.gelu), Between(other))
    assert found.held is (None if what is None else False)
    assert (what or "it draws more often than the graph") in found.evidence[0]


def test_nothing_is_said_of_large_models() -> None:
    model = nn.Sequential(nn.Linear(2000, 1100), nn.ReLU(), nn.Linear(1100, 10))
    report = nd.verify(nd.compile(model, "dp_shard=2", torch.zeros(4, 2000)), model, seeds=1)
    (said,) = (claim for claim in report.claims if claim.kind == untouched.KIND)
    assert said.held is None and "more than 2,000,000 parameters" in said.evidence[0] and report.equal


def test_the_claim_does_not_stand_for_the_program() -> None:
    model = Between(F.gelu)
    report = nd.verify(nd.compile(model, "dp_shard=2", torch.zeros(4, 12)), model, seeds=1)
    for claim in report.claims:
        claim.held = True if claim.kind == untouched.KIND else None
    assert not report.equal


def test_the_model_is_left_as_it_is() -> None:
    model, batch = MODELS["batch norm with dropout"](4)
    before = {name: (id(x), x.clone(), x.grad) for name, x in model.state_dict(keep_vars=True).items()}
    assert untouched.claim(nd.compile(model, "dp_shard=2", batch), model, 2, "cpu").held
    for name, x in model.state_dict(keep_vars=True).items():
        assert id(x) == before[name][0] and torch.equal(x, before[name][1]) and x.grad is before[name][2]


NESTED = st.recursive(
    st.integers(), lambda inner: st.lists(inner, min_size=1) | st.dictionaries(st.text("ab_ 1]"), inner, min_size=1)
)


@given(NESTED, NESTED, st.lists(NESTED, min_size=1), st.dictionaries(st.sampled_from("pqr"), NESTED, min_size=1))
def test_a_call_is_known_by_its_leaves(x: Any, y: Any, more: list[Any], named: dict[str, Any]) -> None:
    def forward(x: Any, *more: Any, y: Any = 3, **named: Any) -> None: ...

    signature = inspect.signature(forward)
    args, kwargs = call_of(signature, named_leaves(signature, (x, *more), {"y": y, **named}))
    assert (list(args), kwargs) == ([x, *more], {"y": y, **named})
