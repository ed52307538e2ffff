"""The mesh: named axes of ranks, parsed, checked, and counted."""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KINDS = ("dp_replicate", "dp_shard", "cp", "tp")
"""Axis kinds in mesh order, major first: ranks that differ only in `tp` are neighbours."""

PLANNED = ("ep", "pp")
"""Kinds that this version does not compile for."""

GATHERED = ("dp_replicate", "dp_shard", "cp")
"""The kinds over which a parameter is whole where compute takes it, wherever it lies between steps."""

HEAD_TAIL = ("cp",)
"""The kinds that shard sequences, of which each rank holds two chunks: an early one and a late one."""

ALIASES = {
    "data_parallel_replicate_degree": "dp_replicate",
    "data_parallel_shard_degree": "dp_shard",
    "context_parallel_degree": "cp",
    "context_parallel_size": "cp",
    "tensor_parallel_degree": "tp",
    "tensor_parallel_size": "tp",
    **{f"{kind}_size": kind for kind in KINDS},
}
"""Names that Accelerate, Axolotl and torchtitan give the same axes."""


class MeshError(ValueError):
    """A mesh that cannot be meant as written."""


def kind_of(axis: str) -> str:
    """The kind of an axis by its name: `tp` of `tp` and of its part `tp.0`."""
    return axis.partition(".")[0]


@dataclass(frozen=True)
class Axis:
    """One axis of ranks. A sub-axis is called `tp.0`, `tp.1`, major first, and has its whole's kind."""

    name: str
    size: int

    @property
    def kind(self) -> str:
        return kind_of(self.name)


@dataclass(frozen=True)
class MeshSpec:
    """Named axes and their sizes, major first; axes of size 1 are left out, so they change nothing.

    >>> mesh = MeshSpec.parse("dp_shard=2, tp=4")
    >>> mesh.world_size, mesh.size("tp"), mesh.size("dp_replicate")
    (8, 4, 1)
    >>> mesh.coordinate(5)
    {'dp_shard': 1, 'tp': 1}
    """

    axes: tuple[Axis, ...]

    @classmethod
    def parse(cls, spec: MeshLike, world_size: int | None = None) -> MeshSpec:
        """A mesh from `"dp_shard=2, tp=4"`, a mapping, or a torch `DeviceMesh` with names.

        One size may be -1: the rest of `world_size`. Raises `MeshError` where the text cannot be a mesh, or where the
        product of its sizes is not `world_size` (when that is given).
        """
        mesh = spec if isinstance(spec, MeshSpec) else _build(_pairs(spec), spec, world_size)
        if world_size is not None and mesh.world_size != world_size:
            raise MeshError(
                f"mesh '{mesh}' has {mesh.world_size} ranks, but the world has {world_size}\n"
                f"  why  every rank must have one place on the mesh\n"
                f"  try  sizes whose product is {world_size}; one of them may be -1 (the rest)"
            )
        return mesh

    @property
    def world_size(self) -> int:
        return math.prod(axis.size for axis in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.axes)

    def size(self, *names: str) -> int:
        """The number of ranks along these axes together; an axis that the mesh lacks has size 1."""
        return math.prod(axis.size for name in names for axis in self._parts(name))

    def _parts(self, name: str) -> list[Axis]:
        """The axis of this name, or its parts; none if the mesh lacks it."""
        return [axis for axis in self.axes if axis.name == name or axis.name.startswith(name + ".")]

    def of_kind(self, *kinds: str) -> tuple[str, ...]:
        """The names of the axes of these kinds, in mesh order."""
        return tuple(axis.name for axis in self.axes if axis.kind in kinds)

    def coordinate(self, rank: int) -> dict[str, int]:
        """Where a rank stands on each axis."""
        place: dict[str, int] = {}
        for axis in reversed(self.axes):
            rank, place[axis.name] = divmod(rank, axis.size)
        return {name: place[name] for name in self.names}

    def rank(self, coordinate: Mapping[str, int]) -> int:
        """The rank that stands at a coordinate: the inverse of `coordinate`."""
        found = 0
        for axis in self.axes:
            found = found * axis.size + coordinate[axis.name]
        return found

    def groups(self, *names: str) -> list[list[int]]:
        """The sets of ranks that differ only along these axes; within a set, the first named axis is the major one.

        The name of an axis in parts means all its parts; an axis that the mesh lacks has size 1 and changes nothing.

        >>> MeshSpec.parse("dp_shard=2, tp=2").groups("dp_shard")
        [[0, 2], [1, 3]]
        """
        chosen = [axis for name in names for axis in self._parts(name)]
        others = [axis for axis in self.axes if axis not in chosen]
        return [
            [self.rank(dict(outer) | dict(inner)) for inner in _coordinates(chosen)] for outer in _coordinates(others)
        ]

    def split(self, name: str, *sizes: int) -> MeshSpec:
        """The same ranks with one axis in parts, major first: `tp=16` split in (8, 2) is `tp.0=8, tp.1=2`."""
        if math.prod(sizes) != self[name].size or min(sizes) < 1:
            raise MeshError(
                f"axis '{name}' has {self[name].size} ranks: it cannot be split in {sizes}\n"
                f"  try  sizes whose product is {self[name].size}"
            )
        parts = tuple(Axis(f"{name}.{i}", size) for i, size in enumerate(sizes) if size > 1)
        return MeshSpec(tuple(p for axis in self.axes for p in (parts if axis.name == name else (axis,))))

    def __getitem__(self, name: str) -> Axis:
        for axis in self.axes:
            if axis.name == name:
                return axis
        raise MeshError(f"mesh '{self}' has no axis '{name}'\n  try  {', '.join(self.names) or 'a larger mesh'}")

    def __str__(self) -> str:
        return ", ".join(f"{axis.name}={axis.size}" for axis in self.axes) or "one rank"


