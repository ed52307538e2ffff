"""Hashed random numbers: right distribution, independent of each other, and of the mesh."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ndcompile.runtime import (
    Ranks,
    arange,
    attention_with_dropout,
    draw_key,
    dropout,
    fold,
    keep_mask,
    scale_gradient,
    uniform,
    uniform_bits,
)
from ndcompile.runtime.random import _GOLDEN, _mix, _shift
from tests.ranks import run

KEY = torch.tensor(2024)
MANY = 1 << 16


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack((a.double().flatten(), b.double().flatten())))[0, 1])


def bits(x: Tensor) -> Tensor:
    """[n] → [n, 53]: zeros and ones."""
    return (x.unsqueeze(-1) >> torch.arange(53)) & 1


def test_pinned_values():
    """The numbers are a promise: a checkpoint's dropout must not change with a release."""
    assert fold(torch.tensor(1), 2).item() == PINNED_FOLD
    assert uniform_bits((3,), torch.tensor(1), 2).tolist() == PINNED_BITS


PINNED_FOLD = 583880340377267059
PINNED_BITS = [7422639939353652, 8089415102406677, 3086357430246291]


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_kept_is_one_less_p(p):
    keep = keep_mask((MANY,), p, KEY, 3)
    assert abs(keep.double().mean() - (1 - p)) < 4 * (p * (1 - p) / MANY) ** 0.5


def test_every_bit_is_even_and_numbers_are_uniform():
    x = uniform_bits((MANY,), KEY, 0)
    assert x.min() >= 0 and x.max() < 2**53
    assert (bits(x).double().mean(0) - 0.5).abs().max() < 4.5 * 0.5 / MANY**0.5
    counts = torch.histc(x.double() / 2**53, 256, 0, 1)
    chi_squared = ((counts - MANY / 256) ** 2 / (MANY / 256)).sum()
    assert 150 < chi_squared < 370, "255 degrees of freedom: mean 255, deviation 23"


def test_sites_keys_and_neighbours_are_independent():
    bound = 4.5 / MANY**0.5
    masks = [keep_mask((MANY,), 0.5, key, site) for key in (KEY, KEY + 1, fold(KEY, 1)) for site in range(4)]
    for i, left in enumerate(masks):
        for right in masks[:i]:
            assert abs(correlation(left, right)) < bound
    square = masks[0].view(256, 256)
    for shift in (1, 2, 255):
        assert abs(correlation(square.flatten()[shift:], square.flatten()[:-shift])) < bound
    assert abs(correlation(square[1:], square[:-1])) < bound


def test_a_flipped_bit_of_the_key_flips_half_the_output():
    base = bits(uniform_bits((64,), KEY, 5))
    for bit in range(63):
        flipped = bits(uniform_bits((64,), KEY ^ (1 << bit), 5))
        assert 0.44 < (base != flipped).double().mean() < 0.56, bit


def test_each_rank_drops_its_part_of_the_same_mask():
    whole = keep_mask((6, 8, 5), 0.3, KEY, 1)
    for first in range(2):
        for second in range(4):
            rows, columns = Ranks("dp", 2, first, "dp"), Ranks("tp", 4, second, "tp")
            even = keep_mask((3, 2, 5), 0.3, KEY, 1, {0: rows, 1: columns})
            assert torch.equal(even, whole[3 * first : 3 * first + 3, 2 * second : 2 * second + 2])
            last = columns.start(5)
            uneven = keep_mask((6, 8, columns.part(5)), 0.3, KEY, 1, {2: columns}, {2: 5})
            assert torch.equal(uneven, whole[:, :, last : last + columns.part(5)])


FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", FLOATS)
def test_uniform_numbers_are_even_from_0_to_below_1(dtype):
    x = uniform((MANY,), KEY, 1, dtype)
    assert x.dtype == dtype and x.min() >= 0 and x.max() < 1
    step = torch.finfo(dtype).eps / 2
    assert torch.equal(x.double() / step, (x.double() / step).round()), "all are multiples of one step"
    counts = torch.histc(x.double(), 128, 0, 1)
    chi_squared = ((counts - MANY / 128) ** 2 / (MANY / 128)).sum()
    assert 60 < chi_squared < 200, "127 degrees of freedom: mean 127, deviation 16"


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_largest_uniform_number_is_below_1(dtype, monkeypatch):
    """It is rounded down, whatever the dtype."""
    largest = torch.tensor([2**53 - 1])
    monkeypatch.setattr("ndcompile.runtime.random.uniform_bits", lambda *args, **kwargs: largest)
    assert uniform((1,), KEY, 1, dtype).item() == 1 - torch.finfo(dtype).eps / 2


def test_a_lower_dtype_has_the_same_numbers_with_fewer_digits():
    exact = uniform((MANY,), KEY, 1, torch.float64)
    for dtype in FLOATS:
        step = torch.finfo(dtype).eps / 2
        assert torch.equal(uniform((MANY,), KEY, 1, dtype).double(), (exact / step).floor() * step)


