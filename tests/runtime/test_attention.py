"""Attention under a named mask is torch's under that mask as a dense one, values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from ndcompile.runtime import attention, attention_with_dropout, keep_mask, kernels, private

FAR = 1e-10
Parts = dict[str, Any]


@st.composite
def parts(draw: st.DrawFn, b: int, s: int) -> Parts:
    """Some of the parts, with rows that are all padding, ids that return, windows and chunks wider than all."""
    rows = torch.tensor(draw(st.lists(st.lists(st.integers(0, 2), min_size=s, max_size=s), min_size=3, max_size=3)))
    wide = st.integers(1, s + 3)
    found: Parts = dict(causal=draw(st.booleans()))
    for name, value in dict(window=draw(wide), chunk=draw(wide), padding=rows, documents=rows.flip(0)).items():
        if draw(st.booleans()):
            found[name] = value[:b] if isinstance(value, Tensor) else value
    if found["causal"] and draw(st.booleans()):
        found["prefix"] = draw(st.sampled_from([s // 2, rows[:b].flip(1)]))
    return found


def dense(b: int, s: int, parts: Parts) -> Tensor:
    """The mask by its definition, an entry at a time."""
    mask = torch.ones(b, 1, s, s, dtype=torch.bool)
    prefix, window, chunk = (parts.get(name) for name in ("prefix", "window", "chunk"))
    for i in range(b):
        for q in range(s):
            for k in range(s):
                shared = prefix is not None and bool(k < prefix if isinstance(prefix, int) else prefix[i, k] != 0)
                sees = not parts.get("causal") or k <= q or shared
                sees &= window is None or -window < q - k < window
                sees &= chunk is None or q // chunk == k // chunk
                sees &= "padding" not in parts or bool(parts["padding"][i, k] != 0)
                sees &= "documents" not in parts or bool(parts["documents"][i, q] == parts["documents"][i, k])
                mask[i, 0, q, k] = sees
    return mask


Three = tuple[Tensor, Tensor, Tensor]


def draw_tensors(b: int, h: int, g: int, s: int) -> Three:
    torch.manual_seed(s)
    q, k, v = (torch.randn(b, heads, s, d, dtype=torch.float64) for heads, d in ((h, 4), (g, 4), (g, 3)))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def results(out: Tensor, tensors: Three) -> list[Tensor]:
    weights = torch.arange(out.numel(), dtype=out.dtype).reshape(out.shape).cos()
    return [out, *torch.autograd.grad((out * weights).sum(), tensors)]


def assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() <= FAR * max(b.norm().item(), 1.0)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), b=st.integers(1, 3), g=st.integers(1, 2), times=st.integers(1, 2), s=st.integers(1, 9))
def test_named_masks_are_the_dense_ones(data: st.DataObject, b: int, g: int, times: int, s: int) -> None:
    named = data.draw(parts(b, s))
    tensors = draw_tensors(b, g * times, g, s)
    block = data.draw(st.integers(1, s + 1))
    ours = attention(*tensors, **named, scale=0.7, block=block)
    theirs = F.scaled_dot_product_attention(*tensors, dense(b, s, named), scale=0.7, enable_gqa=True)
    assert_equal(results(ours, tensors), results(theirs, tensors))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), b=st.integers(1, 3), s=st.integers(1, 8))
def test_blocks_drop_what_the_whole_drops(data: st.DataObject, b: int, s: int) -> None:
    named = data.draw(parts(b, s))
    tensors, key = draw_tensors(b, 2, 2, s), torch.tensor(5)
    block = data.draw(st.integers(1, s + 1))
    ours = attention_with_dropout(*tensors, None, 0.4, key, 2, **named, block=block)
    q, k, v = tensors
    scores = ((q / 2) @ k.mT).masked_fill(~dense(b, s, named), -torch.inf)
    nothing = ~dense(b, s, named).any(-1, keepdim=True)
    shares = scores.masked_fill(nothing, 0).softmax(-1).masked_fill(nothing, 0)
    theirs = (shares * keep_mask(shares.shape, 0.4, key, 2) / 0.6) @ v
    assert_equal(results(ours, tensors), results(theirs, tensors))


def kept_bytes(length: int, **named: Any) -> int:
    """What autograd keeps between forward and backward, besides queries, keys, values and the result."""
    tensors = [torch.randn(1, 2, length, 16, requires_grad=True) for _ in range(3)]
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = attention(*tensors, **named, block=32)
    own = {x.untyped_storage().data_ptr() for x in (*tensors, out)}
    return sum(size for storage, size in kept.items() if storage not in own)


MASKS: dict[str, dict[str, Any]] = {
    "causal": dict(causal=True),
    "window": dict(causal=True, window=48),
    "chunks": dict(causal=True, chunk=64),
    "small chunks": dict(causal=True, chunk=5),
    "padding": dict(causal=True, padding=torch.ones(1, 1024, dtype=torch.long)),
    "documents": dict(documents=torch.arange(1024)[None] // 100),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_what_is_kept_grows_with_the_sequence_not_with_its_square(name: str) -> None:
    """A mask of truth values, 1024 by 1024, would be 1 MB; a number for each head and token is 8 kB."""
    assert kept_bytes(1024, **MASKS[name]) < 200_000


def test_blocks_compile_as_one_graph() -> None:
    q, k, v = draw_tensors(2, 2, 2, 24)
    padding = torch.arange(24).expand(2, 24) < 17

    def attend(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
        return attention(q, k, v, causal=True, window=9, padding=padding, block=8)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    ours, theirs = compiled(q, k, v, padding), attend(q, k, v, padding)
    assert_equal(results(ours, (q, k, v)), results(theirs, (q, k, v)))


def test_cudnn_gets_all_tensors_as_its_own_forward_lays_them_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch finds a plan by the strides of queries, keys and values alone; the rest must follow from the queries'."""
    q = torch.randn(2, 12, 4, 8).transpose(1, 2)[:, :, 6:]  # tokens before heads, and the later half of them
    gradient, out = torch.randn(2, 4, 6, 8), torch.randn(2, 4, 9, 8)[:, :, 2:8]
    given: list[Tensor] = []

    def backward(*args: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        given[:] = args[0], args[1], args[4]
        return q, q, q

    monkeypatch.setitem(private.ATTENTION, "cudnn", (None, backward))
    kernels._cudnn_backward(gradient, q, q, q, out, torch.zeros(2, 4, 6), None, kernels.Call(False, 1.0))
    assert [x.stride() for x in given] == [torch.empty(2, 6, 4, 8).transpose(1, 2).stride()] * 3
    assert all(torch.equal(x, right) for x, right in zip(given, (gradient, q, out), strict=True))
