"""Windows and running sums over ranks: what one device computes on the whole, and its gradients, also in the field."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from ndcompile.mesh import MeshSpec
from ndcompile.runtime import Ranks, convolve, positions, running_sum
from ndcompile.verify.domain import Domain, Float64
from ndcompile.verify.field import Field
from ndcompile.verify.lockstep import mesh_of, run_one, run_ranks

Tensors = list[Tensor]
Parts = list[Tensor]


def parts(x: Tensor, axis: Ranks, dim: int, balanced: bool) -> Tensor:
    return x.index_select(dim, positions(x.shape[dim], axis, balanced=balanced))


def compare(
    domain: Domain, ranks: int, balanced: bool, dim: int, given: Tensors, seed: Tensor,
    whole: Callable[..., Tensor], part: Callable[..., Tensor],
) -> None:  # fmt: skip
    """The first tensor is shared along `dim`, the gradients of the others are sums over the ranks."""

    def one() -> Tensors:
        leaves = [x.clone().requires_grad_() for x in given]
        out = whole(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, seed)]

    def run(rank: int) -> Tensors:
        axis = mesh_of(spec, rank)["cp"]
        leaves = [parts(x, axis, dim, balanced) if i == 0 else x.clone() for i, x in enumerate(given)]
        leaves = [x.requires_grad_() for x in leaves]
        out = part(*leaves, axis)
        return [out.detach(), *torch.autograd.grad(out, leaves, parts(seed, axis, dim, balanced))]

    spec = MeshSpec.parse(f"cp={ranks}")
    right, found = run_one(domain, one), run_ranks(spec, domain, run)
    axes = [mesh_of(spec, rank)["cp"] for rank in range(ranks)]
    for rank, axis in enumerate(axes):
        for mine, all_of_it in zip(found[rank][:2], right[:2], strict=True):
            equal(domain, mine, parts(all_of_it, axis, dim, balanced))
    for number in range(2, len(right)):
        total = run_one(domain, lambda n=number: torch.stack([one[n] for one in found]).sum(0))  # type: ignore[misc]
        equal(domain, total, right[number])


def equal(domain: Domain, mine: Tensor, theirs: Tensor) -> None:
    if domain.exact:
        assert torch.equal(mine, theirs)
    else:
        assert (mine - theirs).norm() <= 1e-12 * max(float(theirs.norm()), 1e-3)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([Field, Float64]), st.integers(1, 4), st.booleans(), st.integers(1, 3), st.integers(1, 6),
    st.integers(1, 3), st.sampled_from([1, 2]), st.data(),
)  # fmt: skip
def test_windows(
    kind: type[Domain],
    ranks: int,
    balanced: bool,
    chunk: int,
    window: int,
    dilation: int,
    groups: int,
    data: st.DataObject,
) -> None:
    """Of any reach: within a chunk, or over several."""
    domain, length = kind(window), (2 if balanced else 1) * ranks * chunk
    left = data.draw(st.integers(0, dilation * (window - 1)))
    right = dilation * (window - 1) - left
    x, weight, bias = domain.draw([2, 4, length]), domain.draw([2, 4 // groups, window]), domain.draw([2])
    seed = domain.draw([2, 2, length])

    def whole(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.conv1d(F.pad(x, (left, right)), weight, bias, dilation=dilation, groups=groups)

    def part(x: Tensor, weight: Tensor, bias: Tensor, axis: Ranks) -> Tensor:
        return convolve(x, weight, bias, left, dilation, groups, axis=axis, balanced=balanced)

    compare(domain, ranks, balanced, 2, [x, weight, bias], seed, whole, part)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([Field, Float64]), st.integers(1, 4), st.booleans(), st.integers(1, 3), st.integers(0, 2))
def test_running_sums(kind: type[Domain], ranks: int, balanced: bool, chunk: int, dim: int) -> None:
    domain, shape = kind(chunk), [2, 3, 2]
    shape[dim] = (2 if balanced else 1) * ranks * chunk
    x, seed = domain.draw(shape), domain.draw(shape)
    compare(
        domain, ranks, balanced, dim, [x], seed, lambda x: x.cumsum(dim),
        lambda x, axis: running_sum(x, dim, axis=axis, balanced=balanced),
    )  # fmt: skip


@pytest.mark.parametrize("wrong", ["alone", "one part"])
def test_a_wrong_order_is_seen(wrong: str) -> None:
    """What these tests are worth: without the neighbours, or with those of another order, they fail."""
    domain = Float64(0)
    x, seed = domain.draw([1, 2, 16]), domain.draw([1, 2, 16])

    def part(x: Tensor, axis: Ranks) -> Tensor:
        return x.cumsum(2) if wrong == "alone" else running_sum(x, 2, axis=axis, balanced=False)

    with pytest.raises(AssertionError):
        compare(domain, 2, True, 2, [x], seed, lambda x: x.cumsum(2), part)