def test_each_rank_draws_its_part_of_the_same_numbers():
    whole = uniform((6, 8, 5), KEY, 1)
    rows, columns = Ranks("dp", 2, 1, "dp"), Ranks("tp", 4, 3, "tp")
    assert torch.equal(uniform((3, 2, 5), KEY, 1, torch.float32, {0: rows, 1: columns}), whole[3:, 6:])
    last = columns.start(5)
    part = uniform((6, 8, columns.part(5)), KEY, 1, torch.float32, {2: columns}, {2: 5})
    assert torch.equal(part, whole[:, :, last : last + columns.part(5)])
    chunks = uniform((6, 4, 5), KEY, 1, torch.float32, {1: Ranks("cp", 2, 0, "cp")}, balanced=(1,))
    assert torch.equal(chunks, torch.cat([whole[:, :2], whole[:, 6:]], 1)), "an early chunk and a late one"


def test_dropout_scales_what_it_keeps_and_its_gradient_alike():
    x = torch.ones(1000, requires_grad=True)
    y = dropout(x, 0.2, KEY, 7)
    y.sum().backward()
    assert set(y.tolist()) == {0.0, 1.25}
    assert x.grad is not None and torch.equal(x.grad, y.detach())
    assert dropout(x, 0.0, KEY, 7) is x and not dropout(x, 1.0, KEY, 7).any()


def test_compiled_dropout_drops_the_same():
    function = torch.compile(lambda x, key: dropout(x, 0.5, key, 3), backend="aot_eager", fullgraph=True)
    assert torch.equal(function(torch.ones(100), KEY), dropout(torch.ones(100), 0.5, KEY, 3))


def test_indices_beyond_32_bits_are_told_apart():
    """The last of 4 parts of 2³⁴ elements begins at element 3 · 2³²."""
    far = {0: Ranks("tp", 4, 3, "tp")}, {0: 1 << 34}

    distant, near = uniform_bits((8,), KEY, 1, *far), uniform_bits((8,), KEY, 1)
    offset = KEY.new_tensor(3 << 32)
    assert not torch.equal(distant, near)
    assert torch.equal(distant, _shift(_mix(fold(KEY, 1) + (torch.arange(8) + offset + 1) * _GOLDEN), 11))


def problem() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, 6, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    return q, k, v


@pytest.mark.parametrize(("is_causal", "kind"), [(True, None), (False, None), (False, "bool"), (False, "added")])
def test_attention_without_dropout_is_torchs(is_causal, kind):
    q, k, v = (x.requires_grad_() for x in problem())
    mask = torch.ones(6, 6, dtype=torch.bool).triu(-3) if kind else None
    mask = mask.double() if kind == "added" else mask
    ours = attention_with_dropout(q, k, v, mask, 0.0, KEY, 0, is_causal, 0.3)
    theirs = F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, scale=0.3)
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(*(torch.autograd.grad(out.sin().sum(), (q, k, v)) for out in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b)


def test_a_row_that_attends_to_nothing_is_zero_with_a_finite_gradient():
    q, k, v = (x.requires_grad_() for x in problem())
    mask = torch.ones(6, 6, dtype=torch.bool)
    mask[2] = False
    out = attention_with_dropout(q, k, v, mask, 0.5, KEY, 0)
    out.sum().backward()
    assert not out[:, :, 2].any() and q.grad.isfinite().all() and k.grad.isfinite().all()


def test_attention_drops_probabilities_by_global_index():
    q, k, v = problem()
    shares = (q @ k.mT / 8**0.5).softmax(-1)
    expected = (shares * keep_mask((2, 4, 6, 6), 0.4, KEY, 9) / 0.6) @ v
    torch.testing.assert_close(attention_with_dropout(q, k, v, None, 0.4, KEY, 9), expected)
    heads = Ranks("tp", 2, 1, "tp")
    part = attention_with_dropout(q[:, 2:], k[:, 2:], v[:, 2:], None, 0.4, KEY, 9, shards={1: heads})
    torch.testing.assert_close(part, expected[:, 2:])


def keys(ranks: int) -> tuple[float, float, float]:
    torch.manual_seed(dist.get_rank() + 5)
    return draw_key("cpu").item(), draw_key().item(), torch.rand(()).item()


def test_the_key_is_rank_zeros():
    first, *others = run(2, keys, 2)
    torch.manual_seed(5)
    alone = draw_key().item(), draw_key().item(), torch.rand(()).item()
    assert first == alone
    assert all(other[:2] == first[:2] and other[2] != first[2] for other in others)
    assert alone[0] != alone[1]


@pytest.mark.parametrize("start, end, step", [(0, 8, 1), (3, 17, 2), (0.0, 1.0, 0.125), (0, 3, 1), (5, 5, 1)])
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_parts_of_a_range_join_to_the_range(start, end, step, dtype):
    parts = [arange(start, end, step, Ranks("tp", 4, index, "tp"), dtype=dtype) for index in range(4)]
    whole = torch.arange(start, end, step, dtype=dtype)
    assert torch.equal(torch.cat(parts), whole) and parts[0].dtype == whole.dtype


def test_scale_gradient():
    x = torch.ones(2, requires_grad=True)
    y = scale_gradient(x, 3.0)
    y.sum().backward()
    assert y.data_ptr() == x.data_ptr() and x.grad.tolist() == [3.0, 3.0]
