"""Gradients of parameters are reduced beside the computation, and given to autograd at the end of the backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ndcompile.runtime import private
from ndcompile.runtime.lane import Lane


class Harvest:
    """What one forward's backward brings for the parameters.

    Autograd takes the gradients, as those of one op of all parameters, when the last of them has been brought. Until
    then the computing stream need not wait. `flush` is called before that, and may bring more.

    The graph of its forward holds a harvest, so that a harvest holds nothing of the graph.
    """

    def __init__(self, parameters: Mapping[str, Tensor], lane: Lane, flush: Callable[[Harvest], None] | None = None):
        self.lane, self._flush = lane, flush
        self._names = tuple(parameters)
        self._parameters = tuple(parameters.values())
        self._brought: dict[str, Tensor] = {}
        self._backward = -1

    def token(self) -> Tensor | None:
        """What everything that brings a gradient must depend on; none where no gradient is wanted."""
        wanted = torch.is_grad_enabled() and any(p.requires_grad for p in self._parameters)
        return _HandOver.apply(self, *self._parameters) if wanted else None

    def bring(self, gradients: Iterable[tuple[str, Tensor]]) -> None:
        """Add gradients, as local tensors, to parameters. Called on the lane, where they may still be on their way."""
        self._forget_others()
        for name, gradient in gradients:
            self._brought[name] = self._brought[name] + gradient if name in self._brought else gradient

    def taken(self) -> list[Tensor | None]:
        """All gradients, by parameter, when the lane is done."""
        self._forget_others()
        if self._flush is not None:
            self._flush(self)
        self.lane.join_all()
        brought, self._brought = self._brought, {}
        return [
            private.distributed_like(brought[name].contiguous(), p) if name in brought else None
            for name, p in zip(self._names, self._parameters, strict=True)
        ]

    def like_parameter(self) -> Tensor:
        """A scalar on the parameters' device."""
        return private.local(self._parameters[0]).new_zeros(())

    def _forget_others(self) -> None:
        """What a backward brought that did not come to its end is not this one's."""
        number = private.backward_number()
        if number != self._backward:
            self._backward, self._brought = number, {}


class Forward(NamedTuple):
    """What one forward's buckets hang on, held while it runs: the token holds the harvest, and never the reverse."""

    harvest: Harvest
    token: Tensor | None

    @classmethod
    def of(cls, harvest: Harvest) -> Forward:
        return cls(harvest, harvest.token())


class _HandOver(torch.autograd.Function):
    """Parameters → a token; backward gives autograd what was brought."""

    @staticmethod
    def forward(ctx: Any, harvest: Harvest, *parameters: Tensor) -> Tensor:
        ctx.harvest = harvest
        ctx.set_materialize_grads(False)
        return harvest.like_parameter()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, nothing: None) -> tuple[Tensor | None, ...]:
        return None, *ctx.harvest.taken()
