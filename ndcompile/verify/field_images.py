"""What is done to planes and signals in a prime field, forward and backward: resized, pooled, sampled, transformed.

An op that is linear with fixed numbers is a matrix, which the op itself shows on the unit vectors. Its entries become
elements as every constant does: exact where they are small rationals, else random ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ndcompile.verify.domain import NotInDomain
from ndcompile.verify.field_layers import _max_pool_backward
from ndcompile.verify.field_ops import _matmul

if TYPE_CHECKING:
    from ndcompile.verify.field import Field

LARGEST = 1 << 24
"""The most entries of a matrix."""

Meaning = Callable[..., Any]


def _in_planes(name: str, dims: int, adapted: Callable[[Any, int], Any] = lambda first, count: first) -> Meaning:
    """An op on the last dims, linear with fixed numbers; `adapted` makes the argument after the planes fit as many of
    them as there are unit vectors.
    """
    op = getattr(torch.ops.aten, name)

    def run(d: Field, x: Tensor, *args: Any, **named: Any) -> Tensor:
        lead, shape = x.shape[:-dims], x.shape[-dims:]
        count = math.prod(shape)
        units = torch.eye(count, dtype=torch.float64, device=x.device).view(count, 1, *shape)
        if count * count > LARGEST:
            raise NotInDomain(f"{name} of planes of {count} places")
        args = _with_first(args, name, lambda first: adapted(first, count))
        images = op(units, *args, **named)
        if images.numel() > LARGEST:
            raise NotInDomain(f"{name} of planes of {count} places")
        matrix = d.encode(images.flatten(1))
        return _matmul(d, x.reshape(-1, count), matrix).view(*lead, *images.shape[2:])

    return run


def _with_first(args: tuple[Any, ...], name: str, change: Callable[[Any], Any]) -> tuple[Any, ...]:
    """For a backward the argument that tells of what size the input was: the second of a resizing, else the first."""
    at = 1 if "upsample" in name and name.endswith("backward") else 0
    return (*args[:at], change(args[at]), *args[at + 1 :]) if len(args) > at else args


def _of_size(size: Sequence[int], count: int) -> list[int]:
    return [count, 1, *size[2:]]


def _of_shape(x: Tensor, count: int) -> Tensor:
    return x.new_zeros(count, 1, *x.shape[2 if x.dim() > 3 else 1 :])


def _adaptive_max_pool(dims: int) -> Meaning:
    pool = getattr(torch.ops.aten, f"adaptive_max_pool{dims}d")

    def run(d: Field, x: Tensor, size: Sequence[int]) -> tuple[Tensor, Tensor]:
        _, index = pool(d.order(x), size)
        return x.flatten(-dims).gather(-1, index.flatten(-dims)).view(index.shape), index

    return run


def _waves(d: Field, count: int, forward: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Real and imaginary parts of a Fourier transform's matrix, as elements; each number is made once."""
    places = torch.arange(count, device=device)
    turn = (places.unsqueeze(0) * places.unsqueeze(1)) % count
    angle = 2 * math.pi * places.double() / count
    cosine, sine = (d.encode(_rounded(table(angle)))[turn] for table in (torch.cos, torch.sin))
    return cosine, d.mod(-sine) if forward else sine


def _rounded(x: Tensor) -> Tensor:
    """Zeros, ones and halves exactly, as mathematics has them."""
    near = (2 * x).round() / 2
    return torch.where((x - near).abs() < 1e-12, near, x)


def _transform(d: Field, real: Tensor, imaginary: Tensor, dims: Sequence[int], forward: bool) -> tuple[Tensor, Tensor]:
    for dim in dims:
        cosine, sine = _waves(d, real.shape[dim], forward, real.device)
        one, two = real.movedim(dim, -1), imaginary.movedim(dim, -1)
        real = d.mod(_matmul(d, one, cosine) - _matmul(d, two, sine)).movedim(-1, dim)
        imaginary = d.mod(_matmul(d, one, sine) + _matmul(d, two, cosine)).movedim(-1, dim)
    return real, imaginary


def _scale(d: Field, sizes: Sequence[int], normalization: int) -> float:
    """None, one over the root of the size, or one over the size."""
    count = math.prod(sizes)
    return d.number((1.0, 1 / math.sqrt(count), 1 / count)[normalization])


def _complex_to_complex(d: Field, x: Tensor, dims: Sequence[int], normalization: int, forward: bool) -> Tensor:
    real, imaginary = torch.view_as_real(x).unbind(-1)
    parts = _transform(d, real, imaginary, dims, forward)
    scale = _scale(d, [x.shape[i] for i in dims], normalization)
    return torch.complex(*(d.mod(part * scale) for part in parts))


def _real_to_complex(d: Field, x: Tensor, dims: Sequence[int], normalization: int, onesided: bool) -> Tensor:
    found = _complex_to_complex(d, torch.complex(x, torch.zeros_like(x)), dims, normalization, True)
    return found.narrow(dims[-1], 0, x.shape[dims[-1]] // 2 + 1) if onesided else found


def _complex_to_real(d: Field, x: Tensor, dims: Sequence[int], normalization: int, last: int) -> Tensor:
    """The half that is left out is the conjugate of the other, in each dim from the other end."""
    *others, dim = dims
    real, imaginary = torch.view_as_real(x).unbind(-1)
    real, imaginary = _transform(d, real, imaginary, others, False)
    cosine, sine = (part[: x.shape[dim]] for part in _waves(d, last, False, x.device))
    twice = torch.tensor([1.0 if i in (0, last / 2) else 2.0 for i in range(x.shape[dim])], device=x.device).double()
    parts = (_matmul(d, d.mod(part.movedim(dim, -1) * twice), wave)
             for part, wave in ((real, cosine), (imaginary, sine)))  # fmt: skip
    one, two = parts
    scale = _scale(d, [last if i == dim else x.shape[i] for i in dims], normalization)
    return d.mod(d.mod(one - two) * scale).movedim(-1, dim)


RESIZED = {"upsample_linear1d": 1, "upsample_bilinear2d": 2, "upsample_bicubic2d": 2, "upsample_trilinear3d": 3,
           "_upsample_bilinear2d_aa": 2, "_upsample_bicubic2d_aa": 2}  # fmt: skip
AVERAGED = {"_adaptive_avg_pool2d": 2, "_adaptive_avg_pool3d": 3, "avg_pool3d": 3}

IMAGES: dict[str, Meaning] = {
    **{name: _in_planes(name, dims) for name, dims in (RESIZED | AVERAGED).items()},
    **{f"{name}_backward": _in_planes(f"{name}_backward", dims, _of_size) for name, dims in RESIZED.items()},
    **{f"{name}_backward": _in_planes(f"{name}_backward", dims, _of_shape) for name, dims in AVERAGED.items()},
    **{f"adaptive_max_pool{n}d": _adaptive_max_pool(n) for n in (2, 3)},
    **{f"adaptive_max_pool{n}d_backward": _max_pool_backward(n) for n in (2, 3)},
    "_fft_c2c": _complex_to_complex,
    "_fft_r2c": _real_to_complex,
    "_fft_c2r": _complex_to_real,
}
