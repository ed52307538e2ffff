"""A model's own `autograd.Function`: its gradient is its backward, the derivative of forward or not."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

import ndcompile as nd
from ndcompile import own_backward
from ndcompile.runtime import with_gradient_of


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


class Reverses(torch.autograd.Function):
    """Gives what it takes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return -ctx.factor * gradient, None


class Quantises(torch.autograd.Function):
    """LSQ: a learned step, whose gradient is a sum over all elements."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: Tensor, low: int, high: int) -> Tensor:
        ctx.save_for_backward(x, step)
        ctx.range = low, high
        return (x / step).round().clamp(low, high) * step

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x, step), (low, high) = ctx.saved_tensors, ctx.range
        q = x / step
        below, above = (q < low).to(gradient.dtype), (q > high).to(gradient.dtype)
        inside = 1 - below - above
        of_step = below * low + above * high + inside * (q.round() - q)
        return gradient * inside, (gradient * of_step).sum().reshape(step.shape) / x.numel(), None, None


class Signs(torch.autograd.Function):
    """A gradient that is changed in place, and cannot be differentiated again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gradient = gradient.clone()
        gradient[x.abs() > 1] = 0
        return gradient


class Attends(torch.autograd.Function):
    """As YOSO's: products of matrices, three gradients, what is computed in forward kept for backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, settings: dict[str, int]) -> Tensor:
        weights = (1 - torch.acos(torch.matmul(q, k.mT)) / math.pi) ** settings["bits"]
        ctx.save_for_backward(q, k, v, weights)
        ctx.settings = settings
        return torch.matmul(weights, v)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        q, k, v, weights = ctx.saved_tensors
        inner = torch.matmul(gradient, v.mT) * weights * (ctx.settings["bits"] / 2)
        return torch.matmul(inner, k), torch.matmul(inner.mT, q), torch.matmul(weights.mT, gradient), None


class Chooses(torch.autograd.Function):
    """As PhiMoE's: the gradient goes to what forward does not even read."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, factor: Tensor, chosen: Tensor, gates: Tensor) -> Tensor:
        ctx.save_for_backward(factor, chosen, gates)
        return factor * 0.5

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        factor, chosen, gates = ctx.saved_tensors
        gradient = gradient * factor
        return (gates * gradient.mul(-1)).scatter_add_(-1, chosen, gradient), None, None, None


class Several(torch.autograd.Function):
    """With results that have no gradient, one that is not read, and the context apart."""

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return x.round(), x.argmax(-1), x.floor(), x.abs()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output[1], output[2])
        ctx.shape = inputs[0].shape

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0].view(ctx.shape) * 3 + gradients[3]


class Thins(torch.autograd.Function):
    """Draws, and keeps what it drew."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.kept = torch.rand_like(x) < 0.5
        return torch.where(ctx.kept, x, 0).round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.where(ctx.kept, gradient, 0)


class Clips(torch.autograd.Function):
    """Not linear in the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-1e9, 1e9)


class Shifts(torch.autograd.Function):
    """Not linear, though its derivative is the same everywhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient + gradient.sign()


class Hides(torch.autograd.Function):
    """What torch cannot derive."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.detach() * 1


class Model(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(12, 12), function
        self.step = nn.Parameter(torch.tensor([0.1]))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x)).square().mean() + self.step.square().sum()


class Steps(Model):
    def forward(self, x: Tensor) -> Tensor:
        return Quantises.apply(self.layer(x), self.step, -8, 7).square().mean()


X = torch.randn(4, 12, generator=torch.Generator().manual_seed(0))
FINE = {
    "kept for backward": lambda x: Squares.apply(x, 3.0),
    "with the context apart": lambda x: sum(SquaresLater.apply(x, 3.0)),
    "a bounded root": lambda x: Roots.apply(x.exp()),
    "of what carries no gradient": lambda x: x * Rounds.apply(x.detach()),
}


rounds = Rounds.apply
"""By a name that was given before."""


def attended(x: Tensor) -> Tensor:
    heads = F.normalize(x.reshape(x.shape[0], 4, 3), dim=-1) * 0.9
    return Attends.apply(heads, heads.flip(1), x.reshape(x.shape[0], 4, 3), {"bits": 4})


