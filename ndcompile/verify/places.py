"""Where the parts of a value lie on a mesh: what each rank must hold, said without the compiler's or runtime's code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ndcompile.mesh import MeshSpec
from ndcompile.placement import Layout
from ndcompile.verify.arithmetic import Domain


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


def part(whole: Tensor, dims: Sequence[Sequence[str]], mesh: MeshSpec, rank: int) -> Tensor:
    """What a rank holds of a value that is sharded so."""
    return whole[cut(whole.shape, dims, mesh, mesh.coordinate(rank))]


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
    values: Sequence[Tensor], whole: Tensor, layout: Layout, mesh: MeshSpec, domain: Domain, bar: float, least: float
) -> int | None:
    """The first rank whose tensor, in this layout, is not its part of the value; none if all are."""
    if any(v.shape != values[0].shape for v in values) and any(p.kind == "P" for _, p in layout.rest):
        return 0
    least = max(least, norm(whole))
    for rank, value in enumerate(summed(values, layout, mesh, domain)):
        right = part(whole, layout.dims, mesh, rank)
        if value.shape != right.shape or not domain.distance(value, right, least) <= bar:
            return rank
    return None


def norm(x: Tensor) -> float:
    return float(x.detach().double().nan_to_num(0, 0, 0).norm()) if x.numel() else 0.0
