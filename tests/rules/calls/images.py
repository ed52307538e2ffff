"""Planes, volumes and signals: calls of each rule's op, drawn; sizes up and down, by number and by factor."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from tests.rules.case import Case, Spec, case, f
from tests.rules.draw import Calls, Draw, calls, number, sizes

BOOL = st.booleans()
ALIGNED = ("linear", "bilinear", "bicubic")
"""Ways that say whether corners are the places that stay."""


def planes(draw: Draw, dims: int, low: int = 2, high: int = 5) -> list[Any]:
    """A batch, channels, space."""
    space = [draw(st.integers(low, high)) for _ in range(dims)]
    return [*sizes(draw, 1, 1, low=1, high=6), number(draw, 1, 6), *space]


def resized(draw: Draw, op: str) -> Case:
    dims = next(n for n in (1, 2, 3) if f"{n}d" in op)
    shape = planes(draw, dims, high=4)
    aligned = [draw(BOOL)] if any(way in op for way in ALIGNED) else []
    factors = [draw(st.sampled_from([2.0, 1.5, 0.5])) for _ in range(dims)]
    if draw(BOOL):
        return case(op, f(*shape), None, *aligned, factors)
    return case(op, f(*shape), [draw(st.integers(1, 6)) for _ in range(dims)], *aligned, None)


def picked(draw: Draw, op: str) -> Case:
    dims = next(n for n in (1, 2, 3) if f"{n}d" in op)
    shape = planes(draw, dims)
    if "adaptive" in op:
        return case(op, f(*shape), [draw(st.integers(1, 2))] * dims)
    return case(op, f(*shape), [2] * dims, [1 + draw(BOOL)] * dims, [draw(st.integers(0, 1))] * dims)


def put(draw: Draw, op: str) -> Case:
    """Each value at a place of its own."""
    dims = next(n for n in (2, 3) if f"{n}d" in op)
    shape = planes(draw, dims, high=3)
    places = 2**dims

    def make(given: tuple[int, ...]) -> torch.Tensor:
        count = torch.Size(given[2:]).numel()
        rows = [torch.randperm(count * places)[:count] for _ in range(given[0] * given[1])]
        return torch.stack(rows).view(given)

    target = [2 * n for n in shape[2:]]
    more = [[2] * dims, [0] * dims] if dims == 3 else []
    return case(op, f(*shape), Spec(tuple(shape), make, False), target, *more)


def windows(draw: Draw, op: str) -> Case:
    shape = planes(draw, 2, low=3)
    return case(op, f(*shape[draw(st.integers(0, 1)) :]), *window(draw))


def from_windows(draw: Draw, op: str) -> Case:
    batch, channels, height, width = planes(draw, 2, low=3)
    given = window(draw)
    whole = torch.ops.aten.im2col(torch.zeros(1, channels, height, width), *given)
    lead = [batch] if draw(BOOL) else []
    columns = channels * (given[0][0] * given[0][1])
    return case(op, f(*lead, columns, whole.shape[2]), [height, width], *given)


def window(draw: Draw) -> list[list[int]]:
    """Of windows the size, how far apart their elements are, the zeros around, how far apart they are."""
    return [[draw(st.integers(1, 3)), 2], [1, 1], [draw(st.integers(0, 1)), 1], [1 + draw(BOOL), 1]]


def sampled(draw: Draw, op: str) -> Case:
    dims = draw(st.sampled_from([2, 2, 3]))
    batch, channels, *space = planes(draw, dims, high=4)
    places = [draw(st.integers(1, 4)) for _ in range(dims)]
    options = draw(st.integers(0, 1)), draw(st.integers(0, 2)), draw(BOOL)
    return case(op, f(batch, channels, *space), f(batch, *places, dims), *options)


def transposed_convolution(draw: Draw, op: str) -> Case:
    dims = next(n for n in (1, 2, 3) if f"{n}d" in op)
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    each, out = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 3]))
    batch, _, *space = planes(draw, dims, low=1, high=3)
    lead = [batch] if draw(BOOL) else []
    kernel = f(groups * each, out, *(draw(st.integers(1, 3)) for _ in range(dims)))
    bias = f(groups * out) if draw(BOOL) else None
    stride = 1 + draw(BOOL)
    return case(
        op, f(*lead, groups * each, *space), kernel, bias, [stride] * dims, [0] * dims, [stride - 1] * dims, groups
    )


SPACES = (1, 2, 3)
EXACT = " ".join(f"upsample_nearest{n}d.vec _upsample_nearest_exact{n}d.vec" for n in SPACES)
MIXED = (
    "upsample_linear1d.vec upsample_bilinear2d.vec upsample_bicubic2d.vec upsample_trilinear3d.vec "
    "_upsample_bilinear2d_aa.vec _upsample_bicubic2d_aa.vec"
)

CALLS: Calls = {
    **calls(f"{EXACT} {MIXED}", resized),
    **calls("max_pool2d_with_indices.default max_pool3d_with_indices.default", picked),
    **calls(" ".join(f"adaptive_max_pool{n}d.default" for n in SPACES), picked),
    **calls("max_unpool2d.default max_unpool3d.default", put),
    **calls("im2col.default", windows),
    **calls("col2im.default", from_windows),
    **calls("grid_sampler.default", sampled),
    **calls("conv_transpose1d.default conv_transpose2d.input conv_transpose3d.input", transposed_convolution),
}