MeshLike = MeshSpec | str | Mapping[str, int] | object
"""What users write for a mesh: text, a mapping, a `MeshSpec` or a named torch `DeviceMesh`."""


@dataclass(frozen=True)
class MeshAxis:
    """Names of axes as an argument in a graph; prints as what it is in the mesh in use, so that dumped graphs run.

    >>> MeshAxis(("tp",))
    MESH['tp']
    """

    names: tuple[str, ...]

    def __repr__(self) -> str:
        return f"MESH[{', '.join(map(repr, self.names))}]"


def _coordinates(axes: list[Axis]) -> Iterator[list[tuple[str, int]]]:
    for places in itertools.product(*(range(axis.size) for axis in axes)):
        yield list(zip((axis.name for axis in axes), places, strict=True))


def _pairs(spec: object) -> list[tuple[str, object]]:
    if isinstance(spec, str):
        return [_pair(part, spec) for part in spec.split(",") if part.strip()]
    if isinstance(spec, Mapping):
        return [(str(name), size) for name, size in spec.items()]
    names, shape = getattr(spec, "mesh_dim_names", None), getattr(spec, "shape", None)
    if names and shape is not None:
        _check_order(names)
        _check_ranks(spec)
        return list(zip(names, shape, strict=True))
    raise MeshError(
        f"cannot read a mesh from {spec!r}\n"
        f'  try  a text like "dp_shard=2, tp=4", a mapping, or a DeviceMesh with mesh_dim_names'
    )


def _check_order(names: Sequence[str]) -> None:
    """A DeviceMesh has its ranks laid out already; text has not, so that its order is free."""
    known = [ALIASES.get(name, name) for name in names]
    ordered = [kind for kind in KINDS if kind in known]
    if [name for name in known if name in KINDS] != ordered and len(set(known)) == len(known):
        raise MeshError(
            f"the DeviceMesh has its axes in the order {', '.join(names)}\n"
            f"  why  ranks are numbered with these axes major first: {', '.join(KINDS)}\n"
            f"  try  init_device_mesh with mesh_dim_names in the order {', '.join(ordered)}"
        )


