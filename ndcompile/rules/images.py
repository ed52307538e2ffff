"""What is done to planes, volumes and signals: resized, pooled with places, cut in windows, sampled, upconvolved.

A window or a sample needs its neighbours, so space is whole; the batch and (mostly) channels are free.
"""

from __future__ import annotations

from ndcompile.rules.layers import convolution
from ndcompile.rules.notation import Call, Rule, Signature, line
from ndcompile.size import ONE, Shape, Size

UNBATCHED = 2
"""Dims of windows that are no batch's: their elements, and their places."""


def resized(call: Call) -> Signature:
    """`[n, c, …]` at other places, each a fixed combination of those that are there."""
    source, target = _space(call.operands[0][2:], "x"), _space(call.output[2:], "y")
    return line(f"n c {source} -> n c {target}")(call)


def picked_from_planes(dims: int) -> Rule:
    """A pool that says where it found the largest: two results of one form."""
    source, target = (" ".join(f"{letter}{d}!" for d in range(dims)) for letter in "xy")
    return line(f"f(* {source}) -> * {target}")


def put_in_planes(dims: int) -> Rule:
    """`max_unpool`: linear in the values, whose places are given."""
    source, target = (" ".join(f"{letter}{d}!" for d in range(dims)) for letter in "xy")
    return line(f"(* {source})/(* {source}) -> * {target}")


def windows(call: Call) -> Signature:
    """`im2col`: a channel's windows are the minor part of dim 1, so each rank makes those of its own channels."""
    return _in_windows(call, planes=call.operands[0], columns=call.output, cuts=True)


def from_windows(call: Call) -> Signature:
    """`col2im`: the sum of what windows say of a place, channel by channel."""
    return _in_windows(call, planes=call.output, columns=call.operands[0], cuts=False)


def _in_windows(call: Call, planes: Shape, columns: Shape, cuts: bool) -> Signature:
    channels = planes[-3]
    sizes: dict[str, Size] = {"c": channels, "k": columns[-2] // channels, "l": columns[-1]}
    sizes |= {f"x{d}": n for d, n in enumerate(planes[-2:])}
    batch = ("n",) if len(columns) > UNBATCHED else ()
    if batch:
        sizes["n"] = planes[0]

    def named(*dims: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(f for f in factors if sizes[f] != ONE) for factors in dims)

    lead = [batch] if batch else []
    wide, cut = named(*lead, ("c",), ("x0",), ("x1",)), named(*lead, ("c", "k"), ("l",))
    given, made = (wide, cut) if cuts else (cut, wide)
    whole = frozenset({"k", "l", "x0", "x1"})
    return Signature((given,), made, sizes, ((0,),), frozenset({0}), whole)


def sampled(call: Call) -> Signature:
    """`grid_sampler`: linear in the planes; each place of the grid, whose coordinates are whole, is for itself."""
    space = _space(call.operands[0][2:], "x")
    places = " ".join(f"u{d}" for d in range(len(call.operands[0]) - 2))
    return line(f"(n c {space})/(n {places} g!) -> n c {places}")(call)


def _space(shape: Shape, letter: str) -> str:
    return " ".join(f"{letter}{d}!" for d in range(len(shape)))


RESIZED = (
    *(f"upsample_nearest{n}d" for n in (1, 2, 3)),
    *(f"_upsample_nearest_exact{n}d" for n in (1, 2, 3)),
    *("upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d"),
    *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
)

RULES: dict[str, Rule] = {
    **{f"aten.{name}.vec": resized for name in RESIZED},
    **{f"aten.max_pool{n}d_with_indices.default": picked_from_planes(n) for n in (2, 3)},
    **{f"aten.adaptive_max_pool{n}d.default": picked_from_planes(n) for n in (1, 2, 3)},
    **{f"aten.max_unpool{n}d.default": put_in_planes(n) for n in (2, 3)},
    "aten.im2col.default": windows,
    "aten.col2im.default": from_windows,
    "aten.grid_sampler.default": sampled,
    "aten.conv_transpose1d.default": convolution(transposed=True),
    "aten.conv_transpose2d.input": convolution(transposed=True),
    "aten.conv_transpose3d.input": convolution(transposed=True),
}
