"""`nll_loss` as sums and counts of tokens: the untouched model's value and gradients, and equal on a mesh."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ndcompile as nd

DIMS = {name: {0: "b", 1: "s"} for name in ("x", "target")}


class Classifier(nn.Module):
    """Classes at the last dim, or at dim 1 of three, as torch has them."""

    def __init__(self, reduction: str, flat: bool = True, weight: Tensor | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 10)
        self.reduction, self.flat, self.weight = reduction, flat, weight

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        y = self.linear(x).log_softmax(-1)
        y, target = (y.flatten(0, 1), target.flatten()) if self.flat else (y.transpose(1, 2), target)
        return F.nll_loss(y, target, weight=self.weight, reduction=self.reduction)


def batch() -> dict[str, Tensor]:
    torch.manual_seed(0)
    target = torch.randint(0, 10, (8, 5))
    target[:, :2] = target[0] = -100
    return dict(x=torch.randn(8, 5, 6).double(), target=target)


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_it_is_the_models_and_equal_on_a_mesh(reduction: str, flat: bool) -> None:
    model, given = Classifier(reduction, flat).double(), batch()
    program = nd.compile(model, "dp_shard=2, tp=2", given, float64=True, dynamic_dims=DIMS)
    found, wanted = program.one_device(model)(**given), model(**given)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
    one, two = (torch.autograd.grad(loss, model.linear.weight)[0] for loss in (found, wanted))
    torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-15)
    assert [claim.held for claim in nd.verify(program, seeds=1).claims] == [True, True, True]


def test_class_weights_are_refused() -> None:
    model = Classifier("mean", weight=torch.ones(10).double()).double()
    with pytest.raises(nd.CompileError, match="nll_loss with class weights is not compiled"):
        nd.compile(model, "tp=2", batch(), float64=True, dynamic_dims=DIMS)


class Segments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Conv2d(3, 5, 1)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.scores(x), target, ignore_index=2)


def test_targets_of_other_sizes_than_the_scores_are_refused() -> None:
    """The second dim of the targets is taken for a sequence, that of the scores is fixed."""
    torch.manual_seed(0)
    given = torch.randn(4, 3, 6, 6), torch.randint(0, 5, (4, 6, 6))
    with pytest.raises(nd.CompileError, match="dynamic_dims=") as error:
        nd.compile(Segments(), "dp_shard=2", given)
    assert "the targets of a loss are of sizes [b, s, 6], its scores of [b, 5, 6, 6]" in str(error.value)
    program = nd.compile(Segments(), "dp_shard=2", given, dynamic_dims={"target": {0: "b"}})
    assert nd.verify(program, seeds=1).equal
