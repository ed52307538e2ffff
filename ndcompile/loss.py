"""A loss function as the end of the model's forward, so that the program computes it on the global batch."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from ndcompile.errors import CompileError

LossFn = Callable[..., Any]
"""`loss_fn(outputs, …)`: the first parameter takes the model's outputs, the others are inputs by their names."""


def with_loss(model: nn.Module, loss_fn: LossFn) -> nn.Module:
    """The model with `loss_fn` at the end of its forward; tensors and modules are the model's own.

    A parameter of `loss_fn` after the first that is one of `forward` too gets what `forward` gets; any other becomes a
    keyword of the new forward. What `loss_fn` returns is returned. Raises `CompileError` where that cannot be.
    """
    taken = inspect.signature(model.forward).parameters
    _, *wanted = _parameters(model, loss_fn)
    more = [p.replace(kind=p.KEYWORD_ONLY) for p in wanted if p.name not in taken]
    kind = type(model)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = {p.name: kwargs.pop(p.name) for p in more if p.name in kwargs}
        bound = inspect.signature(kind.forward).bind(self, *args, **kwargs)
        bound.apply_defaults()
        given |= {p.name: bound.arguments[p.name] for p in wanted if p.name in taken}
        return loss_fn(kind.forward(self, *args, **kwargs), **given)

    forward.__signature__ = _joined(kind, more)  # type: ignore[attr-defined]
    twin = copy.copy(model)
    twin.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    return twin


def _parameters(model: nn.Module, loss_fn: LossFn) -> list[inspect.Parameter]:
    """The parameters of `loss_fn`, each of which has a name."""
    if isinstance(loss_fn, nn.Module) and list(loss_fn.state_dict()):
        raise CompileError(
            f"loss_fn {type(loss_fn).__name__} has parameters or buffers of its own",
            why="only those of the model are placed on the mesh",
            tries="a model that calls it in forward and returns the loss",
        )
    if "forward" in vars(model):
        raise CompileError(
            f"forward of this {type(model).__name__} was replaced on the object",
            why="loss_fn extends the forward of the class",
            tries="a subclass with that forward",
        )
    signature = inspect.signature(loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn)
    found = list(signature.parameters.values())
    either = inspect.Parameter.POSITIONAL_OR_KEYWORD
    first, named = (inspect.Parameter.POSITIONAL_ONLY, either), (either, inspect.Parameter.KEYWORD_ONLY)
    if not found or found[0].kind not in first or any(p.kind not in named for p in found[1:]):
        raise CompileError(
            f"loss_fn{signature} does not name its inputs",
            why="the first parameter takes the model's outputs, and each other one is an input by its name",
            tries="def loss_fn(outputs, labels): …",
        )
    return found


def _joined(kind: type[nn.Module], more: list[inspect.Parameter]) -> inspect.Signature:
    """The signature of `forward` with further keywords, which stand before `**kwargs`."""
    signature = inspect.signature(kind.forward)
    held = list(signature.parameters.values())
    end = len(held) - (held[-1].kind == inspect.Parameter.VAR_KEYWORD)
    return inspect.Signature([*held[:end], *more, *held[end:]])
