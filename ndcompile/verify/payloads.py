"""Every conversion of a program on real process groups, with whole numbers that are exact in any order of summation.

What each rank must get is worked out from seeds, without communication and without the runtime's code.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ndcompile import runtime
from ndcompile.bind import execute, transport_of
from ndcompile.errors import CompileError
from ndcompile.mesh import MeshSpec
from ndcompile.placement import Layout, Placement
from ndcompile.program import Program
from ndcompile.rules.registry import arguments
from ndcompile.runtime import Mesh, Weight
from ndcompile.runtime.manifest import as_dtype
from ndcompile.verify.places import cut, entries, part
from ndcompile.verify.sample import size_at

LARGEST = 1000


@dataclass(frozen=True)
class Payload:
    """A conversion as a program calls it: on values of this layout, whole shape and dtype."""

    name: str
    axes: tuple[str, ...]
    options: tuple[tuple[str, Any], ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: Layout
    target: Layout

    @property
    def head_tail(self) -> tuple[bool, bool]:
        """Whether a dim that the conversion cuts or joins lies in that order on its ranks: before and after."""
        options = dict(self.options)
        turned = bool(options.get("balanced", False))
        if self.name == "in_order":
            return True, False
        return turned, bool(options.get("balanced_target", False)) if self.name == "all_to_all" else turned

    def __str__(self) -> str:
        options = "".join(f", {key}={value}" for key, value in self.options)
        return f"{self.name}({', '.join(self.axes)}{options}) of {self.dtype} {list(self.shape)}, {self.source}"


def payloads(program: Program, sizes: Mapping[str, int]) -> list[Payload]:
    """Each distinct conversion of the program at these sizes of its symbols."""
    found = dict.fromkeys(
        _payload(node, sizes)
        for node in program.folded.graph.nodes
        if node.op == "call_function" and "move" in node.meta
    )
    return list(found)


def _payload(node: fx.Node, sizes: Mapping[str, int]) -> Payload:
    given = arguments(node)
    value, axes = given.pop("x"), given.pop("axis").names
    shape = tuple(n if isinstance(n, int) else size_at(n, sizes) for n in value.meta["sizes"])
    options = tuple((key, _number(v, sizes)) for key, v in given.items() if v is not None and v is not False)
    source, target = value.meta.get("stored", value.meta["layout"]), node.meta["layout"]
    name: str = node.meta["move"].conversion.name
    return Payload(name, axes, options, shape, value.meta["dtype"], source, target)


def _number(value: Any, sizes: Mapping[str, int]) -> Any:
    """An option as it is called: a size that the graph has as a node is worked out."""
    if not isinstance(value, fx.Node):
        return value
    return size_at(value.meta["size"], sizes)


# ---- what mathematics says -----------------------------------------------------------------------------------------


def value_of(locals_: Sequence[Tensor], placement: Placement, head_tail: bool = False) -> Tensor:
    """The value that the ranks of one axis hold together."""
    if placement.kind in "RI":
        return locals_[0]
    if placement.kind == "S":
        assert placement.dim is not None
        if not head_tail:
            return torch.cat(list(locals_), placement.dim)
        halves = [x.chunk(2, placement.dim) for x in locals_]
        return torch.cat([*(head for head, _ in halves), *(tail for _, tail in reversed(halves))], placement.dim)
    stacked = torch.stack(list(locals_))
    if placement.op in ("max", "min"):
        return stacked.amax(0) if placement.op == "max" else stacked.amin(0)
    return stacked.sum(0, dtype=stacked.dtype)


def held_of(
    value: Tensor, source: Placement, target: Placement, place: int, ranks: int, head_tail: bool = False
) -> Tensor:
    """What the rank at a place of the axis holds of the value after a conversion."""
    if target.kind in "RI":
        return value
    if target.kind == "S":
        assert target.dim is not None
        return value.index_select(
            target.dim, entries(torch.arange(value.shape[target.dim]), ranks, place, head_tail).to(value.device)
        )
    if source.kind != "S":
        return value if place == 0 else torch.zeros_like(value)
    assert source.dim is not None
    own = entries(torch.arange(value.shape[source.dim]), ranks, place, head_tail).to(value.device)
    return torch.zeros_like(value).index_copy(source.dim, own, value.index_select(source.dim, own))


# ---- on a rank -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drawn:
    """Draws whole numbers that are the same on every rank that asks alike."""

    mesh: MeshSpec
    device: torch.device
    addends: int

    def whole(self, shape: Sequence[int], dtype: torch.dtype, *of: object) -> Tensor:
        """Small whole numbers, such that sums over all ranks are exact in the dtype."""
        generator = torch.Generator().manual_seed(zlib.crc32(repr(of).encode()))
        if dtype == torch.bool:
            return torch.randint(0, 2, tuple(shape), generator=generator).bool().to(self.device)
        top = self._top(dtype)
        return torch.randint(-top, top + 1, tuple(shape), generator=generator).to(self.device, dtype)

    def _top(self, dtype: torch.dtype) -> int:
        if not dtype.is_floating_point:
            return LARGEST
        exact = round(2 / torch.finfo(dtype).eps)
        if exact < self.addends:
            raise CompileError(
                f"whole numbers of {dtype} cannot be added over {self.addends} ranks exactly",
                why=f"it has them up to {exact}", tries="a smaller mesh with the same axes",
            )  # fmt: skip
        return min(LARGEST, exact // self.addends)

    def local(self, shape: Sequence[int], dtype: torch.dtype, layout: Layout, rank: int, *of: object) -> Tensor:
        """What a rank holds of random values in a layout: on partial axes each rank has its own."""
        place = self.mesh.coordinate(rank)
        own = [place[axis] for axis, placement in layout.rest if placement.kind == "P" and axis in place]
        return part(self.whole(shape, dtype, *of, own), layout.dims, self.mesh, rank)


def differences(
    program: Program, mesh: Mesh, device: torch.device, sizes: Mapping[str, int], transport: str = "nccl"
) -> tuple[int, list[str]]:
    """How many conversions and buckets ran on this rank, and which of them gave what they must not.

    Buckets of weights travel by `transport`, which is `parallelize`'s.
    """
    drawn = Drawn(mesh.spec, device, mesh.spec.world_size)
    every = payloads(program, sizes)
    found = [text for payload in every for text in _differs(payload, mesh, drawn)]
    buckets = list(_buckets(program, mesh, drawn, transport))
    return len(every) + len(buckets), [*found, *(text for texts in buckets for text in texts)]


def _differs(payload: Payload, mesh: Mesh, drawn: Drawn) -> Iterator[str]:
    """Run one conversion both ways on this rank."""
    shape, dtype, options = payload.shape, payload.dtype, dict(payload.options)
    x = drawn.local(shape, dtype, payload.source, mesh.rank, "value", payload)
    gradients = dtype.is_floating_point and options.get("op", "sum") == "sum"
    x.requires_grad_(gradients)
    y = getattr(runtime, payload.name)(x, mesh[payload.axes], **options)
    if not same(y, _expected(payload, drawn, mesh.rank, "value", payload.source, payload.target, payload.head_tail)):
        yield f"{payload}: another value, forward"
    if gradients:
        g = drawn.local(shape, dtype, payload.target.dual, mesh.rank, "cotangent", payload)
        y.backward(g)
        ends, orders = (payload.target.dual, payload.source.dual), payload.head_tail[::-1]
        back = _expected(payload, drawn, mesh.rank, "cotangent", *ends, orders)
        if not same(x.grad, back):
            yield f"{payload}: another value, backward"


def _expected(
    payload: Payload, drawn: Drawn, rank: int, what: str, source: Layout, target: Layout, orders: tuple[bool, bool]
) -> Tensor:
    """What the conversion gives this rank, from what all ranks of its axes hold, head–tail or not before and after."""
    (group,) = [g for g in drawn.mesh.groups(*payload.axes) if rank in g]
    held = [drawn.local(payload.shape, payload.dtype, source, r, what, payload) for r in group]
    before, after = source.on(payload.axes[0]), target.on(payload.axes[0])
    value = value_of(held, before, orders[0])
    return held_of(value, before, after, group.index(rank), len(group), orders[1])


def same(a: Tensor | None, b: Tensor) -> bool:
    """Equal shapes, dtypes and bits."""
    if a is None or a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(_bits(a), _bits(b))


def _bits(x: Tensor) -> Tensor:
    return x.detach().contiguous().flatten().view(torch.uint8)


# ---- weights -------------------------------------------------------------------------------------------------------


def _buckets(program: Program, mesh: Mesh, drawn: Drawn, transport: str) -> Iterator[list[str]]:
    """Gather every distinct bucket of weights, and reduce its gradients."""
    plans = program.manifest.parameters
    whole = {name: drawn.whole(plan.shape, _dtype(plan.dtype), "parameter", name) for name, plan in plans.items()}
    held = {
        name: part(whole[name], plan.dims, drawn.mesh, mesh.rank).clone().requires_grad_(plan.requires_grad)
        for name, plan in plans.items()
    }
    root = execute(str(program), program.manifest, mesh, held, {}, transport=transport_of(transport, mesh))
    for title, weights in root.weights.items():
        yield _bucket_differs(program, title, root.gathered(title), _named(weights, ""), held, whole, mesh, drawn)
    for text, kinds in root.classes().items():
        path = text.replace("[", ".").partition(":")[0].rstrip("]")
        for kind in kinds:
            gathered, weights = root.block(path, kind).gathered(), _named(kind.weights, path)
            yield _bucket_differs(program, path, gathered, weights, held, whole, mesh, drawn)


def _dtype(text: str) -> torch.dtype:
    dtype = as_dtype(text)
    assert dtype is not None, "a parameter has a dtype"
    return dtype


def _named(weights: Mapping[str, Weight], path: str) -> dict[str, Weight]:
    """Weights by attribute, with the parameters' full names."""
    return {k: w._replace(name=w.name[1:] if w.name[0] == "/" else f"{path}.{w.name}") for k, w in weights.items()}


