"""A model's own `autograd.Function`: right where its backward is the derivative of its forward, else refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ndcompile as nd
from ndcompile import own_backward


class Rounds(torch.autograd.Function):
    """A straight-through estimator: the gradient goes on as if nothing was rounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Squares(torch.autograd.Function):
    """What torch would derive, with a number kept for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return factor * x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * ctx.factor * x * gradient, None


class SquaresLater(torch.autograd.Function):
    """The same with the context apart, and two results."""

    @staticmethod
    def forward(x: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        return factor * x * x, -x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.factor = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, one: Tensor, two: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * ctx.factor * x * one - two, None


class Roots(torch.autograd.Function):
    """With a gradient that is bounded, as RecurrentGemma's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sqrt()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient / (4 * x).clamp(min=1e-6).sqrt()


class Reads(torch.autograd.Function):
    """Made for numbers that are not drawn."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if not x.is_meta and x.min() < 0:
            raise ValueError("below 0")
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Model(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(12, 12), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x)).square().mean()


X = torch.randn(4, 12, generator=torch.Generator().manual_seed(0))
FINE = {
    "kept for backward": lambda x: Squares.apply(x, 3.0),
    "with the context apart": lambda x: sum(SquaresLater.apply(x, 3.0)),
    "a bounded root": lambda x: Roots.apply(x.exp()),
    "of what carries no gradient": lambda x: x * Rounds.apply(x.detach()),
}


rounds = Rounds.apply
"""By a name that was given before."""


@pytest.mark.parametrize("name", FINE)
def test_a_backward_that_is_the_derivative(name: str) -> None:
    model = Model(FINE[name])
    program = nd.compile(model, "dp_shard=2, tp=2", X)
    found, wanted = program.one_device(model)(X), model(X)
    torch.testing.assert_close(found, wanted)
    for one, two in zip(*(torch.autograd.grad(y, [*model.parameters()]) for y in (found, wanted)), strict=True):
        torch.testing.assert_close(one, two)
    assert nd.verify(program, model, seeds=1).equal
    assert Rounds.forward.__module__ == __name__ and not hasattr(Rounds.forward, "__wrapped__")


def test_a_backward_that_is_another() -> None:
    with pytest.raises(nd.CompileError) as error:
        nd.compile(Model(lambda x: Rounds.apply(x)), "dp_shard=2", X)
    number = next(i for i, line in enumerate(Path(__file__).read_text().splitlines(), 1) if "Model(lambda x: R" in line)
    assert str(error.value).splitlines() == [
        "Model cannot be captured as one graph",
        f'  source  test_own_backward.py:{number}   nd.compile(Model(lambda x: Rounds.apply(x)), "dp_shard=2", X)',
        "  why     Rounds.backward is not the derivative of its forward, and the graph has the forward alone",
        "  try     the same with torch's ops: x + (f(x) - x).detach() has the value of f, and the gradient of x",
        "  try     torch.library.custom_op with register_autograd, and nd.register_rule",
    ]
    assert Rounds.forward.__module__ == __name__ and not hasattr(Rounds.forward, "__wrapped__")


def test_one_that_is_called_by_another_name() -> None:
    with pytest.raises(nd.CompileError, match=r"Rounds\.backward is not the derivative"):
        nd.compile(Model(rounds), "dp_shard=2", X)


def test_the_same_with_torchs_ops() -> None:
    model = Model(lambda x: x + (x.round() - x).detach())
    assert nd.verify(nd.compile(model, "dp_shard=2, tp=2", X), model, seeds=1).equal


def test_a_backward_that_cannot_be_tried() -> None:
    why = r"whether Reads.backward is the derivative of its forward is not known \(ValueError: below 0\)"
    with pytest.raises(nd.CompileError, match=why):
        nd.compile(Model(Reads.apply), "dp_shard=2", X)


def test_one_of_very_many_numbers_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_backward, "MOST", 40)
    with pytest.raises(nd.CompileError, match=r"was not tried on \d+ numbers"):
        nd.compile(Model(FINE["kept for backward"]), "dp_shard=2", X)
