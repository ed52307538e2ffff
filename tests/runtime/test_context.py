"""Attention over ranks is attention on one device under the dense mask: values and gradients, each way, each mask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

from ndcompile.mesh import MeshSpec
from ndcompile.runtime import gathered, kernels, ring
from ndcompile.runtime.attention import attention, attention_with_dropout
from ndcompile.runtime.context import context_attention, heads_divide
from ndcompile.runtime.kernels import kernel_for
from ndcompile.runtime.masks import Mask
from ndcompile.runtime.mesh import Mesh, Ranks
from ndcompile.runtime.sequence import positions
from ndcompile.runtime.shared import Shared
from ndcompile.verify.domain import AsWritten, Domain
from ndcompile.verify.field import Field
from ndcompile.verify.lockstep import mesh_of, run_one, run_ranks
from tests.ranks import run as run_on_gloo
from tests.runtime.test_attention import Parts, assert_equal, dense, parts

WAYS = ["gather", "ring", "heads"]
Tensors = list[Tensor]


def own(x: Tensor, axis: Ranks, balanced: bool) -> Tensor:
    """A rank's part of dim 2."""
    return x[:, :, positions(x.shape[2], axis, balanced=balanced)]


def on_ranks(
    tensors: Tensors,
    gradient: Tensor,
    ranks: int,
    balanced: bool,
    attend: Callable[..., Tensor],
    domain: Domain | None = None,
) -> Tensors:
    """The result and the gradients of q, k, v, put together from all ranks."""
    spec = MeshSpec.parse(f"tp={ranks}")

    def run(rank: int) -> Tensors:
        axis = mesh_of(spec, rank)["tp"]
        leaves = [own(x.detach(), axis, balanced).requires_grad_() for x in tensors]
        out = attend(*leaves, axis)
        return [out.detach(), *torch.autograd.grad(out, leaves, own(gradient, axis, balanced))]

    answers = run_ranks(spec, domain or AsWritten(0), run)
    axes = [mesh_of(spec, rank)["tp"] for rank in range(ranks)]
    found = []
    for each in zip(*answers, strict=True):
        whole = torch.cat(each, 2)
        order = torch.cat([positions(whole.shape[2], axis, balanced=balanced) for axis in axes])
        found.append(torch.empty_like(whole).index_copy(2, order, whole))
    return found


def on_one(tensors: Tensors, gradient: Tensor, mask: Tensor | None, scale: float | None = None) -> Tensors:
    q, k, v = tensors
    out = F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, tensors, gradient)]


def draw_tensors(b: int, h: int, g: int, s: int, t: int, d: int = 4, e: int = 3) -> tuple[Tensors, Tensor]:
    torch.manual_seed(s)
    shapes = [(b, h, s, d), (b, g, t, d), (b, g, t, e), (b, h, s, e)]
    q, k, v, gradient = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    return [q.requires_grad_(), k.requires_grad_(), v.requires_grad_()], gradient


@contextmanager
def by_pieces(wanted: bool) -> Iterator[None]:
    """Gathering has two ways: whole rows by the formula, or pieces merged by their log-sum-exp, as kernels need it."""
    with pytest.MonkeyPatch.context() as patch:
        if wanted:
            patch.setattr(gathered, "is_plain", lambda *_: False)
        yield


@pytest.mark.parametrize("how", WAYS)
@settings(max_examples=60, deadline=None)
@given(
    data=st.data(), ranks=st.integers(2, 4), step=st.integers(1, 3), b=st.integers(1, 2), g=st.integers(1, 2),
    times=st.integers(1, 2), balanced=st.booleans(), pieces=st.booleans(),
)  # fmt: skip
def test_it_is_attention_under_the_dense_mask(
    how: str, data: st.DataObject, ranks: int, step: int, b: int, g: int, times: int, balanced: bool, pieces: bool
) -> None:
    s, times = 2 * ranks * step, times * ranks if how == "heads" else times
    assume(how != "heads" or heads_divide(g * times, g, ranks))
    named = data.draw(parts(b, s))
    tensors, gradient = draw_tensors(b, g * times, g, s, s)

    def attend(q: Tensor, k: Tensor, v: Tensor, axis: Ranks) -> Tensor:
        return context_attention(q, k, v, axis, **named, scale=0.7, how=how, balanced=balanced)

    with by_pieces(pieces):
        ours = on_ranks(tensors, gradient, ranks, balanced, attend)
    assert_equal(ours, on_one(tensors, gradient, dense(b, s, named), 0.7))


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("pieces", [False, True])
def test_queries_and_keys_may_have_different_lengths(how: str, pieces: bool) -> None:
    tensors, gradient = draw_tensors(2, 4, 2, 6, 18)
    padding = torch.arange(18) < torch.tensor([[11], [0]])

    def attend(q: Tensor, k: Tensor, v: Tensor, axis: Ranks) -> Tensor:
        return context_attention(q, k, v, axis, padding=padding, how=how, balanced=False)

    with by_pieces(pieces):
        ours = on_ranks(tensors, gradient, 2, False, attend)
    assert_equal(ours, on_one(tensors, gradient, padding[:, None, None]))
    assert not ours[0][1].any()


