"""What is done to planes and signals in the prime field: on whole numbers it is what mathematics says, and the way back
too; what mathematics gives no rational numbers for is linear still.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ndcompile.verify.domain import NotInDomain
from ndcompile.verify.field import Field
from ndcompile.verify.lockstep import run_one

Form = Callable[[Tensor], Tensor]
SCALE = 1 << 12
"""What all weights here are multiples of one over."""


def places(*size: int) -> Tensor:
    return torch.randperm(torch.Size(size).numel(), generator=torch.Generator().manual_seed(3)).view(size)


RATIONAL: dict[str, tuple[tuple[int, ...], Form]] = {
    "nearest": ((2, 3, 4, 4), lambda x: F.interpolate(x, size=(3, 6))),
    "nearest exact": ((2, 3, 4, 4), lambda x: F.interpolate(x, size=(3, 6), mode="nearest-exact")),
    "linear": ((2, 3, 4), lambda x: F.interpolate(x, scale_factor=2, mode="linear")),
    "bilinear": ((2, 3, 4, 4), lambda x: F.interpolate(x, scale_factor=2, mode="bilinear")),
    "bilinear to corners": ((2, 1, 3, 3), lambda x: F.interpolate(x, size=5, mode="bilinear", align_corners=True)),
    "trilinear": ((1, 3, 2, 3, 2), lambda x: F.interpolate(x, scale_factor=2, mode="trilinear")),
    "adaptive average": ((2, 3, 4, 8), lambda x: F.adaptive_avg_pool2d(x, (2, 4))),
    "adaptive average without a batch": ((3, 4, 4), lambda x: F.adaptive_avg_pool2d(x, 2)),
    "average of volumes": ((1, 2, 4, 4, 2), lambda x: F.avg_pool3d(x, 2)),
    "windows": ((2, 3, 4, 5), lambda x: F.unfold(x, (3, 2), padding=1, stride=(1, 2))),
    "from windows": ((2, 12, 9), lambda x: F.fold(x, (4, 4), 2)),
    "windows of a dim": ((2, 7, 3), lambda x: x.unfold(1, 3, 1)),
    "reflected": ((2, 3, 4), lambda x: F.pad(x, (2, 3), mode="reflect")),
    "replicated": ((2, 3, 4, 3), lambda x: F.pad(x, (1, 2, 0, 1), mode="replicate")),
    "put back": ((1, 1, 2, 2), lambda x: F.max_unpool2d(x, places(1, 1, 2, 2), [2, 2])),
    "Fourier": ((2, 3, 4), lambda x: torch.view_as_real(torch.fft.fft(x))),
    "Fourier in two dims": ((2, 4, 2), lambda x: torch.view_as_real(torch.fft.fftn(x, dim=(1, 2)))),
    "Fourier's half": ((2, 4, 3), lambda x: torch.view_as_real(torch.fft.rfft(x, dim=1))),
    "Fourier and back": ((2, 4, 4), lambda x: torch.fft.irfft2(torch.fft.rfft2(x).conj() * x[:, :, :3])),
}  # fmt: skip
ALSO: dict[str, tuple[tuple[int, ...], Form]] = {
    "bilinear, smoothed": ((2, 1, 4, 4), lambda x: F.interpolate(x, size=2, mode="bilinear", antialias=True)),
    "bicubic": ((2, 3, 4, 4), lambda x: F.interpolate(x, size=(5, 7), mode="bicubic")),
    "Fourier of five": ((2, 5), lambda x: torch.view_as_real(torch.fft.fft(x, norm="ortho"))),
}


def done(form: Form, x: Tensor, gradient: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = form(x)
    return [y.detach(), torch.autograd.grad(y, x, gradient)[0]]


def whole(*shape: int) -> Tensor:
    return torch.randint(-9, 10, shape).double()


@pytest.mark.parametrize("name", RATIONAL)
def test_it_is_what_mathematics_says(name: str) -> None:
    torch.manual_seed(0)
    shape, form = RATIONAL[name]
    x = whole(*shape)
    gradient = whole(*form(x).shape)
    right = done(form, x, gradient)
    inside = [z.remainder(Field.prime) for z in (x, gradient)]
    found = run_one(Field(0), lambda: done(form, *inside))
    for one, two in zip(found, right, strict=True):
        assert torch.equal((one * SCALE).remainder(Field.prime), (two * SCALE).round().remainder(Field.prime))


@pytest.mark.parametrize("name", [name for name in RATIONAL | ALSO if name != "Fourier and back"])
def test_it_is_linear(name: str) -> None:
    """All but the one that is a product of two transforms."""
    shape, form = (RATIONAL | ALSO)[name]
    domain = Field(1)
    x, y = domain.draw(shape), domain.draw(shape)
    ones = torch.ones_like(form(x))
    made = partial(done, form, gradient=ones)
    one, two, both = (run_one(domain, partial(made, z))[0] for z in (x, y, (x + y) % Field.prime))
    assert torch.equal((one + two).remainder(Field.prime), both) and bool(both.any())


def test_a_plane_of_very_many_places_is_not_said() -> None:
    x = torch.ones(1, 1, 80, 80, dtype=torch.float64)
    with pytest.raises(NotInDomain, match="planes of 6400 places"):
        run_one(Field(0), lambda: F.interpolate(x, scale_factor=2, mode="bilinear"))


INDEX = torch.tensor([[0, 1, 0, 2], [1, 1, 0, 0]])
REDUCED: dict[str, Form] = {
    "sum": lambda x: x[:, :3].scatter_reduce(1, INDEX, x, "sum", include_self=False),
    "mean": lambda x: x[:, :3].scatter_reduce(1, INDEX, x, "mean"),
    "mean of others": lambda x: x[:, :3].scatter_reduce(1, INDEX, x, "mean", include_self=False),
    "slices": lambda x: x[:, :3].index_reduce(1, INDEX[0], x, "mean"),
    "filled": lambda x: x.index_fill(1, INDEX[0][:2], 3),
    "prelu of ones": lambda x: F.prelu(x, torch.ones(1, dtype=torch.float64)),
    "trace": lambda x: torch.trace(x) * x,
}


@pytest.mark.parametrize("name", REDUCED)
def test_what_is_rational_of_others_is_what_mathematics_says(name: str) -> None:
    torch.manual_seed(0)
    x, scale = whole(2, 4), 12
    gradient = whole(*REDUCED[name](x).shape)
    right = done(REDUCED[name], x, gradient)
    inside = [z.remainder(Field.prime) for z in (x, gradient)]
    found = run_one(Field(0), lambda: done(REDUCED[name], *inside))
    for one, two in zip(found, right, strict=True):
        assert torch.equal((one * scale).remainder(Field.prime), (two * scale).round().remainder(Field.prime))


PICKED: dict[str, Callable[[Tensor], Tensor]] = {
    "largest": lambda x: x[:, :3].scatter_reduce(1, INDEX, x, "amax"),
    "smallest of others": lambda x: x[:, :3].scatter_reduce(1, INDEX, x, "amin", include_self=False),
    "in the middle": lambda x: x.median(1).values,
    "in the middle of all": torch.median,
    "second": lambda x: x.kthvalue(2, 1, keepdim=True).values,
    "largest so far": lambda x: x.cummax(1).values,
    "smallest so far": lambda x: x.cummin(0).values,
    "both": lambda x: torch.cat(torch.aminmax(x, dim=1)),
    "pooled": lambda x: F.adaptive_max_pool2d(x[None], (1, 2)),
}


@pytest.mark.parametrize("name", PICKED)
def test_what_is_picked_is_picked_by_the_random_order(name: str) -> None:
    """The op on the elements' places in that order, and the elements that have these."""
    domain = Field(2)
    x = domain.draw((2, 4))
    found = run_one(domain, lambda: PICKED[name](x))
    wanted = domain.elements_in_order()[PICKED[name](domain.order(x).double()).long()]
    assert torch.equal(found, wanted)
