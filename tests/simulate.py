"""All ranks of a mesh in one process: a list with one tensor a rank, what it denotes, and each primitive on it.

Nothing here knows the compiler's tables: the tests compare them with this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ndcompile.mesh import MeshSpec
from ndcompile.placement import Layout, P, Placement
from ndcompile.route import Move

Ranks = list[Tensor]
REDUCE: dict[str, Callable[..., Tensor]] = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}


class Illegal(ValueError):
    """The ranks' tensors cannot have the placement."""


def denote(xs: Sequence[Tensor], placement: Placement) -> Tensor:
    """The value that the tensors of one axis's ranks stand for."""
    if placement.kind == "S":
        assert placement.dim is not None
        return torch.cat(list(xs), placement.dim)
    if placement.kind == "P":
        return REDUCE[placement.op or ""](torch.stack(list(xs)), 0)
    if not all(torch.equal(x, xs[0]) for x in xs):
        raise Illegal(f"unequal tensors cannot be {placement}")
    return xs[0]


def deal(value: Tensor, placement: Placement, ranks: int) -> Ranks:
    """Tensors that stand for a value; the split of a partial one is random."""
    if placement.kind == "S":
        assert placement.dim is not None
        return list(value.chunk(ranks, placement.dim))
    if placement.kind != "P":
        return [value.clone() for _ in range(ranks)]
    noise = torch.randint(-9, 10, (ranks, *value.shape)).to(value)
    if placement.op == "sum":
        return [value - noise[1:].sum(0), *noise[1:]]
    sign = 1 if placement.op == "max" else -1
    return [value - sign * (x.abs() if r else 0) for r, x in enumerate(noise)]


def identity(xs: Ranks) -> Ranks:
    return list(xs)


def first(xs: Ranks) -> Ranks:
    return [x if r == 0 else torch.zeros_like(x) for r, x in enumerate(xs)]


def chunk(xs: Ranks, dim: int) -> Ranks:
    return [x.chunk(len(xs), dim)[r] for r, x in enumerate(xs)]


def pad(xs: Ranks, dim: int) -> Ranks:
    return [torch.cat([x if r == q else torch.zeros_like(x) for q in range(len(xs))], dim) for r, x in enumerate(xs)]


def all_reduce(xs: Ranks, op: str = "sum") -> Ranks:
    return [denote(xs, P(op)) for _ in xs]


def all_gather(xs: Ranks, dim: int) -> Ranks:
    return [torch.cat(xs, dim) for _ in xs]


def reduce_scatter(xs: Ranks, dim: int) -> Ranks:
    return chunk(all_reduce(xs), dim)


def all_to_all(xs: Ranks, joined: int, cut: int) -> Ranks:
    return chunk(all_gather(xs, joined), cut)


def perform(primitive: str, source: Placement, target: Placement, xs: Ranks) -> Ranks:
    """A primitive between two placements: what a shard's dim and a reduction's op are follows from them."""
    if primitive in ("identity", "first"):
        return {"identity": identity, "first": first}[primitive](xs)
    if primitive == "all_reduce":
        return all_reduce(xs, source.op or "sum")
    dims = [p.dim for p in (source, target) if p.dim is not None]
    if primitive == "all_to_all":
        if len(dims) < 2:
            raise Illegal("an all-to-all is between two shards")
        return all_to_all(xs, *dims)
    shard = target if primitive in ("chunk", "reduce_scatter") else source
    by_name = {"chunk": chunk, "pad": pad, "all_gather": all_gather, "reduce_scatter": reduce_scatter}
    return by_name[primitive](xs, shard.dim if shard.dim is not None else (*dims, 0)[0])


def backward(primitive: str, source: Placement, target: Placement, cotangents: Ranks) -> Ranks:
    """The backward side of the conversion from source to target: from the target's gradient to the source's."""
    return perform(primitive, target.dual, source.dual, cotangents)


def denote_mesh(xs: Ranks, layout: Layout, mesh: MeshSpec) -> Tensor:
    """The value that the tensors of a mesh's ranks stand for: axes fall away one by one, the last dealt first."""
    for axis in reversed(_dealt(layout, mesh)):
        xs = [denote([xs[r] for r in group], layout.on(axis)) for group in mesh.groups(axis)]
        mesh = MeshSpec(tuple(a for a in mesh.axes if a.name != axis))
    return xs[0]


def deal_mesh(value: Tensor, layout: Layout, mesh: MeshSpec) -> Ranks:
    """Tensors on a mesh's ranks that stand for a value."""
    xs, done = [value], MeshSpec(())
    for axis in _dealt(layout, mesh):
        before, done = done, MeshSpec(tuple(a for a in mesh.axes if a in done.axes or a.name == axis))
        parts = [deal(x, layout.on(axis), mesh.size(axis)) for x in xs]
        places = [done.coordinate(rank) for rank in range(done.world_size)]
        xs = [parts[before.rank(place)][place[axis]] for place in places]
    return xs


def _dealt(layout: Layout, mesh: MeshSpec) -> list[str]:
    """Partial axes, then shards, a dim's major axis first, then copies: those are equal in everything before."""
    partial = [axis for axis in mesh.names if layout.on(axis).kind == "P"]
    shards = [axis for axes in layout.dims for axis in axes]
    return partial + shards + [axis for axis in mesh.names if layout.on(axis).whole]


def convert(xs: Ranks, move: Move, mesh: MeshSpec) -> Ranks:
    """The forward side of a move, on each group of its flattened axes."""
    return _on_groups(xs, move, mesh, lambda part: perform(move.conversion.forward, move.source, move.target, part))


def convert_back(xs: Ranks, move: Move, mesh: MeshSpec) -> Ranks:
    """The backward side of a move, on each group of its flattened axes."""
    return _on_groups(xs, move, mesh, lambda part: backward(move.conversion.backward, move.source, move.target, part))


def _on_groups(xs: Ranks, move: Move, mesh: MeshSpec, function: Callable[[Ranks], Ranks]) -> Ranks:
    out = list(xs)
    for group in mesh.groups(*move.axes):
        for rank, x in zip(group, function([xs[r] for r in group]), strict=True):
            out[rank] = x
    return out


def numbers(*shape: int) -> Tensor:
    """Random whole numbers as float64: sums of them are exact."""
    return torch.randint(-99, 100, shape).double()