def _check_ranks(device_mesh: Any) -> None:
    """A DeviceMesh may hold the ranks in any order; groups are made for ascending ones."""
    held = device_mesh.mesh.flatten().tolist() if hasattr(device_mesh, "mesh") else []
    if held != list(range(len(held))):
        raise MeshError(
            f"the DeviceMesh holds the ranks {', '.join(map(str, held))}\n"
            f"  why  ranks are numbered from 0 in ascending order, the last axis first\n"
            f"  try  init_device_mesh over all ranks of the world"
        )


def _pair(part: str, spec: str) -> tuple[str, object]:
    name, equals, size = (piece.strip() for piece in part.partition("="))
    if not equals:
        raise MeshError(f"cannot read '{part.strip()}' in mesh '{spec}'\n  try  axis=size, for example tp=4")
    try:
        return name, int(size)
    except ValueError:
        return name, size


def _build(pairs: list[tuple[str, object]], spec: object, world_size: int | None) -> MeshSpec:
    sizes: dict[str, int] = {}
    for name, size in pairs:
        name = _known(ALIASES.get(name, name), spec)
        if name in sizes:
            raise MeshError(f"axis '{name}' is given twice in mesh '{spec}'\n  try  one size for each axis")
        if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
            raise MeshError(
                f"axis '{name}' has size {size!r} in mesh '{spec}'\n"
                f"  try  a whole number of ranks, at least 1, or -1 for the rest"
            )
        sizes[name] = size
    _refuse_whole_and_parts(sizes, spec)
    axes = [Axis(name, size) for name, size in _filled(sizes, spec, world_size).items() if size > 1]
    return MeshSpec(tuple(sorted(axes, key=_place_in_mesh)))


def _place_in_mesh(axis: Axis) -> tuple[int, int]:
    """Kinds in mesh order, the parts of a split axis in their own."""
    return KINDS.index(axis.kind), int(axis.name.partition(".")[2] or 0)


def _refuse_whole_and_parts(sizes: Mapping[str, int], spec: object) -> None:
    for name in sizes:
        whole, dot, _ = name.partition(".")
        if dot and whole in sizes:
            raise MeshError(f"axis '{whole}' is given whole and in parts in mesh '{spec}'\n  try  one of the two")


def _known(name: str, spec: object) -> str:
    whole, dot, number = name.partition(".")
    if dot and whole in HEAD_TAIL:
        raise MeshError(
            f"axis '{whole}' cannot be given in parts, as in mesh '{spec}'\n"
            f"  why  attention goes over all of its ranks\n"
            f"  try  {whole}=…, the product of the parts"
        )
    if whole in KINDS and (not dot or number.isdecimal()):
        return name
    if name in PLANNED:
        raise MeshError(f"axis '{name}' in mesh '{spec}' is not built yet\n  try  {', '.join(KINDS)}")
    close = difflib.get_close_matches(name, KINDS, n=1)
    hint = f"'{close[0]}'" if close else ", ".join(KINDS)
    raise MeshError(f"unknown axis '{name}' in mesh '{spec}'\n  try  {hint}")


def _filled(sizes: dict[str, int], spec: object, world_size: int | None) -> dict[str, int]:
    """The sizes with the number that -1 stands for: the rest of the world."""
    open_axes = [name for name, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise MeshError(f"-1 stands twice in mesh '{spec}'\n  try  -1 for one axis only: it takes the rest")
    if open_axes:
        given = math.prod(size for size in sizes.values() if size != -1)
        if world_size is None:
            raise MeshError(f"mesh '{spec}' has a -1, but the number of ranks is not known\n  try  world_size=…")
        if world_size % given:
            raise MeshError(
                f"mesh '{spec}' cannot fill {world_size} ranks: {world_size} is not a multiple of {given}\n"
                f"  try  sizes whose product divides {world_size}"
            )
        sizes = sizes | {open_axes[0]: world_size // given}
    return sizes
