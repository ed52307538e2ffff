"""Sequences that are too short for a mesh: pads at the end of inputs, and results cut back to the true length."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ndcompile.runtime import private
from ndcompile.runtime.collectives import all_gather, all_gather_invariant
from ndcompile.runtime.manifest import Manifest
from ndcompile.runtime.mesh import Mesh, Ranks

Grown = Mapping[str, tuple[int, int]]
"""The symbols that became longer: their true length, and that with pads."""


def grown(manifest: Manifest, tensors: Sequence[Tensor]) -> Grown:
    """What must become longer. Raises ValueError where a table of the model ends before that."""
    found = {}
    for symbol, length in manifest.lengths(tensors).items():
        unit = math.lcm(*manifest.multiples.get(symbol, {}).values(), 1)
        longer = -(-length // unit) * unit
        if longer == length or not manifest.pads:
            continue
        most, table = manifest.limits.get(symbol, (longer, ""))
        if longer > most:
            raise ValueError(
                f"a sequence of {length} becomes {longer} with pads, and '{table}' ends at {most}\n"
                f"  why  the mesh needs a length that divides by {unit}\n"
                f"  try  size {longer - unit}, or a mesh with fewer ranks on the sequence"
            )
        found[symbol] = length, longer
    return found


def lengthened(manifest: Manifest, tensors: Sequence[Tensor], longer: Grown) -> list[Tensor]:
    """The inputs with pads at the end of their sequences."""
    made = []
    for plan, x in zip(manifest.input_plans, tensors, strict=True):
        more = [longer[d][1] - longer[d][0] if isinstance(d, str) and d in longer else 0 for d in plan.dims]
        made.append(F.pad(x, pairs(more), value=manifest.pads[plan.name]) if any(more) else x)
    return made


def pairs(more: Sequence[int]) -> list[int]:
    """What `F.pad` takes, to put so many entries at the end of each dim."""
    return [n for count in reversed(more) for n in (0, count)]


def result(
    value: Any, sharded: Mapping[str, Sequence[int]], ends: Sequence[Sequence[Any]], longer: Grown, mesh: Mesh,
    device_mesh: Any,
) -> Any:  # fmt: skip
    """A result of its true length: `ends` are its dims that became longer, with the symbol and what is added to it.

    A dim that one axis shards stays sharded, in parts as `torch.chunk` makes them.
    """
    sharded = dict(sharded)
    for dim, symbol, more in ends:
        if symbol not in longer:
            continue
        axes = [axis for axis, (d, _) in sharded.items() if d == dim]
        for axis in reversed(axes[1:]):
            value = all_gather_invariant(value, mesh[axis], dim)
            del sharded[axis]
        size = longer[symbol][0] + more
        value = cut_back(value, mesh[axes[0]], dim, size) if axes else value.narrow(dim, 0, size)
        sharded |= dict.fromkeys(axes[:1], (dim, size))
    return private.distributed(value, device_mesh, sharded) if sharded else value


def cut_back(x: Tensor, axis: Ranks, dim: int, size: int) -> Tensor:
    """This rank's part of the first `size` entries of a dim that ranks hold in equal parts, as `torch.chunk` cuts it.

    `[…, part, …] → […, axis.part(size), …]`; what a rank lacks stands at the end of the parts before its own.
    """
    part, step = x.shape[dim], -(-size // axis.size)
    low, high = min(axis.index * step, size), min((axis.index + 1) * step, size)
    rows = min(part, (part - step) * (axis.size - 1))
    if rows == 0:
        return x.narrow(dim, 0, high - low)
    ends = all_gather(x.narrow(dim, part - rows, rows), axis, dim)
    own = axis.index * part
    found = [ends.narrow(dim, 0, 0)]  # so that every rank comes to the collective of the backward
    for rank in range(axis.index):
        stop = (rank + 1) * part
        start = max(low, stop - rows)
        if start < min(stop, high):
            found.append(ends.narrow(dim, rank * rows + start - (stop - rows), min(stop, high) - start))
    if high > own:
        found.append(x.narrow(dim, 0, high - own))
    return torch.cat(found, dim)
