"""Axis kinds: what each seeds on inputs and parameters, and what it may shard."""

from ndcompile.axes.data import DP_REPLICATE, DP_SHARD
from ndcompile.axes.kind import AxisKind
from ndcompile.axes.tp import TP

KINDS: dict[str, AxisKind] = {"dp_replicate": DP_REPLICATE, "dp_shard": DP_SHARD, "tp": TP}
"""By name; a sub-axis has its whole's kind."""

__all__ = ["KINDS", "AxisKind"]
