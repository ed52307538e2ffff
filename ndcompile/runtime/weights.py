"""Parameters on their way to compute: gathered for one block, reduced on the way back, and not kept in between."""

from __future__ import annotations

import weakref
from collections import namedtuple
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from ndcompile.runtime import flat, private
from ndcompile.runtime.flat import Part
from ndcompile.runtime.mesh import Mesh, Ranks


class Weight(NamedTuple):
    """How the parameter `name` comes to compute, one line a weight of an emitted block.

    `gather` maps an axis to the dim that it shards (several on one dim: major first): S → R, the gradient is
    reduce-scattered. On the axes in `reduce` it is I → R: nothing forward, the gradient is all-reduced.
    """

    name: str
    gather: Mapping[str, int]
    reduce: tuple[str, ...]


def weight(name: str, gather: Mapping[str, int] | None = None, reduce: Sequence[str] = ()) -> Weight:
    """`Weight` from the way emitted code writes it."""
    return Weight(name, dict(gather or {}), tuple(reduce))


class StaleWeights(ValueError):
    """A parameter was changed between the forward that used it and its backward."""


class Bucket:
    """The weights of one block, which move together.

    `weights` says by attribute how each comes; `parameters` (DTensors or plain) and `shapes` are by parameter name,
    a shape being whole along gathered axes and local along all others. Weights are cast to `compute` before they are
    gathered, gradients to `reduce` before they are summed; None leaves a dtype as it is.

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
    ) -> None:
        self.parameters = parameters
        self.compute = compute
        self.reduce = reduce
        self.next: Bucket | None = None
        self.previous: Bucket | None = None
        self._names = tuple(weight.name for weight in weights.values())
        self._type = _weights_type(tuple(weights))
        self._ways = [_Way.of(mesh, weight, tuple(shapes[weight.name])) for weight in weights.values()]
        self._started: _Started | None = None
        self._uses: weakref.WeakSet[_Use] = weakref.WeakSet()
        self._check_shapes()

    @contextmanager
    def gathered(self) -> Iterator[Any]:
        """The weights as plain whole tensors, a named tuple by attribute, for the length of the block.

        What autograd saves of them inside is gathered again in backward, so that they need not be kept.
        """
        parameters = self._held()
        with torch.no_grad():
            buffers = self._take()
            self._prefetch()
            views = self._views(parameters, buffers)
        use = _Use(self, buffers, self._versions())
        if torch.is_grad_enabled() and any(p.requires_grad for p in parameters):
            views = _Deliver.apply(self, use, views, *parameters)
        weights = self._type(*views)
        hidden = bool(buffers) and torch.is_grad_enabled()
        del views, buffers
        with saved_tensors_hooks(use.pack, use.unpack) if hidden else nullcontext():
            yield weights
        use.close()

    def release(self) -> None:
        """Drop a gather that was started ahead and not used."""
        if self._started is not None:
            self._started.drop()
            self._started = None

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

    def _groups(self) -> dict[torch.dtype, list[int]]:
        """The weights that need memory of their own (gathered or cast), by the dtype in which they travel."""
        groups: dict[torch.dtype, list[int]] = {}
        for i, (parameter, way) in enumerate(zip(self._held(), self._ways, strict=True)):
            dtype = self._compute_dtype(parameter)
            if way.stages or dtype != parameter.dtype:
                groups.setdefault(dtype, []).append(i)
        return groups

    def _compute_dtype(self, parameter: Tensor) -> torch.dtype:
        return self.compute if self.compute is not None and parameter.is_floating_point() else parameter.dtype

    def _start(self) -> None:
        """Start the first gather of each group, if that is not done for the parameters as they are now."""
        versions = self._versions()
        if self._started is not None and self._started.versions == versions:
            return
        self.release()
        held = [private.local(p) for p in self._held()]
        groups = [
            _Group(dtype, [(i, self._ways[i], held[i]) for i in which]) for dtype, which in self._groups().items()
        ]
        self._started = _Started(versions, groups)

    def _take(self) -> list[tuple[list[int], list[int], Tensor]]:
        """A flat buffer of whole weights a group: (weights, their offsets, buffer)."""
        self._start()
        started, self._started = self._started, None
        assert started is not None, "a gather was just started"
        return [(group.which, *group.land()) for group in started.groups]

    def _views(self, parameters: list[Tensor], buffers: list[tuple[list[int], list[int], Tensor]]) -> list[Tensor]:
        views = [private.local(p) for p in parameters]
        for which, begins, buffer in buffers:
            for i, begin in zip(which, begins, strict=False):
                views[i] = _view(buffer, begin, self._ways[i].shape)
        return views

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

    def _reduced(self, which: list[int], gradients: list[Tensor]) -> list[Tensor]:
        """The gradients after their collectives, as local tensors in the parameters' dtypes."""
        moving = dict(zip(which, gradients, strict=True))
        for dtype, group in _by_dtype(moving, self.reduce).items():
            for axis in _axes(ways := [(i, self._ways[i]) for i in group]):
                due = [(i, way.stages[axis]) for i, way in ways if axis in way.stages]
                parts = [part for _, part in due]
                sent = flat.join_wholes([moving[i] for i, _ in due], parts, axis, dtype)
                got = private.wait(private.start_reduce_scatter(sent, axis.size, axis.group))
                moving |= zip([i for i, _ in due], flat.split_scattered(got, parts, axis), strict=True)
            for axis in dict.fromkeys(axis for _, way in ways for axis in way.reduce):
                summed = [i for i, way in ways if axis in way.reduce]
                shapes = [moving[i].shape for i in summed]
                sent = flat.join([moving[i] for i in summed], dtype)
                got = private.wait(private.start_all_reduce(sent, "sum", axis.group))
                moving |= zip(summed, flat.split(got, shapes), strict=True)
        held = self._held()
        return [moving[i].to(held[i].dtype).contiguous() for i in which]


