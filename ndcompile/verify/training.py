"""Some clipped steps of AdamW, in three ways: the untouched model in float64, in low precision, and on the mesh."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ndcompile.inputs import Inputs
from ndcompile.runtime import private
from ndcompile.verify.domain import Float64
from ndcompile.verify.lockstep import run_one

Results = dict[str, Any]
"""What a model returns, by name."""

Backward = Callable[[int], Results]
"""Step number → the results; leaves gradients with the parameters."""

Cotangent = Callable[[str, Sequence[int]], Tensor]
"""For a result of this name and shape, where a model returns no scalar."""


@dataclass(frozen=True)
class Recipe:
    """How a model is trained. AdamW's `eps` is large where gradients are rounded: with torch's own, 1e-8, a gradient
    that is all rounding becomes a step of full length in a direction that rounding chose, on one device as well.
    """

    steps: int = 2
    learning_rate: float = 1e-2
    clip: float = 0.1
    eps: float = 1e-3


@dataclass
class Trained:
    """One step: results, gradients, their norm, and parameters and buffers after it; of a mesh this rank's parts."""

    results: Results = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    norm: Tensor = field(default_factory=lambda: torch.zeros(()))
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


def train(model: nn.Module, backward: Backward, recipe: Recipe) -> Iterator[Trained]:
    """The steps of a model's training, each before the next one begins."""
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(parameters.values(), lr=recipe.learning_rate, eps=recipe.eps, fused=True)
    for number in range(recipe.steps):
        results = {name: _held(y) for name, y in backward(number).items()}
        gradients = {name: _held(p.grad) for name, p in parameters.items() if p.grad is not None}
        norm = nn.utils.clip_grad_norm_(parameters.values(), recipe.clip)
        optimizer.step()
        optimizer.zero_grad()
        after = {name: _held(p) for name, p in parameters.items()}
        buffers = {name: _held(b) for name, b in model.named_buffers()}
        yield Trained(results, gradients, _whole(norm), after, buffers)


def _held(value: Any) -> Any:
    return private.local(value).clone() if isinstance(value, Tensor) else value


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if private.is_distributed(x) else x


def backward_from(results: Results, cotangent: Cotangent) -> None:
    """From every scalar with 1; where no scalar has a gradient, from all results with the cotangents given."""
    local = {name: _local_result(y) for name, y in results.items()}
    flowing = {name: y for name, y in local.items() if isinstance(y, Tensor) and y.requires_grad}
    scalars = [y for y in flowing.values() if y.dim() == 0]
    if scalars:
        torch.autograd.backward(scalars)
    elif flowing:
        torch.autograd.backward(list(flowing.values()), [cotangent(n, y.shape).to(y) for n, y in flowing.items()])


def _local_result(y: Any) -> Any:
    return y.to_local() if isinstance(y, Tensor) and private.is_distributed(y) else y


def results_of(callee: nn.Module, inputs: Inputs) -> Results:
    """Call the model: what is in a mapping has its name there, all else a number."""
    returned = callee(*inputs.args, **inputs.kwargs)
    leaves = pytree.tree_leaves(returned)
    named = returned if isinstance(returned, Mapping) else {}
    names = [key if n == 1 else f"{key} {i}" for key, v in named.items() for n in [len(pytree.tree_leaves(v))]
             for i in range(n)] or [f"result {i}" for i in range(len(leaves))]  # fmt: skip
    return dict(zip(names, leaves, strict=True))


Call = Callable[[nn.Module], nn.Module]
"""What is called in a model's place: the model itself, or the reference graph where dropout is by hashing."""


def exactly(model: nn.Module, call: Call, inputs: Inputs, cotangent: Cotangent, recipe: Recipe
            ) -> Iterator[Trained]:  # fmt: skip
    """The untouched model in float64, its casts to less widened as well."""
    model, inputs = copy.deepcopy(model).double(), in_double(inputs)
    callee, domain = call(model), Float64(0)

    def backward(number: int) -> Results:
        def run() -> Results:
            torch.manual_seed(number)
            results = results_of(callee, inputs)
            backward_from(results, cotangent)
            return results

        return run_one(domain, run)

    return train(model, backward, recipe)


def rounded(model: nn.Module, call: Call, inputs: Inputs, cotangent: Cotangent, recipe: Recipe,
            dtype: torch.dtype | None) -> Iterator[Trained]:  # fmt: skip
    """The untouched model with parameters and inputs cast to `dtype`; the optimizer keeps its own as they are."""
    masters = copy.deepcopy(model)
    low = copy.deepcopy(model)
    for parameter in low.parameters():
        if dtype is not None and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    callee = call(low)
    inputs = moved(inputs, lambda x: x.to(dtype) if dtype is not None and x.is_floating_point() else x)
    pairs = list(zip(masters.parameters(), low.parameters(), strict=True))

    def backward(number: int) -> Results:
        with torch.no_grad():
            for master, copied in pairs:
                copied.copy_(master)
                copied.grad = None
        torch.manual_seed(number)
        results = results_of(callee, inputs)
        backward_from(results, cotangent)
        for master, copied in pairs:
            master.grad = None if copied.grad is None else copied.grad.to(master.dtype)
        with torch.no_grad():
            for buffer, written in zip(masters.buffers(), low.buffers(), strict=True):
                buffer.copy_(written)
        return results

    return train(masters, backward, recipe)


def on_mesh(parallel: nn.Module, inputs: Inputs, cotangent: Cotangent, recipe: Recipe) -> Iterator[Trained]:
    """This rank's share of the same training; `inputs` and cotangents are this rank's parts."""

    def backward(number: int) -> Results:
        torch.manual_seed(number)
        results = results_of(parallel, inputs)
        backward_from(results, cotangent)
        return results

    return train(parallel, backward, recipe)


def in_double(inputs: Inputs) -> Inputs:
    """Inputs with every float as float64."""
    return moved(inputs, lambda x: x.double() if x.is_floating_point() else x)


def moved(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """Inputs with every tensor changed."""
    args, kwargs = pytree.tree_map_only(Tensor, change, (inputs.args, inputs.kwargs))
    return Inputs(args, kwargs)


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Afterwards the model's parameters and buffers hold what they held before, and no gradient."""
    tensors = [*model.parameters(), *model.buffers()]
    before = [private.local(t).clone() for t in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, held in zip(tensors, before, strict=True):
                private.local(tensor).copy_(held)
        model.zero_grad()