@settings(max_examples=15, deadline=None)
@given(data=st.data(), ranks=st.integers(2, 3), how=st.sampled_from(WAYS), balanced=st.booleans())
def test_dropout_drops_what_one_device_drops(data: st.DataObject, ranks: int, how: str, balanced: bool) -> None:
    s, key = 4 * ranks, torch.tensor(5)
    named = data.draw(parts(2, s))
    tensors, gradient = draw_tensors(2, 2, 1, s, s)

    def attend(q: Tensor, k: Tensor, v: Tensor, axis: Ranks) -> Tensor:
        drop: Any = dict(dropout_p=0.4, key=key, site=2)
        return context_attention(q, k, v, axis, **named, **drop, how=how, balanced=balanced)

    ours = on_ranks(tensors, gradient, ranks, balanced, attend)
    q, k, v = tensors
    alone = attention_with_dropout(q, k, v, None, 0.4, key, 2, **named)
    assert_equal(ours, [alone.detach(), *torch.autograd.grad(alone, tensors, gradient)])


MASKS: dict[str, Parts] = {
    "causal": dict(causal=True),
    "full": dict(),
    "window": dict(causal=True, window=9),
    "padding": dict(padding=torch.arange(48) < torch.tensor([[30], [48]])),
    "nothing": dict(causal=True, padding=torch.arange(48) >= torch.tensor([[7], [48]])),
    "documents": dict(causal=True, documents=torch.arange(48).expand(2, 48) // 11),
}


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_kernels_are_as_near_as_one_device(how: str, dtype: torch.dtype, mask: str) -> None:
    """‖ranks − float64‖ ≤ 4 · max(‖one device − float64‖, u · ‖float64‖)."""
    tensors, gradient = draw_tensors(2, 4, 2, 48, 48, 16, 16)
    named, right = MASKS[mask], on_one(tensors, gradient, dense(2, 48, MASKS[mask]))
    low = [x.detach().to(dtype).requires_grad_() for x in tensors]
    one = on_one(low, gradient.to(dtype), dense(2, 48, named))

    def attend(q: Tensor, k: Tensor, v: Tensor, axis: Ranks) -> Tensor:
        assert kernel_for(q, k, v, None).name == "cpu"
        return context_attention(q, k, v, axis, **named, how=how)

    ours = on_ranks(low, gradient.to(dtype), 2, True, attend)
    for a, b, c in zip(ours, one, right, strict=True):
        allowed = 4 * max(float((b - c).norm()), torch.finfo(dtype).eps / 2 * float(c.norm()))
        assert a.dtype == dtype and float((a - c).norm()) <= allowed


class Largest(AsWritten):
    """Notes the largest tensor that any op makes."""

    numbers = 0

    def run(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = super().run(op, args, kwargs)
        self.numbers = max([self.numbers, *(x.numel() for x in tree_leaves(found) if isinstance(x, Tensor))])
        return found


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("how", ["gather", "ring"])
@pytest.mark.parametrize("mask", ["causal", "full", "window"])
def test_nothing_is_as_large_as_queries_by_keys(
    how: str, pieces: bool, mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank has 64 of 128 queries; 8 of them by 128 keys are 1024 numbers, and all of keys and values 512."""
    for module in (gathered, ring, kernels):
        monkeypatch.setattr(module, "BLOCK", 8)
    tensors, gradient = draw_tensors(1, 1, 1, 128, 128, 2, 2)
    largest = Largest(0)

    def attend(q: Tensor, k: Tensor, v: Tensor, axis: Ranks) -> Tensor:
        return context_attention(q, k, v, axis, **MASKS[mask], how=how)

    with by_pieces(pieces):
        on_ranks(tensors, gradient, 2, True, attend, largest)
    assert largest.numbers <= 1024


def test_each_rank_has_the_same_causal_work() -> None:
    for ranks in (2, 3, 4):
        work = [[0.0] * ranks for _ in range(ranks)]
        for rank in range(ranks):
            shared = Shared(Ranks("tp", ranks, rank, "tp"), True, Mask(causal=True), 1.0)
            x = torch.empty(1, 1, 8, 1)
            for step in range(ranks):
                for piece in ring.pieces(shared, x, x, step):
                    assert piece.mask is None, "a causal mask over chunks needs no tensor"
                    rows, cols = piece.rows[1] - piece.rows[0], piece.cols[1] - piece.cols[0]
                    work[rank][step] += rows * cols / (2 if piece.causal else 1)
        assert work == [[32.0] * ranks] * ranks


def test_gathering_computes_own_keys_and_two_rectangles() -> None:
    shared = Shared(Ranks("tp", 4, 1, "tp"), True, Mask(causal=True), 1.0)
    x = torch.empty(1, 1, 4, 1)
    mine, others = gathered.Kernels(x, x, x, shared).pieces()
    assert [(p.rows, p.cols, p.causal) for p in mine] == [((0, 4), (0, 4), True)]
    assert [(p.rows, p.cols, p.causal) for p in others] == [((0, 4), (0, 2), False), ((2, 4), (4, 12), False)]


@pytest.mark.parametrize("how", ["gather", "heads"])
@pytest.mark.parametrize("mask", ["causal", "window", "documents"])
def test_it_is_equal_in_a_prime_field(how: str, mask: str) -> None:
    named, spec, field = MASKS[mask], MeshSpec.parse("tp=2"), Field(7)
    tensors, gradient = [field.draw((2, h, 48, 4)) for h in (4, 2, 2)], field.draw((2, 4, 48, 4))

    def results(tensors: Tensors, gradient: Tensor, attend: Callable[..., Tensor]) -> Tensors:
        leaves = [x.clone().requires_grad_() for x in tensors]
        out = attend(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]

    def run(rank: int) -> Tensors:
        axis = mesh_of(spec, rank)["tp"]
        parts = [own(x, axis, True) for x in (*tensors, gradient)]
        return results(parts[:3], parts[3], lambda q, k, v: context_attention(q, k, v, axis, **named, how=how))

    with sdpa_kernel(SDPBackend.MATH):
        whole = run_one(field, lambda: results(tensors, gradient, lambda q, k, v: attention(q, k, v, **named)))
        answers = run_ranks(spec, field, run)
    for rank, answer in enumerate(answers):
        for a, b in zip(answer, whole, strict=True):
            assert torch.equal(a, own(b, mesh_of(spec, rank)["tp"], True))


def test_heads_that_do_not_divide_are_an_error() -> None:
    assert [heads_divide(8, 8, 4), heads_divide(8, 2, 4), heads_divide(6, 6, 4), heads_divide(12, 3, 4)] == [1, 1, 0, 0]
    q = torch.zeros(1, 6, 2, 4)
    with pytest.raises(ValueError) as error:
        context_attention(q, q, q, Ranks("cp", 4, 0, "cp"), how="heads")
    assert str(error.value) == (
        "6 heads of queries and 6 of keys do not divide by the 4 ranks of 'cp'\n"
        "  why  each rank computes some heads for the whole sequence\n"
        "  try  how='gather' or how='ring'"
    )
    with pytest.raises(ValueError, match="has no way 'rings'"):
        context_attention(q, q, q, Ranks("cp", 4, 0, "cp"), how="rings")


def kept_and_results(attend: Callable[..., Tensor], leaves: Tensors, gradient: Tensor) -> tuple[int, Tensors]:
    """The bytes that are kept for the backward besides the inputs and the result; the result and the gradients."""
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = attend(*leaves)
    given = {x.untyped_storage().data_ptr() for x in (*leaves, out)}
    bytes_kept = sum(size for at, size in kept.items() if at not in given)
    return bytes_kept, [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


def on_gloo(ranks: int) -> list[tuple[int, Tensors]]:
    """Each way under a causal mask, as it is and compiled."""
    axis, found = Mesh.bound(MeshSpec.parse(f"tp={ranks}"))["tp"], []
    tensors, gradient = draw_tensors(2, 2, 2, 48, 48)
    for how in WAYS:

        def attend(q: Tensor, k: Tensor, v: Tensor, how: str = how) -> Tensor:
            return context_attention(q, k, v, axis, causal=True, how=how)

        for function in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
            leaves = [own(x.detach(), axis, True).requires_grad_() for x in tensors]
            found.append(kept_and_results(function, leaves, own(gradient, axis, True)))
    return found


def test_real_ranks_compiled_or_not() -> None:
    tensors, gradient = draw_tensors(2, 2, 2, 48, 48)
    right = on_one(tensors, gradient, dense(2, 48, MASKS["causal"]))
    all_keys_and_values = 2 * 2 * 48 * (4 + 3) * 8
    for rank, answer in enumerate(run_on_gloo(2, on_gloo, 2)):
        for i, (kept, ours) in enumerate(answer):
            assert_equal(ours, [own(x.detach(), Ranks("tp", 2, rank, "tp"), True) for x in right])
            assert kept < all_keys_and_values or WAYS[i // 2] == "heads", "gathered keys are not kept"