class _Way(NamedTuple):
    """A weight's way in numbers: its whole shape, one `Part` for each axis to gather (major first), the axes to sum."""

    shape: tuple[int, ...]
    held: tuple[int, ...]
    dims: Mapping[str, int]
    stages: Mapping[Ranks, Part]
    reduce: tuple[Ranks, ...]

    @classmethod
    def of(cls, mesh: Mesh, weight: Weight, shape: tuple[int, ...]) -> _Way:
        stages: dict[Ranks, Part] = {}
        held = shape
        for name, dim in weight.gather.items():
            axis = mesh[name]
            if axis.size > 1:
                stages[axis] = Part(held, dim % len(shape))
                held = stages[axis].held(axis)
        sums = tuple(mesh[name] for name in weight.reduce if mesh[name].size > 1)
        return cls(shape, held, weight.gather, stages, sums)


class _Group:
    """Weights of one dtype on their way into one flat buffer; the first gather starts at once."""

    def __init__(self, dtype: torch.dtype, weights: list[tuple[int, _Way, Tensor]]) -> None:
        self.which = [i for i, _, _ in weights]
        self._dtype = dtype
        self._ways = {i: way for i, way, _ in weights}
        self._now = {i: held for i, _, held in weights}
        self._axes = _axes([(i, way) for i, way, _ in weights])[::-1]
        self._moving = self._send(self._axes[0]) if self._axes else None

    def _due(self, axis: Ranks) -> dict[int, Part]:
        return {i: way.stages[axis] for i, way in self._ways.items() if axis in way.stages}

    def _send(self, axis: Ranks) -> Tensor:
        due = self._due(axis)
        sent = flat.join_parts([self._now[i] for i in due], list(due.values()), axis, self._dtype)
        return private.start_all_gather(sent, axis.size, axis.group)

    def land(self) -> tuple[list[int], Tensor]:
        """Wait, send what is left to send, and lay out: the weights' offsets and the flat buffer."""
        begins = flat.aligned_offsets([self._ways[i].shape for i in self.which], self._dtype)
        buffer = next(iter(self._now.values())).new_empty(begins[-1], dtype=self._dtype)
        places = {i: _view(buffer, b, self._ways[i].shape) for i, b in zip(self.which, begins, strict=False)}
        for axis in self._axes:
            moving = self._moving if self._moving is not None else self._send(axis)
            self._moving = None
            due = self._due(axis)
            wholes = [self._whole(i, part, places[i]) for i, part in due.items()]
            flat.split_gathered(private.wait(moving), list(due.values()), axis, wholes)
            self._now |= zip(due, wholes, strict=True)
        for i, place in places.items():
            if not self._ways[i].stages:
                place.copy_(self._now[i])
        self._now = {}
        return begins, buffer

    def _whole(self, i: int, part: Part, place: Tensor) -> Tensor:
        """Where a gather of a weight goes: to its place, unless another axis is still to be gathered."""
        return place if part is next(iter(self._ways[i].stages.values())) else place.new_empty(part.shape)

    def drop(self) -> None:
        if self._moving is not None:
            private.wait(self._moving)


