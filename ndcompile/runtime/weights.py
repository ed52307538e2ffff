"""Parameters on their way to compute: gathered for one block, reduced on the way back, and not kept in between."""

from __future__ import annotations

import weakref
from collections import namedtuple
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from ndcompile.runtime import private
from ndcompile.runtime.harvest import Forward, Harvest
from ndcompile.runtime.lane import Lane
from ndcompile.runtime.mesh import Mesh
from ndcompile.runtime.transport import Collectives, Transport
from ndcompile.runtime.way import Gather, Way, Weight, reduced


class StaleWeights(ValueError):
    """A parameter was changed between the forward that used it and its backward."""


class Bucket:
    """The weights of one block, which move together.

    `weights` says by attribute how each comes; `parameters` (DTensors or plain) and `shapes` are by parameter name,
    a shape being whole along gathered axes and local along all others. Weights are cast to `compute` before they are
    gathered, gradients to `reduce` before they are summed; None leaves a dtype as it is. Both travel by `transport`.

    `next` and `previous` are the buckets used after and before this one; where they are set, their gathers start early.
    """

    def __init__(
        self,
        mesh: Mesh,
        weights: Mapping[str, Weight],
        parameters: Mapping[str, Tensor],
        shapes: Mapping[str, tuple[int, ...]],
        compute: torch.dtype | None = None,
        reduce: torch.dtype | None = None,
        lane: Lane | None = None,
        transport: Transport | None = None,
    ) -> None:
        self.parameters = parameters
        self.next: Bucket | None = None
        self.previous: Bucket | None = None
        self._deferred: dict[int, Tensor] = {}
        self._names = tuple(weight.name for weight in weights.values())
        self._type = _weights_type(tuple(weights))
        self._ways = [Way.of(mesh, weight, tuple(shapes[weight.name])) for weight in weights.values()]
        self._moves = any(way.stages for way in self._ways)
        self._started: Gather | None = None
        self._uses: weakref.WeakSet[_Use] = weakref.WeakSet()
        self._check_shapes()
        self._lane = lane or Lane(private.local(self._held()[0]).device if self._names else torch.device("cpu"))
        dtypes = [compute if compute is not None and p.is_floating_point() else p.dtype for p in self._held()]
        self._lends = not self._moves and dtypes == [p.dtype for p in self._held()]  # the parameters' own memory
        self._carrier = (transport or Collectives()).carrier(self._ways, dtypes, reduce)

    @contextmanager
    def gathered(self, forward: Forward | None = None, keep: bool = False, defer: bool = False) -> Iterator[Any]:
        """The weights as plain whole tensors, a named tuple by attribute, for the length of the block.

        What autograd saves of them inside is gathered again in backward, so that it need not be kept; with `keep` it
        is. Their gradients go to the harvest of `forward`, with `defer` without the sums over the axes of `reduce`.
        """
        parameters = self._held()
        with torch.no_grad():
            weights = self._take(versions := self._versions())
            self._prefetch()
        use = _Use(self, weights, versions, keep)
        if torch.is_grad_enabled() and any(p.requires_grad for p in parameters):
            own = dict(zip(self._names, parameters, strict=True))
            harvest, token = forward or Forward.of(Harvest(own, self._lane))
            weights = _Deliver.apply(self, use, harvest, defer, weights, token)
        named = self._type(*weights)
        hidden = self._moves and torch.is_grad_enabled()
        del weights
        with saved_tensors_hooks(use.pack, use.unpack) if hidden else nullcontext():
            yield named
        use.close()

    def release(self) -> None:
        """Drop a gather that was started ahead and not used."""
        self._started = None

    def flush(self, harvest: Harvest) -> None:
        """Bring the gradients that were deferred and that no later backward took along."""
        if self._deferred:
            with torch.no_grad(), self._lane(*self._deferred.values()):
                self._bring(harvest, self._carrier.sum(self._deferred))
            self.defer({})

    def defer(self, gradients: dict[int, Tensor]) -> None:
        """Hold back these gradients, which have not been summed over the axes of `reduce`, in place of others."""
        for i in {*self._deferred, *gradients}:
            private.owe(self.parameters[self._names[i]], i in gradients)
        self._deferred = gradients

    def _held(self) -> list[Tensor]:
        return [self.parameters[name] for name in self._names]

    def _versions(self) -> tuple[int, ...]:
        return tuple(private.version(p) for p in self._held())

    def _check_shapes(self) -> None:
        for parameter, way, name in zip(self._held(), self._ways, self._names, strict=True):
            held = tuple(private.local(parameter).shape)
            if held != way.held:
                raise ValueError(
                    f"parameter '{name}' has a local tensor of shape {held}, but the bucket expects {way.held}\n"
                    f"  why  its whole shape {way.shape} is sharded as {dict(way.dims)}, in parts as of torch.chunk\n"
                    f"  try  the shape that is local on the axes that are not gathered"
                )

    def _start(self, versions: tuple[int, ...] | None = None) -> None:
        """Start the gather, if that is not done for the parameters as they are now, of which `versions` are known."""
        versions = versions or self._versions()
        if self._started is None or self._started.versions != versions:
            held = [private.local(p) for p in self._held()]
            self._started = Gather(self._lane, self._carrier, held, versions)

    def _take(self, versions: tuple[int, ...]) -> list[Tensor]:
        self._start(versions)
        started, self._started = self._started, None
        assert started is not None, "a gather was just started"
        return started.land()

    def _prefetch(self) -> None:
        """Start what will be needed next: the next bucket, or in a recomputation the previous one."""
        if private.in_backward():
            self._prefetch_back()
        elif self.next is not None:
            self.next._start()

    def _prefetch_back(self) -> None:
        if self.previous is not None and any(use.waiting for use in self.previous._uses):
            self.previous._start()
            private.after_backward(self.previous.release)  # which need not come to it: a result may be detached

    def _reduce(self, gradients: Mapping[int, Tensor], harvest: Harvest, defer: bool) -> None:
        """Start the gradients' collectives, and bring what comes of them."""
        with self._lane(*gradients.values(), *self._deferred.values()):
            found, deferred = reduced(self._carrier, self._ways, gradients, self._deferred, defer)
            self._bring(harvest, found)
        if deferred or self._deferred:
            self.defer(deferred)

    def _bring(self, harvest: Harvest, found: Mapping[int, Tensor]) -> None:
        """On the lane: the gradients in the dtypes of their parameters, of which two may be of one."""
        names = self._names
        harvest.bring((names[i], private.cast(x, self.parameters[names[i]].dtype)) for i, x in found.items())


