"""A program's forward and backward as two CUDA graphs: the host gives each to the GPU by one call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ndcompile.runtime import private
from ndcompile.runtime.block import Root
from ndcompile.runtime.weights import StaleWeights
from ndcompile.runtime.wires import record

WARM_UP = 3
"""Training steps that run as usual before one is recorded: they compile, and learn the order of weights."""


class RecordedError(RuntimeError):
    """A recorded program was asked for what was not recorded."""


class Recorder:
    """Calls a root: a few times as it is, then by replaying what was recorded. Without gradients always as it is."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._calls = 0
        self._tape: Tape | None = None

    @property
    def has_tape(self) -> bool:
        return self._tape is not None

    @torch.compiler.disable(recursive=False)
    def __call__(self, *inputs: Tensor) -> tuple[Any, ...]:
        if not torch.is_grad_enabled():
            return self._root(*inputs)
        if self._tape is not None:
            return self._tape.play(inputs)
        self._calls += 1
        if self._calls <= WARM_UP:
            return self._root(*inputs)
        self._tape = Tape(self._root, inputs)
        return self._tape.play(inputs)


class Tape:
    """One recorded step: gradients are those of the results that are scalars, of inputs with these shapes."""

    def __init__(self, root: Root, inputs: tuple[Tensor, ...]) -> None:
        self._state = state = root._state
        self._parameters = [p for p in state.parameters.values() if p.requires_grad]
        self._frozen = [p for p in state.parameters.values() if not p.requires_grad]
        leaves = {n: private.local(p).requires_grad_() for n, p in state.parameters.items() if p.requires_grad}
        self._inputs = [x.clone() for x in inputs]
        self.number = 0
        state.settle()
        torch.cuda.synchronize()
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._forward, pool=pool, stream=stream, capture_error_mode="thread_local"):
            record(state.mesh.wires)
            with state.lane():
                state.transport.record()
            with state.forward(leaves):  # parameters' own ends of a graph belong to the stream of an earlier step
                self._results: tuple[Any, ...] = root.forward(*self._inputs)
            state.lane.join_all()
        tensors = [x for x in self._results if isinstance(x, Tensor)]
        self.differentiable = [x.requires_grad for x in tensors]
        self._scalars = [i for i, x in enumerate(tensors) if x.requires_grad and x.dim() == 0]
        losses = [tensors[i] for i in self._scalars]
        self._cotangents = [torch.ones_like(x) for x in losses]
        with torch.cuda.graph(self._backward, pool=pool, stream=stream, capture_error_mode="thread_local"):
            record(state.mesh.wires)
            found = torch.autograd.grad(losses, list(leaves.values()), self._cotangents, allow_unused=True)
            state.lane.join_all()
        self._gradients = [None if g is None else g.detach() for g in found]
        self._results = tuple(x.detach() if isinstance(x, Tensor) else x for x in self._results)

    def play(self, inputs: tuple[Tensor, ...]) -> tuple[Any, ...]:
        if any(x.requires_grad for x in (*inputs, *self._frozen)):
            raise RecordedError(
                "an input, or a parameter that was frozen when the step was recorded, requires a gradient\n"
                "  why  the recorded backward is that of the parameters that were trained then\n"
                "  try  requires_grad_(True) before the first step, or nd.parallelize without cuda_graph"
            )
        for held, given in zip(self._inputs, inputs, strict=True):
            if held.shape != given.shape or held.dtype != given.dtype:
                raise RecordedError(
                    f"an input is {list(given.shape)} {given.dtype}, but the step was recorded with "
                    f"{list(held.shape)} {held.dtype}\n"
                    f"  why  a CUDA graph has fixed shapes\n"
                    f"  try  drop_last=True, pad the batch, or nd.parallelize without cuda_graph"
                )
            held.copy_(given)
        played = iter(_Play.apply(self, *self._parameters))
        return tuple(next(played) if isinstance(x, Tensor) else x for x in self._results)

    def versions(self) -> tuple[int, ...]:
        return tuple(private.version(p) for p in self._parameters)

    def forward(self) -> list[Tensor]:
        self._leave_accumulated()
        self._forward.replay()
        self.number += 1
        return [x.clone() for x in self._results if isinstance(x, Tensor)]

    def backward(self, number: int, versions: tuple[int, ...], cotangents: tuple[Tensor | None, ...]) -> list[Any]:
        self._check(number, versions, cotangents)
        for place, i in zip(self._cotangents, self._scalars, strict=True):
            given = cotangents[i]
            place.zero_() if given is None else place.copy_(given)
        self._backward.replay()
        return [
            None if g is None else private.distributed_like(g.detach(), p)
            for g, p in zip(self._gradients, self._parameters, strict=True)
        ]

    def _check(self, number: int, versions: tuple[int, ...], cotangents: tuple[Tensor | None, ...]) -> None:
        if number != self.number:
            raise RecordedError(
                "backward of a step that is no longer there\n"
                "  why  a recorded step has one memory, and another forward has used it since\n"
                "  try  backward after each forward, or nd.parallelize without cuda_graph"
            )
        if versions != self.versions():
            raise StaleWeights(
                "cannot run backward: parameters were changed after the forward\n"
                "  why  gathered weights are not kept, and gathering them now would bring other values\n"
                "  try  backward before the optimizer's step"
            )
        given = [i for i, x in enumerate(cotangents) if x is not None]
        if not set(given) <= set(self._scalars):
            raise RecordedError(
                "a result that is no scalar was given a gradient\n"
                "  why  the recorded backward is that of the program's own losses\n"
                "  try  the loss inside the model (loss_fn=…), or nd.parallelize without cuda_graph"
            )

    def _leave_accumulated(self) -> None:
        """Gradients that are to be added to lie in memory that forward and backward use again: give them their own."""
        for parameter, place in zip(self._parameters, self._gradients, strict=True):
            held = parameter.grad
            if held is not None and place is not None and _same_memory(held, place):
                parameter.grad = held.clone()


class _Play(torch.autograd.Function):
    """Parameters → the recorded step's results."""

    @staticmethod
    def forward(ctx: Any, tape: Tape, *parameters: Tensor) -> tuple[Tensor, ...]:
        results = tape.forward()
        ctx.tape, ctx.number, ctx.versions = tape, tape.number, tape.versions()
        ctx.set_materialize_grads(False)
        constant = (x for x, differentiable in zip(results, tape.differentiable, strict=True) if not differentiable)
        ctx.mark_non_differentiable(*constant)
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        return None, *ctx.tape.backward(ctx.number, ctx.versions, cotangents)


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return private.storage_id(private.local(a)) == private.storage_id(private.local(b))
