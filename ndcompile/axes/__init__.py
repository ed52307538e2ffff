"""Axis kinds: what each seeds on inputs and parameters, and what it may shard."""

from ndcompile.axes.cp import CP
from ndcompile.axes.data import DP_REPLICATE, DP_SHARD
from ndcompile.axes.kind import AxisKind
from ndcompile.axes.tp import TP
from ndcompile.mesh import MeshSpec

KINDS: dict[str, AxisKind] = {"dp_replicate": DP_REPLICATE, "dp_shard": DP_SHARD, "cp": CP, "tp": TP}
"""By name; a sub-axis has its whole's kind."""


def data_axes(mesh: MeshSpec) -> tuple[str, ...]:
    """The axes of a mesh whose ranks have samples of their own."""
    return tuple(axis.name for axis in mesh.axes if KINDS[axis.kind].shards_batch)


def data_ranks(mesh: MeshSpec) -> int:
    """How many ranks have samples of their own."""
    return mesh.size(*data_axes(mesh))


def parts(over: str, ranks: int) -> int:
    """Into how many parts axes of these kinds (`cp × tp`) cut a sequence: head–tail each rank has two."""
    return ranks * (2 if over in KINDS and KINDS[over].attends else 1)


__all__ = ["KINDS", "AxisKind", "data_axes", "data_ranks", "parts"]