def _bucket_differs(
    program: Program, title: str, gathered: Any, weights: Mapping[str, Weight], held: Mapping[str, Tensor],
    whole: Mapping[str, Tensor], mesh: Mesh, drawn: Drawn,
) -> list[str]:  # fmt: skip
    found, compute = [], as_dtype(program.manifest.compute)
    with gathered as w:
        values = {key: getattr(w, key) for key in weights}
    for key, weight in weights.items():
        right = part(whole[weight.name], in_compute(program, weight.name), drawn.mesh, mesh.rank)
        if not same(values[key], right.to(values[key].dtype)) or values[key].dtype != (compute or right.dtype):
            found.append(f"weight '{weight.name}' of {title}: another value, gathered")
    moving = {key: value for key, value in values.items() if value.requires_grad}
    if moving:
        cotangents = [_cotangent(program, weights[k], v, drawn, mesh.rank) for k, v in moving.items()]
        torch.autograd.backward(list(moving.values()), cotangents)
    for key, value in moving.items():
        name = weights[key].name
        if not same(held[name].grad, _reduced(program, weights[key], value, drawn, mesh.rank).to(held[name].dtype)):
            found.append(f"weight '{name}' of {title}: another gradient")
        held[name].grad = None
    return found


ADDED = ("dp_replicate", "dp_shard", "cp")
"""The kinds of axes whose ranks work on other tokens each: a weight is whole there, its gradients are added."""