def chosen(x: Tensor) -> Tensor:
    gates = x.softmax(-1)
    factor, places = gates.max(-1, keepdim=True)
    return Chooses.apply(x, factor, places, gates) * x


def several(x: Tensor) -> Tensor:
    one, places, two, _ = Several.apply(x)
    return one * two + places.unsqueeze(-1)


OTHER = {
    "straight through": lambda x: Rounds.apply(x),
    "by another name": rounds,
    "reversed": lambda x: Reverses.apply(x, 0.5),
    "in place": Signs.apply,
    "products": attended,
    "a mixture": chosen,
    "several results": several,
    "two": lambda x: Rounds.apply(Reverses.apply(x, 2.0)),
}


@pytest.mark.parametrize("name", FINE)
def test_a_backward_that_is_the_derivative(name: str) -> None:
    assert "with_gradient_of" not in equal(Model(FINE[name]))


@pytest.mark.parametrize("name", OTHER)
def test_a_backward_that_is_another(name: str) -> None:
    assert "with_gradient_of(" in equal(Model(OTHER[name]))


def test_a_learned_step() -> None:
    assert "with_gradient_of(" in equal(Steps(None))


def equal(model: nn.Module) -> str:
    """The program's text; it is equal to the untouched model, and on a mesh to itself on one device."""
    program = nd.compile(model, "dp_shard=2, tp=2", X)
    found, wanted = program.one_device(model)(X), model(X)
    torch.testing.assert_close(found, wanted)
    gradients = (torch.autograd.grad(y, [*model.parameters()]) for y in (found, wanted))
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two)
    assert nd.verify(program, model, seeds=1).equal
    assert Rounds.forward.__module__ == __name__ and not hasattr(Rounds.forward, "__wrapped__")
    return str(program)


def test_what_is_drawn_in_forward_holds_in_backward() -> None:
    model, x = Model(Thins.apply), X.clone().requires_grad_()
    program = nd.compile(model, "dp_shard=2, tp=2", x)
    assert nd.verify(program, model, seeds=1).equal
    assert "with_gradient_of(" in str(program)
    before = torch.get_rng_state()
    nd.compile(model, "dp_shard=2", x)
    assert torch.equal(before, torch.get_rng_state())


def test_how_it_reads() -> None:
    text = str(nd.compile(Model(lambda x: Reverses.apply(x, 0.5)), "dp_shard=2", X))
    lines = [line.strip() for line in text.splitlines()]
    at = lines.index("detach = layer.detach()")
    assert lines[at + 1 : at + 3] == ["mul = layer * -0.5", "with_gradient = with_gradient_of(detach, mul)"]


def test_values_are_those_of_forward_to_the_last_bit() -> None:
    x = torch.tensor([-torch.inf, torch.inf, torch.nan, -0.0, 3.0])
    y = torch.randn(5, requires_grad=True)
    made = with_gradient_of(x, y)
    assert torch.equal(made.view(torch.int32), x.view(torch.int32))
    made.backward(torch.arange(5.0))
    assert y.grad is not None and torch.equal(y.grad, torch.arange(5.0))


def test_a_backward_that_is_not_linear() -> None:
    with pytest.raises(nd.CompileError) as error:
        nd.compile(Model(lambda x: Clips.apply(x)), "dp_shard=2", X)
    number = next(i for i, line in enumerate(Path(__file__).read_text().splitlines(), 1) if "Model(lambda x: C" in line)
    assert str(error.value).splitlines() == [
        "Model cannot be captured as one graph",
        f'  source  test_own_backward.py:{number}   nd.compile(Model(lambda x: Clips.apply(x)), "dp_shard=2", X)',
        "  why     Clips.backward is not linear in the gradient that it is given, as a derivative is",
        "  try     the same with torch's ops: x + (f(x) - x).detach() has the value of f, and the gradient of x",
        "  try     torch.library.custom_op with register_autograd, and nd.register_rule",
    ]
    assert Clips.forward.__module__ == __name__ and not hasattr(Clips.forward, "__wrapped__")


@pytest.mark.parametrize("kind", [Shifts, Hides])
def test_a_backward_that_torch_does_not_transpose(kind: Any) -> None:
    with pytest.raises(nd.CompileError, match=rf"{kind.__name__}\.backward is not .*, and torch does not transpose it"):
        nd.compile(Model(kind.apply), "dp_shard=2", X)


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
