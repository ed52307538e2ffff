"""Where the parts of a value lie on a mesh: what each rank must hold, said without the compiler's or runtime's code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ndcompile.mesh import MeshSpec
from ndcompile.placement import Layout
from ndcompile.verify.domain import Domain
from ndcompile.verify.precise import precise


def cut(
    shape: Sequence[int], dims: Sequence[Sequence[str]], mesh: MeshSpec, place: Mapping[str, int]
) -> tuple[slice, ...]:
    """The part of a whole of `shape` that lies at a place: torch.chunk along each axis of each dim, major first."""
    slices = []
    for size, axes in zip(shape, dims, strict=True):
        start, stop = 0, size
        for axis in axes:
            step = -(-(stop - start) // mesh.size(axis))
            first = min(start + place[axis] * step, stop)
            start, stop = first, min(first + step, stop)
        slices.append(slice(start, stop))
    return tuple(slices)


@dataclass(frozen=True)
class Lies:
    """What more is to be said of some axis on some dim: two chunks a rank, head–tail; and within parts of how many."""

    head_tail: bool = False
    parts: int = 1


ORDINARY = Lies()


def part(
    whole: Tensor,
    dims: Sequence[Sequence[str]],
    mesh: MeshSpec,
    rank: int,
    lies: Mapping[tuple[int, str], Lies] | None = None,
) -> Tensor:
    """What a rank holds of a value that is sharded so; `lies` says more of some dims and axes."""
    place = mesh.coordinate(rank)
    if not lies:
        return whole[cut(whole.shape, dims, mesh, place)]
    for dim, axes in enumerate(dims):
        index = torch.arange(whole.shape[dim])
        for axis in axes:
            said = (lies or {}).get((dim, axis), ORDINARY)
            rows = [entries(row, mesh.size(axis), place[axis], said.head_tail) for row in index.chunk(said.parts)]
            index = torch.cat(rows)
        if axes:
            whole = whole.index_select(dim, index.to(whole.device))
    return whole


def entries(index: Tensor, ranks: int, rank: int, head_tail: bool) -> Tensor:
    """Which entries of a dim a rank holds: a chunk, or one from the head and its mirror image from the tail."""
    if head_tail:
        chunks = index.tensor_split(2 * ranks)
        return torch.cat([chunks[rank], chunks[-1 - rank]])
    step = -(-len(index) // ranks)
    return index[min(rank * step, len(index)) : (rank + 1) * step]


def summed(values: Sequence[Tensor], layout: Layout, mesh: MeshSpec, domain: Domain) -> list[Tensor]:
    """The ranks' tensors with those of partial axes reduced: afterwards every rank holds its part of the value."""
    found = list(values)
    for axis, placement in layout.rest:
        if placement.kind == "P" and axis in mesh.names:
            for group in mesh.groups(axis):
                whole = domain.reduce(placement.op or "sum", [found[r] for r in group])
                for rank in group:
                    found[rank] = whole
    return found


def first_wrong(
    values: Sequence[Tensor],
    whole: Tensor,
    layout: Layout,
    mesh: MeshSpec,
    domain: Domain,
    bar: float,
    least: float,
    lies: Mapping[tuple[int, str], Lies] | None = None,
) -> int | None:
    """The first rank whose tensor, in this layout, is not its part of the value; none if all are."""
    if any(v.shape != values[0].shape for v in values) and any(p.kind == "P" for _, p in layout.rest):
        return 0
    least = max(least, norm(whole))
    for rank, value in enumerate(summed(values, layout, mesh, domain)):
        right = part(whole, layout.dims, mesh, rank, lies)
        if value.shape != right.shape or not domain.distance(value, right, least) <= bar:
            return rank
    return None


def norm(x: Tensor) -> float:
    return float(precise(x.detach()).nan_to_num(0, 0, 0).norm()) if x.numel() else 0.0