def in_compute(program: Program, name: str) -> list[tuple[str, ...]]:
    """How a parameter lies where it is used: whole on those axes."""
    mesh = program.mesh
    return [tuple(a for a in axes if mesh[a].kind not in ADDED) for axes in program.manifest.parameters[name].dims]


def _summed_over(program: Program, weight: Weight) -> tuple[str, ...]:
    """The axes over which a gradient is added: those, and others where the weight's line says so."""
    named = {*ADDED, *weight.reduce}
    return tuple(axis.name for axis in program.mesh.axes if axis.kind in named or axis.name in named)


def _cotangent(program: Program, weight: Weight, value: Tensor, drawn: Drawn, rank: int) -> Tensor:
    """A rank's own on the axes over which it is added, the same on others; its part where the weight is sharded."""
    place = drawn.mesh.coordinate(rank)
    own = [place[axis] for axis in _summed_over(program, weight)]
    shape = program.manifest.parameters[weight.name].shape
    whole = drawn.whole(shape, value.dtype, "weight's cotangent", weight.name, own)
    return part(whole, in_compute(program, weight.name), drawn.mesh, rank)


def _reduced(program: Program, weight: Weight, value: Tensor, drawn: Drawn, rank: int) -> Tensor:
    """The sum over those axes, and of it what the rank holds of the parameter."""
    mesh, dims = drawn.mesh, program.manifest.parameters[weight.name].dims
    axes = _summed_over(program, weight)
    (group,) = [g for g in mesh.groups(*axes) if rank in g] if axes else [[rank]]
    total = torch.stack([_cotangent(program, weight, value, drawn, r).double() for r in group]).sum(0)
    shape = program.manifest.parameters[weight.name].shape
    place = mesh.coordinate(rank)
    return total[_within(cut(shape, dims, mesh, place), cut(shape, in_compute(program, weight.name), mesh, place))]


def _within(inner: tuple[slice, ...], outer: tuple[slice, ...]) -> tuple[slice, ...]:
    """A place in a part, from its place in the whole."""
    return tuple(slice(i.start - o.start, i.stop - o.start) for i, o in zip(inner, outer, strict=True))
