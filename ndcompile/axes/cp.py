"""The context-parallel axis: sequences are sharded, parameters lie as over data axes, attention communicates."""

from __future__ import annotations

from ndcompile.axes.data import kept_sharded, used_whole
from ndcompile.axes.kind import AxisKind

CP = AxisKind("s", False, False, used_whole, kept_sharded, price=0.0, attends=True)
"""Inputs come whole to every rank, and each takes its part of the sequence: `R→S`, without communication."""
