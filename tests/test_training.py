"""What a training loop does around a model, as on one device (docs/training.md)."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

import ndcompile as nd
from tests import ranks
from tests.claims import Claims, assert_close, assert_same_gradients, run_claims
from tests.models import Mlp, seeded

MESHES = ("dp_shard=2", "dp_replicate=2", "tp=2")
X = (torch.arange(96.0, dtype=torch.float64).view(8, 12) * 0.37).sin()
Both = tuple[tuple[nn.Module, Tensor], tuple[nn.Module, Tensor]]


def both(mesh: str) -> Both:
    """The parallel model with this rank's rows, and the model with all."""
    model = seeded(Mlp).double()
    parallel = nd.parallelize(model, mesh, X, float64=True, outputs="local")
    return (parallel, X.chunk(2)[dist.get_rank()] if "dp" in mesh else X), (model, X)


def on_all_meshes(step: Callable[[nn.Module, Tensor], object], meshes: Sequence[str] = MESHES) -> None:
    """After the same step gradients and parameters are one device's."""
    for mesh in meshes:
        pair = both(mesh)
        for model, x in pair:
            step(model, x)
        (parallel, _), (model, _) = pair
        assert_same_gradients(parallel, model)
        found = dict(parallel.named_parameters())
        for name, parameter in model.named_parameters():
            assert_close(found[name], parameter, what=f"{name} on {mesh}")


def trains(make: Callable[[Iterable[nn.Parameter]], optim.Optimizer], meshes: Sequence[str] = MESHES) -> None:
    """Three steps, with a closure."""

    def steps(model: nn.Module, x: Tensor) -> None:
        optimizer = make(model.parameters())

        def loss() -> float:
            optimizer.zero_grad()
            found = model(x).square().mean()
            found.backward()
            return float(found)

        for _ in range(3):
            optimizer.step(loss)

    on_all_meshes(steps, meshes)


def elementwise_optimizers() -> None:
    trains(lambda given: optim.SGD(given, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1))
    trains(lambda given: optim.AdamW(given, lr=0.1, foreach=True))
    trains(lambda given: optim.RMSprop(given, lr=0.01))


def an_optimizer_that_takes_all_gradients_as_one_vector() -> None:
    """Which torch 2.11 cannot make of shards."""
    trains(lambda given: optim.LBFGS(given, lr=0.1, max_iter=3), ["dp_replicate=2"])


def groups_by_name_and_a_schedule() -> None:
    def steps(model: nn.Module, x: Tensor) -> None:
        decayed = [p for name, p in model.named_parameters() if "bias" not in name]
        others = [p for name, p in model.named_parameters() if "bias" in name]
        groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        optimizer = optim.AdamW(groups, lr=0.1)
        schedule = optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
        for _ in range(3):
            model.zero_grad(set_to_none=False)
            model(x).square().mean().backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
            schedule.step()

    on_all_meshes(steps)


def an_optimizer_for_each_parameter_in_its_hook() -> None:
    def steps(model: nn.Module, x: Tensor) -> None:
        optimizers: dict[Tensor, optim.Optimizer] = {p: optim.SGD([p], lr=0.1) for p in model.parameters()}

        def step(parameter: Tensor) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in optimizers:
            parameter.register_post_accumulate_grad_hook(step)
        for _ in range(2):
            model(x).square().mean().backward()

    on_all_meshes(steps)


def hooks_of_parameters_see_reduced_gradients() -> None:
    def step(model: nn.Module, x: Tensor) -> None:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient.sin())
        (30 * model(x)).square().mean().backward()

    on_all_meshes(step)


def several_losses_of_one_result() -> None:
    def step(model: nn.Module, x: Tensor) -> None:
        y = model(x)
        y.exp().mean().backward(retain_graph=True)
        y.square().mean().backward()

    on_all_meshes(step)


def a_model_that_is_called_twice() -> None:
    def step(model: nn.Module, x: Tensor) -> None:
        one, two = model(x), model(x.cos())
        ((one * two).mean() + one.exp().mean()).backward()

    on_all_meshes(step)