class _Started(NamedTuple):
    """A gather on its way, of parameters as they were at these versions."""

    versions: tuple[int, ...]
    groups: list[_Group]

    def drop(self) -> None:
        for group in self.groups:
            group.drop()


class _Saved(NamedTuple):
    """What autograd keeps in place of a gathered weight, or of any view of it."""

    group: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    dtype: torch.dtype


class _Use:
    """One forward through a bucket: hides gathered weights from autograd, and gathers them again once for backward."""

    def __init__(self, bucket: Bucket, buffers: list[tuple[list[int], list[int], Tensor]], versions: tuple[int, ...]):
        self._bucket = bucket
        self._versions = versions
        self._open = {private.storage_id(buffer): group for group, (_, _, buffer) in enumerate(buffers)}
        self._again: list[Tensor] | None = None
        self._packed = False
        bucket._uses.add(self)

    @property
    def waiting(self) -> bool:
        """Backward will ask for weights that are not there yet."""
        return self._packed and self._again is None

    def close(self) -> None:
        """The block has ended: the memory of its weights may be another's now."""
        self._open = {}

    def pack(self, x: Tensor) -> Tensor | _Saved:
        group = self._open.get(private.storage_id(x))
        if group is None:
            return x
        self._packed = True
        return _Saved(group, tuple(x.shape), x.stride(), x.storage_offset(), x.dtype)

    def unpack(self, saved: Tensor | _Saved) -> Tensor:
        if not isinstance(saved, _Saved):
            return saved
        if self._again is None:
            self._gather_again()
        assert self._again is not None, "the weights were just gathered"
        buffer = self._again[saved.group]
        buffer = buffer if buffer.dtype == saved.dtype else buffer.view(saved.dtype)
        return buffer.as_strided(saved.size, saved.stride, saved.offset)

    def _gather_again(self) -> None:
        bucket = self._bucket
        if bucket._versions() != self._versions:
            raise StaleWeights(
                f"cannot run backward: parameters of {', '.join(bucket._names)} were changed after the forward\n"
                f"  why  gathered weights are not kept, and gathering them now would bring other values\n"
                f"  try  backward before the optimizer's step"
            )
        with torch.no_grad():
            self._again = [buffer for _, _, buffer in bucket._take()]
            bucket._prefetch_back()

    def free(self) -> None:
        """All gradients have arrived; another backward would gather anew."""
        self._again = None
        self._packed = False


class _Deliver(torch.autograd.Function):
    """Parameters → weights as views that were made before; backward reduces all gradients at once."""

    @staticmethod
    def forward(ctx: Any, bucket: Bucket, use: _Use, views: list[Tensor], *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.bucket = bucket
        ctx.use = use
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for x, p in zip(views, parameters, strict=True) if not p.requires_grad))
        return tuple(views)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        bucket = ctx.bucket
        ctx.use.free()
        which = [i for i, gradient in enumerate(gradients) if gradient is not None and ctx.needs_input_grad[3 + i]]
        found: list[Tensor | None] = [None] * len(gradients)
        held = bucket._held()
        for i, x in zip(which, bucket._reduced(which, [gradients[i] for i in which]), strict=True):
            found[i] = private.distributed_like(x, held[i]) if private.is_distributed(held[i]) else x
        return None, None, None, *found


@cache
def _weights_type(names: tuple[str, ...]) -> type:
    """One named tuple type for all buckets whose weights have these names, so that they share compiled code."""
    return namedtuple("Weights", names)


def _axes(ways: Sequence[tuple[int, _Way]]) -> list[Ranks]:
    """The axes to gather, major first."""
    return list(dict.fromkeys(axis for _, way in ways for axis in way.stages))


def _by_dtype(moving: Mapping[int, Tensor], dtype: torch.dtype | None) -> dict[torch.dtype, list[int]]:
    groups: dict[torch.dtype, list[int]] = {}
    for i, x in moving.items():
        groups.setdefault(dtype or x.dtype, []).append(i)
    return groups


def _view(buffer: Tensor, begin: int, shape: tuple[int, ...]) -> Tensor:
    length = torch.Size(shape).numel()
    return buffer[begin : begin + length].view(shape)
