"""Attention over ranks is attention on one device under the dense mask: values and gradients, each way, each mask."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from ndcompile.mesh import MeshSpec
from ndcompile.runtime import gathered
from ndcompile.runtime.context import context_attention, heads_divide
from ndcompile.runtime.mesh import Ranks
from ndcompile.runtime.sequence import positions
from ndcompile.verify.arithmetic import AsWritten
from ndcompile.verify.lockstep import mesh_of, run_ranks
from tests.runtime.test_attention import assert_equal, dense, parts

WAYS = ["gather", "ring", "heads"]
Tensors = list[Tensor]


def own(x: Tensor, axis: Ranks, balanced: bool) -> Tensor:
    """A rank's part of dim 2."""
    return x[:, :, positions(x.shape[2], axis, balanced=balanced)]


def on_ranks(tensors: Tensors, gradient: Tensor, ranks: int, balanced: bool, attend: Callable[..., Tensor]) -> Tensors:
    """The result and the gradients of q, k, v, put together from all ranks."""
    spec = MeshSpec.parse(f"tp={ranks}")

    def run(rank: int) -> Tensors:
        axis = mesh_of(spec, rank)["tp"]
        leaves = [own(x.detach(), axis, balanced).requires_grad_() for x in tensors]
        out = attend(*leaves, axis)
        return [out.detach(), *torch.autograd.grad(out, leaves, own(gradient, axis, balanced))]

    answers, axes = run_ranks(spec, AsWritten(0), run), [mesh_of(spec, rank)["tp"] for rank in range(ranks)]
    found = []
    for each in zip(*answers, strict=True):
        whole = torch.cat(each, 2)
        order = torch.cat([positions(whole.shape[2], axis, balanced=balanced) for axis in axes])
        found.append(torch.empty_like(whole).index_copy(2, order, whole))
    return found


def on_one(tensors: Tensors, gradient: Tensor, mask: Tensor | None, scale: float | None = None) -> Tensors:
    out = F.scaled_dot_product_attention(*tensors, mask, scale=scale, enable_gqa=True)
    return [out, *torch.autograd.grad(out, tensors, gradient)]


def draw_tensors(b: int, h: int, g: int, s: int, t: int, d: int = 4, e: int = 3) -> tuple[Tensors, Tensor]:
    torch.manual_seed(s)
    shapes = [(b, h, s, d), (b, g, t, d), (b, g, t, e), (b, h, s, e)]
    q, k, v, gradient = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    return [q.requires_grad_(), k.requires_grad_(), v.requires_grad_()], gradient


@pytest.fixture(params=["rows", "pieces"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathering has two ways: whole rows by the formula, or pieces merged by their log-sum-exp, as kernels need it."""
    if request.param == "pieces":
        monkeypatch.setattr(gathered, "is_plain", lambda *_: False)


@pytest.mark.parametrize("how", WAYS)
@settings(max_examples=25, deadline=None)
@given(
    data=st.data(), ranks=st.integers(2, 4), step=st.integers(1, 3), b=st.integers(1, 2), g=st.integers(1, 2),
    times=st.integers(1, 2), balanced=st.booleans(), pieces=st.booleans(),
)  # fmt: skip
def test_it_is_attention_under_the_dense_mask(
    how: str, data: st.DataObject, ranks: int, step: int, b: int, g: int, times: int, balanced: bool, pieces: bool
) -> None:
    s = 2 * ranks * step
    named = data.draw(parts(b, s))
    if how == "heads":
        times *= ranks
    tensors, gradient = draw_tensors(b, g * times, g, s, s)
    if how == "heads" and not heads_divide(g * times, g, ranks):
        return

    def attend(q: Tensor, k: Tensor, v: Tensor, axis: Ranks) -> Tensor:
        return context_attention(q, k, v, axis, **named, scale=0.7, how=how, balanced=balanced)

    with pytest.MonkeyPatch.context() as patch:
        if pieces:
            patch.setattr(gathered, "is_plain", lambda *_: False)
        ours = on_ranks(tensors, gradient, ranks, balanced, attend)
    assert_equal(ours, on_one(tensors, gradient, dense(b, s, named), 0.7))
