"""The mesh as one process sees it: for each axis, its ranks, this rank's place among them, and their process group."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ndcompile.mesh import MeshError, MeshSpec
from ndcompile.runtime import private
from ndcompile.runtime.wires import by_copies, wire_over


@dataclass(frozen=True)
class Ranks:
    """The ranks of one axis, or of several flattened into one (first major), with this process at `index`.

    `group` names the process group for functional collectives; it is `name` while no process group is bound.

    >>> Ranks("tp", size=4, index=3, group="tp").parts(10)
    (3, 3, 3, 1)
    """

    name: str
    size: int
    index: int
    group: str

    def start(self, size: int) -> int:
        """Where this rank's part of a dim of `size` begins."""
        return min(self.index * -(-size // self.size), size)

    def part(self, size: int) -> int:
        """The length of this rank's part of a dim of `size`: the first ones are equal, later ones smaller or empty."""
        return min(-(-size // self.size), size - self.start(size))

    def parts(self, size: int) -> tuple[int, ...]:
        """The lengths of all ranks' parts, in rank order; they add up to `size`."""
        step = -(-size // self.size)
        return tuple(max(0, min(step, size - rank * step)) for rank in range(self.size))


class Mesh:
    """Named axes of ranks seen from `rank`; unbound (no process groups) unless `groups` names them.

    >>> mesh = Mesh(MeshSpec.parse("dp_shard=2, tp=2"), rank=1)
    >>> mesh["tp"].index, mesh["dp_shard", "tp"].size, mesh["dp_replicate"].size
    (1, 4, 1)
    """

    def __init__(
        self,
        spec: MeshSpec,
        rank: int = 0,
        groups: Mapping[tuple[str, ...], str] | None = None,
        weight_groups: Mapping[str, str] | None = None,
    ) -> None:
        self.spec = spec
        self.rank = rank
        self.groups = None if groups is None else dict(groups)
        self._weight_groups = dict(weight_groups or {})
        self._coordinate = spec.coordinate(rank)
        self._known: dict[str | tuple[str, ...], Ranks] = {}

    @classmethod
    def bound(
        cls,
        spec: MeshSpec,
        flattened: Iterable[tuple[str, ...]] = (),
        device_mesh: DeviceMesh | None = None,
        timeout: timedelta | None = None,
    ) -> Mesh:
        """The mesh with a process group for each axis and for each set of axes in `flattened`.

        Groups of single axes are those of `device_mesh` where it has them. All ranks of the world must call this
        alike, since each of them takes part in making every group. `timeout` is that of the groups made here.

        On GPUs weights have groups of their own, so that what moves beside the computation and what the computation
        waits for do not queue behind each other.
        """
        if dist.get_world_size() != spec.world_size:
            raise MeshError(
                f"mesh '{spec}' has {spec.world_size} ranks, but the world has {dist.get_world_size()}\n"
                f"  why  every rank must have one place on the mesh\n"
                f"  try  a mesh whose sizes multiply to {dist.get_world_size()}"
            )
        groups = {names: _group(spec, names, device_mesh, timeout) for names in grouped(spec, flattened)}
        apart = spec.names if private.on_gpus() else ()
        return cls(spec, dist.get_rank(), groups, {name: _weight_group(spec, name, timeout) for name in apart})

    def __getitem__(self, names: str | tuple[str, ...]) -> Ranks:
        """The ranks along an axis, or along several flattened (in mesh order); axes it lacks have one rank."""
        found = self._known.get(names)
        if found is None:
            found = self._known[names] = self._ranks((names,) if isinstance(names, str) else names)
        return found

    def by_copies(self, device: torch.device) -> Mesh:
        """The same, with gathers and reduce-scatters of activations by copies (`wires.py`)."""
        wires = {names: wire_over(group, device) for names, group in (self.groups or {}).items()}
        return Mesh(self.spec, self.rank, wires, self._weight_groups)

    @property
    def wires(self) -> list[str]:
        """The groups over which activations travel by copies."""
        return [group for group in (self.groups or {}).values() if by_copies(group)]

    def for_weights(self, name: str) -> Ranks:
        """The ranks along an axis, with the group on which weights and their gradients move."""
        ranks = self[name]
        return replace(ranks, group=self._weight_groups.get(name, ranks.group))

    def team(self, *names: str) -> tuple[int, ...]:
        """The ranks of the world that differ from this one along these axes only, the first named axis major.

        >>> Mesh(MeshSpec.parse("dp_shard=2, cp=2, tp=2"), rank=3).team("cp", "dp_shard")
        (1, 5, 3, 7)
        """
        return tuple(next(ranks for ranks in self.spec.groups(*names) if self.rank in ranks))

    def _ranks(self, names: tuple[str, ...]) -> Ranks:
        axes, label, index = _parts(self.spec, names), ",".join(names), 0
        for axis in axes:
            index = index * self.spec.size(axis) + self._coordinate[axis]
        return Ranks(label, self.spec.size(*axes), index, self._group(axes, label))

    def _group(self, axes: tuple[str, ...], label: str) -> str:
        if self.groups is None or not axes:
            return label
        if axes not in self.groups:
            raise MeshError(
                f"mesh '{self.spec}' has no process group over {', '.join(axes)} together\n"
                f"  why  groups are made once, by all ranks, when the mesh is bound\n"
                f"  try  Mesh.bound(spec, flattened=[{axes!r}])"
            )
        return self.groups[axes]

    def __repr__(self) -> str:
        return f"Mesh({str(self.spec)!r}, rank={self.rank}{'' if self.groups is None else ', bound'})"


_in_use: ContextVar[Mesh | None] = ContextVar("ndcompile_mesh", default=None)


@contextmanager
def use(mesh: Mesh) -> Iterator[Mesh]:
    """Let emitted modules that are executed inside the block take this mesh as theirs."""
    token = _in_use.set(mesh)
    try:
        yield mesh
    finally:
        _in_use.reset(token)


def current(spec_text: str, *flattened: tuple[str, ...]) -> Mesh:
    """The mesh that `use` put in place, or an unbound one at rank 0 where there is none.

    Raises `MeshError` where its sizes are not those of `spec_text`, or where it lacks the group of a flattened set.
    """
    mesh = _in_use.get()
    if mesh is None:
        return Mesh(MeshSpec.parse("" if spec_text == str(MeshSpec(())) else spec_text))
    if str(mesh.spec) != spec_text and mesh.spec != MeshSpec.parse(spec_text):
        raise MeshError(
            f"this module was compiled for mesh '{spec_text}', but '{mesh.spec}' is in use\n"
            f"  why  its local sizes and collectives hold for that mesh only\n"
            f"  try  a mesh of the sizes above, or compile again for '{mesh.spec}'"
        )
    for names in flattened:
        mesh[names]
    return mesh


def grouped(spec: MeshSpec, flattened: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The sets of axes over which a mesh has groups: each axis, and those that are flattened."""
    wanted = [*((name,) for name in spec.names), *(_parts(spec, names) for names in flattened)]
    return list(dict.fromkeys(names for names in wanted if names))


def _parts(spec: MeshSpec, names: tuple[str, ...]) -> tuple[str, ...]:
    """The axes of the mesh that `names` stand for: none for an absent one, its sub-axes for one that was split."""
    axes = tuple(axis for name in names for axis in spec.names if axis == name or axis.startswith(name + "."))
    ordered = tuple(axis for axis in spec.names if axis in axes)
    if axes != ordered:
        raise MeshError(
            f"cannot flatten {', '.join(axes)} in this order\n"
            f"  why  torch puts the ranks of a process group in ascending order, which is that of the mesh\n"
            f"  try  {', '.join(ordered)}"
        )
    return axes


def _group(spec: MeshSpec, names: tuple[str, ...], device_mesh: DeviceMesh | None, timeout: timedelta | None) -> str:
    if device_mesh is not None and len(names) == 1 and names[0] in (device_mesh.mesh_dim_names or ()):
        return private.group_name(device_mesh.get_group(names[0]))
    group, _ = dist.new_subgroups_by_enumeration(spec.groups(*names), timeout=timeout)
    return private.group_name(group)


def _weight_group(spec: MeshSpec, name: str, timeout: timedelta | None) -> str:
    options = private.high_priority()
    group, _ = dist.new_subgroups_by_enumeration(spec.groups(name), timeout=timeout, pg_options=options)
    return private.group_name(group)