def gradients_of_some_parameters() -> None:
    def step(model: nn.Module, x: Tensor) -> None:
        model(x).square().mean().backward(inputs=[model.get_parameter("up.weight")])
        bias = model.get_parameter("down.bias")
        (bias.grad,) = torch.autograd.grad(model(x).square().mean(), [bias])

    on_all_meshes(step)


def layers_that_are_frozen_and_trained_again() -> None:
    def step(model: nn.Module, x: Tensor) -> None:
        for trained in (False, True, False):
            model.get_submodule("up").requires_grad_(trained)
            model(x).square().mean().backward()

    on_all_meshes(step)


def a_model_that_is_made_and_called_in_inference_mode_first() -> None:
    """It trains afterwards, in both modes."""
    for mesh in MESHES:
        model = seeded(Mlp).double()
        rows = X.chunk(2)[dist.get_rank()] if "dp" in mesh else X
        with torch.inference_mode():
            parallel = nd.parallelize(model, mesh, X, float64=True, outputs="local")
            for training in (True, False):
                assert not parallel.train(training)(rows).requires_grad
        for training in (True, False):
            for each, x in ((parallel.train(training), rows), (model, X)):
                each(x).square().mean().backward()
        assert_same_gradients(parallel, model)


def weights_that_change_before_backward_are_refused() -> None:
    """As by autograd on one device, which does not see a fused step: by hand, or by an optimizer."""

    def by_hand(model: nn.Module) -> None:
        with torch.no_grad():
            model.get_parameter("down.weight").mul_(2)

    def by_a_step(model: nn.Module) -> None:
        optim.AdamW(model.parameters(), fused=True).step()

    for change in (by_hand, by_a_step):
        for mesh in MESHES:
            for model, x in both(mesh)[: 1 if change is by_a_step else 2]:
                y = model(x)
                y.mean().backward(retain_graph=True)
                change(model)
                with pytest.raises((ValueError, RuntimeError), match=r"were changed after|modified by an inplace"):
                    y.mean().backward()


def parameters_that_two_models_share_are_warned_of() -> None:
    """Not so for one model on two meshes, nor for what is frozen."""
    model = seeded(Mlp).double()
    first = nd.parallelize(model, "tp=2", X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = nd.parallelize(model, "dp_shard=2", X)
        frozen = nd.parallelize(nn.Sequential(model.get_submodule("up")).requires_grad_(False), "tp=2", X)
        model.requires_grad_(True)
        if dist.get_rank():
            nd.parallelize(nn.Sequential(model.get_submodule("up")), "tp=2", X)
    if dist.get_rank() == 0:
        with pytest.warns(match="some parameters of the model are those of another parallel model too"):
            nd.parallelize(nn.Sequential(model.get_submodule("up")), "tp=2", X)
    assert first is not second is not frozen


def a_parallel_model_says_that_it_cannot_be_pickled() -> None:
    with pytest.raises(TypeError, match=r"(?s)a parallel model cannot be pickled.*try  torch.distributed.checkpoint"):
        pickle.dumps(both("tp=2")[0][0])


CLAIMS: Claims = (
    elementwise_optimizers,
    an_optimizer_that_takes_all_gradients_as_one_vector,
    groups_by_name_and_a_schedule,
    an_optimizer_for_each_parameter_in_its_hook,
    hooks_of_parameters_see_reduced_gradients,
    several_losses_of_one_result,
    a_model_that_is_called_twice,
    gradients_of_some_parameters,
    layers_that_are_frozen_and_trained_again,
    a_model_that_is_made_and_called_in_inference_mode_first,
    weights_that_change_before_backward_are_refused,
    parameters_that_two_models_share_are_warned_of,
    a_parallel_model_says_that_it_cannot_be_pickled,
)


@pytest.fixture(scope="module")
def two() -> list[dict[str, str]]:
    return ranks.run(2, run_claims, CLAIMS, timeout=240)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.__name__)
def test_on_two_ranks(claim: Callable[[], None], two: list[dict[str, str]]) -> None:
    assert [theirs[claim.__name__] for theirs in two] == ["", ""]
