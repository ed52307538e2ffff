"""What a conversion and an op cost: a model of time that only ever compares alternatives.

The constants are those of one H200 node, rounded (bus 300 GB/s, memory 4 TB/s, bf16 matmul 700 TFLOP/s). Choices are
made at nominal sizes of the symbols, so that they do not depend on the example inputs.
"""

from __future__ import annotations

from collections.abc import Mapping

from ndcompile.placement import COLLECTIVES, CONVERSIONS, Placement

BUS = 300e9  # bytes/s between ranks
MEMORY = 4e12  # bytes/s of a device's memory
MATMUL = 7e14  # FLOP/s
LATENCY = 1e-9  # s a collective of a value with a gradient: it only breaks ties, whatever the size of the model
LATENCY_PLAIN = 2e-5  # s a collective of one without (a mask, positions): small, and recomputed rather than sent
NOMINAL: Mapping[str, int] = {"b": 4, "s": 4096}
"""Nominal sizes: `b` a data-parallel rank's batch, `s` the whole sequence."""

VOLUME = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 0.0}
"""Bytes on the wire, in units of (n - 1)/n of the value's bytes; an all-to-all moves a further 1/n of it."""


def collective_time(primitive: str, nbytes: float, ranks: int, latency: float = LATENCY) -> float:
    """Seconds of a primitive on a value of `nbytes` bytes (the whole of it along the axis) over `ranks` ranks."""
    if primitive not in COLLECTIVES:
        return 0.0 if primitive == "identity" else nbytes / MEMORY
    share = 1 / ranks if primitive == "all_to_all" else VOLUME[primitive]
    return latency + share * nbytes * (ranks - 1) / ranks / BUS


def conversion_time(source: Placement, target: Placement, nbytes: float, ranks: int, grad: bool = True) -> float:
    """Seconds of a conversion on one axis, forward and (with `grad`) backward; infinite if it is not legal.

    A value without gradient has one replicated placement: from `R` to `I` and back is nothing. `P(max)` and `P(min)`
    carry no gradient and reduce to the whole value; none of the conversions makes them, since those pad with zeros.
    """
    if source == target or (not grad and source.whole and target.whole):
        return 0.0
    row = CONVERSIONS.get((source.kind, target.kind))
    sums = all(p.op in (None, "sum") for p in (source, target))
    if row is None or (not sums and (grad or not target.whole)):
        return float("inf")
    forward = collective_time(row.forward, nbytes, ranks, LATENCY if grad else LATENCY_PLAIN)
    return forward + (collective_time(row.backward, nbytes, ranks) if grad else 0.0)


def conversion_bytes(source: Placement, target: Placement, nbytes: float, ranks: int, grad: bool = True) -> float:
    """Bytes that a rank sends in a conversion on one axis, forward and (with `grad`) backward."""
    row = CONVERSIONS.get((source.kind, target.kind))
    if source == target or row is None or (not grad and source.whole and target.whole):
        return 0.0
    sides = (row.forward, row.backward) if grad else (row.forward,)
    shares = (1 / ranks if side == "all_to_all" else VOLUME.get(side, 0.0) for side in sides)
    return sum(shares) * nbytes * (ranks - 1) / ranks


def op_time(flops: float, nbytes: float) -> float:
    """Seconds of an op on one rank: its arithmetic, and its operands and results through memory."""
    return flops / MATMUL + nbytes / MEMORY
