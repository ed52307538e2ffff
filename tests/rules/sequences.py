"""The rows of an axis that shards sequences: head–tail, and in dims that join them with the batch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ndcompile.placement import Placement
from ndcompile.problem import COUNTING, RANGES
from ndcompile.rules.rows import Row, rows
from ndcompile.rules.trial import Arithmetic, Trial
from ndcompile.size import Size
from tests.rules.parts import SYMBOLS
from tests.rules.tries import Try

BATCH = Size(2, ("b",))
ACROSS = frozenset({"runtime.convolve", "runtime.running_sum"})
"""Ops that communicate: tests/runtime/test_borders.py tries those."""


class HeadTail(Arithmetic):
    """Floating point; a rank holds an early and a late chunk of a sequence, for each index of what is major to it."""

    def positions(self, size: int, placement: Placement, ranks: int) -> list[Tensor]:
        chunks = torch.arange(size).view(majors(placement), 2 * ranks, -1)
        return [chunks[:, [rank, 2 * ranks - 1 - rank]].flatten() for rank in range(ranks)]


def majors(placement: Placement) -> int:
    """How many sequences a dim joins, each of which is cut."""
    return math.prod(SYMBOLS.get(part) or int(part) for part in placement.within.split("·") if part)


def hold(tried: Try, ranks: int) -> int:
    """How many rows that shard a sequence over so many ranks hold; those that shard attention's are tried elsewhere."""
    trial = tried.trial(HeadTail())
    found = [(row,) for row in sequence_rows(trial, tried.call.op, ranks)]
    if found and not trial.fails:
        trial.check(ranks, among=found)
    return len(found)


def sequence_rows(trial: Trial, op: str, ranks: int) -> list[Row]:
    bound = trial.signature
    offered = rows(bound, ranks, grads=trial.flows, batch=BATCH)
    elsewhere = COUNTING | RANGES | ACROSS
    return [r for r in offered if r.factor and op not in elsewhere and _divides(bound.sizes[r.factor], r, ranks)]


def _divides(size: Size, row: Row, ranks: int) -> bool:
    """Whether the sequence in a size divides into chunks; else ranks say that they cannot hold it."""
    rest = size // BATCH if "b" in size.symbols and size.gcd(BATCH) == BATCH else size
    length = size.value(SYMBOLS) // max(majors(placed) for placed in (*row.operands, row.output))
    return "s" in size.symbols and rest.value(SYMBOLS) % (2 * ranks) == 0 and length % (2 * ranks) == 0
