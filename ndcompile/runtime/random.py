"""Random numbers by hashing (key, site, global index): the same on every torch version, device and mesh.

The mixing is the finaliser of splitmix64 (Steele, Lea and Flood, 2014) in int64 arithmetic that wraps around.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ndcompile.runtime.mesh import Ranks
from ndcompile.runtime.sequence import positions

Shards = Mapping[int, Ranks | tuple[Ranks, ...]]
"""Over which ranks a dim is sharded; over several, major first."""

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)
_BITS = 53


def draw_key(device: torch.device | str = "cpu") -> Tensor:
    """A new key, an int64 scalar on `device`, from rank 0's default CPU generator; every rank's generator advances."""
    key = torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device="cpu").to(device)
    if dist.is_available() and dist.is_initialized():
        dist.broadcast(key, src=0)
    return key


def fold(key: Tensor, data: int) -> Tensor:
    """A key that depends on `key` and a number (a layer, a site); different numbers give unrelated keys."""
    return _mix(_mix(key + _GOLDEN) + data)


def uniform_bits(
    shape: Sequence[int],
    key: Tensor,
    site: int,
    shards: Shards | None = None,
    sizes: Mapping[int, int] | None = None,
    spans: Mapping[int, tuple[int, int]] | None = None,
    balanced: Collection[int] = (),
) -> Tensor:
    """Uniform integers in [0, 2⁵³), int64 `[*shape]`, each a function of (key, site, its index in the global tensor).

    `shards` says over which ranks a dim is sharded: in equal parts, or those of a whole `sizes[dim]`. Of what a
    rank holds of a dim, `shape` may be the part that starts at `spans[dim][0]`, of `spans[dim][1]`. The dims `balanced`
    are sharded head–tail.
    """
    index = _global_index(shape, shards or {}, sizes or {}, spans or {}, balanced, key)
    return _shift(_mix(fold(key, site) + (index + 1) * _GOLDEN), 64 - _BITS)


def keep_mask(
    shape: Sequence[int],
    p: float,
    key: Tensor,
    site: int,
    shards: Shards | None = None,
    sizes: Mapping[int, int] | None = None,
    spans: Mapping[int, tuple[int, int]] | None = None,
    balanced: Collection[int] = (),
) -> Tensor:
    """Which elements dropout keeps, bool `[*shape]`: each with probability `1 − p`."""
    return uniform_bits(shape, key, site, shards, sizes, spans, balanced) >= int(p * 2**_BITS)


def dropout(
    x: Tensor,
    p: float,
    key: Tensor,
    site: int,
    shards: Shards | None = None,
    sizes: Mapping[int, int] | None = None,
    spans: Mapping[int, tuple[int, int]] | None = None,
    balanced: Collection[int] = (),
) -> Tensor:
    """`x` with elements dropped with probability `p` and the rest scaled by `1 / (1 − p)`; see `uniform_bits`."""
    if p == 0:
        return x
    if p == 1:
        return x * 0
    keep = keep_mask(x.shape, p, key, site, shards, sizes, spans, balanced)
    return torch.where(keep, x * (1 / (1 - p)), 0)


def uniform(
    shape: Sequence[int],
    key: Tensor,
    site: int,
    dtype: torch.dtype = torch.float32,
    shards: Shards | None = None,
    sizes: Mapping[int, int] | None = None,
    balanced: Collection[int] = (),
) -> Tensor:
    """Uniform numbers from 0 to below 1, `[*shape]`, with as many digits as `dtype` holds; see `uniform_bits`.

    A lower dtype has the same numbers, rounded down, and so never 1.
    """
    digits = 1 - round(math.log2(torch.finfo(dtype).eps))
    bits = uniform_bits(shape, key, site, shards, sizes, balanced=balanced)
    return (bits >> (_BITS - digits)).to(dtype) * 2.0**-digits


def _global_index(
    shape: Sequence[int],
    shards: Shards,
    sizes: Mapping[int, int],
    spans: Mapping[int, tuple[int, int]],
    balanced: Collection[int],
    key: Tensor,
) -> Tensor:
    """The row-major index in the global tensor of each element of this rank's part.

    It starts from a zero that is computed from `key`: inductor does arithmetic on constants and ranges alone in int32.
    """
    index = key - key
    for dim, length in enumerate(shape):
        start, whole = spans.get(dim, (0, length))
        axes = shards.get(dim, ())
        if axes:
            whole, place = _of_shard(whole, (axes,) if isinstance(axes, Ranks) else axes, sizes, dim, balanced, key)
            place = place[start : start + length]
        else:
            place = torch.arange(length, dtype=torch.int64, device=key.device) + start
        index = index.unsqueeze(-1) * whole + place
    return index


def _of_shard(
    length: int, axes: tuple[Ranks, ...], sizes: Mapping[int, int], dim: int, balanced: Collection[int], key: Tensor
) -> tuple[int, Tensor]:
    """A dim's whole size, and where this rank's part of it lies."""
    whole = sizes.get(dim, length * math.prod(axis.size for axis in axes))
    first, *others = axes
    if not others and dim not in balanced:  # the whole may be larger than `length` says
        return whole, torch.arange(length, dtype=torch.int64, device=key.device) + first.start(whole)
    place = positions(whole, first, balanced=dim in balanced, device=key.device)
    for axis in others:
        place = place[positions(len(place), axis, balanced=False, device=key.device)]
    return whole, place


def _mix(x: Tensor) -> Tensor:
    """A bijection of int64 in which each bit of the input flips each bit of the output with probability one half."""
    x = (x ^ _shift(x, 30)) * _FIRST
    x = (x ^ _shift(x, 27)) * _SECOND
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """The unsigned shift to the right, which torch lacks for int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