class _Saved(NamedTuple):
    """What autograd keeps in place of a gathered weight, or of any view of it."""

    weight: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    dtype: torch.dtype


class _Use:
    """One forward through a bucket: hides gathered weights from autograd, and gathers them again once for backward.

    With `keep` it has them at hand; that they are asked for still starts what is needed next.

    Autograd's graph holds a use, so that what a use keeps, and what it gives autograd to keep, must not hold the graph.
    """

    def __init__(self, bucket: Bucket, weights: list[Tensor], versions: tuple[int, ...], keep: bool = False):
        self._bucket = bucket
        self._versions = versions
        self._open = {
            private.storage_id(x): i for i, (x, way) in enumerate(zip(weights, bucket._ways, strict=True)) if way.stages
        }
        self._again: list[Tensor] | None = None
        self._kept = [x.detach() for x in weights] if keep else None
        self._packed = False
        bucket._uses.add(self)

    @property
    def waiting(self) -> bool:
        """Backward will ask for weights that are not there yet."""
        return self._packed and self._again is None and self._kept is None

    def close(self) -> None:
        """The block has ended: the memory of its weights may be another's now."""
        self._open = {}

    def pack(self, x: Tensor) -> Tensor | _Saved:
        weight = self._open.get(private.storage_id(x))
        if weight is None:
            return x.detach()
        self._packed = True
        return _Saved(weight, tuple(x.shape), x.stride(), x.storage_offset(), x.dtype)

    def unpack(self, saved: Tensor | _Saved) -> Tensor:
        if not isinstance(saved, _Saved):
            return saved
        if self._again is None:
            self._gather_again()
        assert self._again is not None, "the weights were just gathered"
        again = self._again[saved.weight]
        again = again if again.dtype == saved.dtype else again.view(saved.dtype)
        return again.as_strided(saved.size, saved.stride, saved.offset)

    def _gather_again(self) -> None:
        versions, bucket = self.check(), self._bucket
        with torch.no_grad():
            self._again, self._kept = self._kept or bucket._take(versions), None
            bucket._prefetch_back()

    def check(self) -> tuple[int, ...]:
        """The versions of the parameters, which are those that forward used."""
        if (versions := self._bucket._versions()) != self._versions:
            raise StaleWeights(
                f"cannot run backward: parameters of {', '.join(self._bucket._names)} were changed after the forward\n"
                f"  why  weights are not kept for backward, which would take other values now\n"
                f"  try  backward before the optimizer's step"
            )
        return versions

    def free(self) -> None:
        """All gradients have arrived; another backward would gather anew."""
        self._again = self._kept = None
        self._packed = False


class _Deliver(torch.autograd.Function):
    """A bucket's weights, as results of the harvest's token; backward gets all their gradients at once."""

    @staticmethod
    def forward(
        ctx: Any, bucket: Bucket, use: _Use, harvest: Harvest, defer: bool, weights: list[Tensor], token: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.bucket, ctx.use, ctx.harvest, ctx.defer = bucket, use, harvest, defer
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for x, p in zip(weights, bucket._held(), strict=True) if not p.requires_grad))
        return tuple(weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.use.free()
        if ctx.bucket._lends:  # what autograd kept is the parameters: torch sees no change of a DTensor's memory
            ctx.use.check()
        found = {i: gradient for i, gradient in enumerate(gradients) if gradient is not None}
        if found:
            ctx.bucket._reduce(found, ctx.harvest, ctx.defer)
        return (None,) * 6


@cache
def _weights_type(names: tuple[str, ...]) -> type:
    """One named tuple type for all buckets whose weights have these names, so that they share compiled code."""
    return namedtuple("Weights", names)
