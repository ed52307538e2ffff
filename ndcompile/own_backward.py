"""A `torch.autograd.Function` of the model's is traced by its forward: its backward must be the derivative of that."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ndcompile import forwards
from ndcompile.errors import NotOneGraph
from ndcompile.runtime import private

MOST = 1 << 27
"""Arguments with more elements than this, 1 GiB in float64, are not tried."""

NEAR = 1e-5
"""How far the two gradients may be apart, of their size: constants of formulas are rounded."""


@contextmanager
def derivatives_alone() -> Iterator[None]:
    """While a model is traced, refuse a `Function` whose backward is not the derivative of its forward.

    They are compared on random numbers. A graph holds the forward alone, so the gradient would be another one, unseen.
    """
    trying = False

    def seen(kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal trying
        if not trying and any(map(_differentiated, args)):
            trying = True
            try:
                _require_derivative(kind, args, kwargs)
            finally:
                trying = False

    with _forwards_seen(seen):
        yield


@contextmanager
def _forwards_seen(seen: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]) -> Iterator[None]:
    """Tell `seen` of each call of a `Function`, by whatever name it is called: many keep `f = Function.apply`, which
    looks for the class's `forward`.
    """
    kinds = [kind for kind in _below(torch.autograd.Function) if not kind.__module__.startswith("torch.")]
    with forwards.replaced({kind: staticmethod(_seeing(kind, seen)) for kind in kinds}):
        yield


def _below(kind: Any) -> Iterator[Any]:
    for each in dict.fromkeys(kind.__subclasses__()):
        yield each
        yield from _below(each)


def _seeing(kind: Any, seen: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]) -> Callable[..., Any]:
    forward, first = kind.forward, int(_takes_context(kind))

    @functools.wraps(forward)
    def call(*given: Any, **kwargs: Any) -> Any:
        seen(kind, given[first:], kwargs)
        return forward(*given, **kwargs)

    return call


def _takes_context(kind: Any) -> bool:
    """Whether `forward` gets the context first: no `setup_context` gets it after."""
    return kind.setup_context is torch.autograd.Function.setup_context


def _differentiated(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def _require_derivative(kind: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    tries = (
        "the same with torch's ops: x + (f(x) - x).detach() has the value of f, and the gradient of x",
        "torch.library.custom_op with register_autograd, and nd.register_rule",
    )
    elements = sum(math.prod(map(private.hint, x.shape)) for x in args if isinstance(x, Tensor))
    if elements > MOST:
        why = f"whether {kind.__name__}.backward is the derivative of its forward was not tried on {elements:,} numbers"
        raise NotOneGraph(why, "a smaller example, where these sizes are its batch and its length", *tries)
    plain = [[private.hint(n) for n in x.shape] if isinstance(x, Tensor) else private.hint(x) for x in args]
    with private.untraced():
        given = [_drawn(x, at) if isinstance(x, Tensor) else at for x, at in zip(args, plain, strict=True)]
        try:
            own = _gradients(functools.partial(kind.apply, **kwargs), given)
            wanted = _gradients(functools.partial(_forward, kind, **kwargs), given)
        except Exception as error:  # of the model's code, on numbers that it may not be made for
            said = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
            why = f"whether {kind.__name__}.backward is the derivative of its forward is not known ({said})"
            raise NotOneGraph(why, *tries) from error
        right = all(map(_near, own, wanted))
    if not right:
        why = f"{kind.__name__}.backward is not the derivative of its forward, and the graph has the forward alone"
        raise NotOneGraph(why, *tries)


def _drawn(x: Tensor, shape: Sequence[int]) -> Tensor:
    if not x.is_floating_point():
        return torch.zeros(shape, dtype=x.dtype, device="cpu")
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(shape, dtype=torch.float64, device="cpu", generator=generator)
    return drawn.requires_grad_(x.requires_grad)


def _gradients(run: Any, given: Sequence[Any]) -> list[Tensor]:
    """Of a random sum of what it returns, with regard to what is differentiated."""
    made = [y for y in pytree.tree_leaves(run(*given)) if _differentiated(y)]
    generator = torch.Generator().manual_seed(1)
    seeds = [torch.randn(y.shape, dtype=y.dtype, device="cpu", generator=generator) for y in made]
    wanted = [x for x in given if _differentiated(x)]
    found = torch.autograd.grad(made, wanted, seeds, allow_unused=True) if made else [None] * len(wanted)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=True)]


def _forward(kind: Any, *given: Any, **kwargs: Any) -> Any:
    """By torch's ops alone."""
    return kind.forward(_Context(given), *given) if _takes_context(kind) else kind.forward(*given, **kwargs)


class _Context:
    """In the place of the one that keeps things for backward."""

    def __init__(self, given: Sequence[Any]) -> None:
        self.needs_input_grad = tuple(map(_differentiated, given))

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        pass

    def set_materialize_grads(self, value: bool) -> None:
        pass


def _near(own: Tensor, wanted: Tensor) -> bool:
    """Where the derivative is finite: a root's may be bounded elsewhere."""
    finite = wanted.isfinite()
    own, wanted = own[finite], wanted[finite]
    size = float(wanted.abs().max()) if wanted.numel() else 0.0
    return bool(finite.any() or not finite.numel()) and torch.allclose(own, wanted, rtol=NEAR, atol=NEAR * size)
