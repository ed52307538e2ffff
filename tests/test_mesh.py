"""Meshes: what can be written for one, what cannot, and which ranks stand where."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from ndcompile.mesh import ALIASES, KINDS, Axis, MeshError, MeshLike, MeshSpec

TWO_BY_FOUR = MeshSpec((Axis("dp_shard", 2), Axis("tp", 4)))


@dataclass
class NamedMesh:
    """As much of a DeviceMesh as a mesh is read from."""

    mesh_dim_names: tuple[str, ...]
    shape: tuple[int, ...]


@dataclass
class Permuted(NamedMesh):
    """One that holds the ranks in an order of its own."""

    mesh: torch.Tensor


@pytest.mark.parametrize(
    "spec",
    [
        "dp_shard=2, tp=4",
        "dp_shard=2,tp=4",
        " tp = 4 , dp_shard = 2 , ",
        "dp_replicate=1, dp_shard=2, tp=4",
        "dp_shard=-1, tp=4",
        {"dp_shard": 2, "tp": 4},
        {"tp": 4, "dp_shard": -1},
        TWO_BY_FOUR,
        NamedMesh(("dp_shard", "tp"), (2, 4)),
        NamedMesh(("dp_replicate", "dp_shard", "tp"), (1, 2, 4)),
        NamedMesh(("dp_shard_size", "tp_size"), (2, 4)),
    ],
    ids=str,
)
def test_every_form_means_the_same_mesh(spec: MeshLike) -> None:
    assert MeshSpec.parse(spec, world_size=8) == TWO_BY_FOUR


@pytest.mark.parametrize("spec", ["", "tp=1", "dp_shard=1, dp_replicate=1", {}, NamedMesh(("tp",), (1,))], ids=str)
def test_axes_of_size_one_vanish(spec: MeshLike) -> None:
    mesh = MeshSpec.parse(spec, world_size=1)
    assert mesh.axes == () and mesh.world_size == 1 and str(mesh) == "one rank"
    assert mesh.coordinate(0) == {} and mesh.rank({}) == 0 and mesh.groups("tp") == [[0]]


def test_minus_one_is_the_rest() -> None:
    assert str(MeshSpec.parse("dp_replicate=-1, tp=2", world_size=12)) == "dp_replicate=6, tp=2"
    assert str(MeshSpec.parse("dp_shard=-1, tp=4", world_size=4)) == "tp=4"


@pytest.mark.parametrize(("alias", "kind"), [(a, k) for a, k in ALIASES.items() if k in KINDS])
def test_names_of_other_libraries_mean_the_same_axes(alias: str, kind: str) -> None:
    assert MeshSpec.parse(f"{alias}=4") == MeshSpec.parse(f"{kind}=4")


@pytest.fixture(scope="module")
def eight_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("eight_ranks")
def test_a_device_mesh_numbers_ranks_as_its_spec_does() -> None:
    device_mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp_shard", "tp"))
    mesh = MeshSpec.parse(device_mesh, world_size=8)
    assert mesh == TWO_BY_FOUR
    for rank in range(8):
        place = mesh.coordinate(rank)
        assert device_mesh.mesh[place["dp_shard"], place["tp"]] == rank


ERRORS: list[tuple[MeshLike, int | None, str]] = [
    (
        "dp_shard=2, tp=4",
        6,
        "mesh 'dp_shard=2, tp=4' has 8 ranks, but the world has 6\n"
        "  why  every rank must have one place on the mesh\n"
        "  try  sizes whose product is 6; one of them may be -1 (the rest)",
    ),
    ("tp", None, "cannot read 'tp' in mesh 'tp'\n  try  axis=size, for example tp=4"),
    ("tp=4, 2", None, "cannot read '2' in mesh 'tp=4, 2'\n  try  axis=size, for example tp=4"),
    ("dp_shards=4", None, "unknown axis 'dp_shards' in mesh 'dp_shards=4'\n  try  'dp_shard'"),
    ("dp=4", None, "unknown axis 'dp' in mesh 'dp=4'\n  try  dp_replicate, dp_shard, cp, tp"),
    ("pipeline=4", None, "unknown axis 'pipeline' in mesh 'pipeline=4'\n  try  dp_replicate, dp_shard, cp, tp"),
    ("ep=2", None, "axis 'ep' in mesh 'ep=2' is not built yet\n  try  dp_replicate, dp_shard, cp, tp"),
    ({"pp": 1}, None, "axis 'pp' in mesh '{'pp': 1}' is not built yet\n  try  dp_replicate, dp_shard, cp, tp"),
    (
        "cp.0=2, cp.1=2",
        None,
        "axis 'cp' cannot be given in parts, as in mesh 'cp.0=2, cp.1=2'\n"
        "  why  attention goes over all of its ranks\n"
        "  try  cp=…, the product of the parts",
    ),
    ("tp=2, tp=2", None, "axis 'tp' is given twice in mesh 'tp=2, tp=2'\n  try  one size for each axis"),
    (
        "tp=2, tp_size=2",
        None,
        "axis 'tp' is given twice in mesh 'tp=2, tp_size=2'\n  try  one size for each axis",
    ),
    *[
        (
            f"tp={size}",
            None,
            f"axis 'tp' has size {shown} in mesh 'tp={size}'\n"
            f"  try  a whole number of ranks, at least 1, or -1 for the rest",
        )
        for size, shown in [("two", "'two'"), ("0", "0"), ("-2", "-2"), ("2.0", "'2.0'"), ("", "''")]
    ],
    (
        {"tp": True},
        None,
        "axis 'tp' has size True in mesh '{'tp': True}'\n"
        "  try  a whole number of ranks, at least 1, or -1 for the rest",
    ),
    (
        "dp_shard=-1, tp=-1",
        8,
        "-1 stands twice in mesh 'dp_shard=-1, tp=-1'\n  try  -1 for one axis only: it takes the rest",
    ),
    ("tp=-1", None, "mesh 'tp=-1' has a -1, but the number of ranks is not known\n  try  world_size=…"),
    (
        "dp_shard=-1, tp=3",
        8,
        "mesh 'dp_shard=-1, tp=3' cannot fill 8 ranks: 8 is not a multiple of 3\n  try  sizes whose product divides 8",
    ),
    (
        4,
        None,
        "cannot read a mesh from 4\n"
        '  try  a text like "dp_shard=2, tp=4", a mapping, or a DeviceMesh with mesh_dim_names',
    ),
    (
        NamedMesh((), (4,)),
        None,
        "cannot read a mesh from NamedMesh(mesh_dim_names=(), shape=(4,))\n"
        '  try  a text like "dp_shard=2, tp=4", a mapping, or a DeviceMesh with mesh_dim_names',
    ),
    (
        NamedMesh(("tp", "dp_shard"), (4, 2)),
        None,
        "the DeviceMesh has its axes in the order tp, dp_shard\n"
        "  why  ranks are numbered with these axes major first: dp_replicate, dp_shard, cp, tp\n"
        "  try  init_device_mesh with mesh_dim_names in the order dp_shard, tp",
    ),
    (
        Permuted(("dp_shard", "tp"), (2, 2), torch.tensor([[0, 2], [1, 3]])),
        None,
        "the DeviceMesh holds the ranks 0, 2, 1, 3\n"
        "  why  ranks are numbered from 0 in ascending order, the last axis first\n"
        "  try  init_device_mesh over all ranks of the world",
    ),
]


@pytest.mark.parametrize(("spec", "world_size", "message"), ERRORS, ids=[str(spec) for spec, _, _ in ERRORS])
def test_an_error_says_what_and_what_to_try(spec: MeshLike, world_size: int | None, message: str) -> None:
    with pytest.raises(MeshError) as error:
        MeshSpec.parse(spec, world_size)
    assert str(error.value) == message


def test_a_split_into_other_sizes_is_an_error() -> None:
    for sizes in [(3, 2), (-2, -2)]:
        with pytest.raises(MeshError) as error:
            TWO_BY_FOUR.split("tp", *sizes)
        what = f"axis 'tp' has 4 ranks: it cannot be split in {sizes}"
        assert str(error.value) == f"{what}\n  try  sizes whose product is 4"


def test_an_axis_that_is_not_there_is_an_error() -> None:
    with pytest.raises(MeshError) as error:
        TWO_BY_FOUR["dp_replicate"]
    assert str(error.value) == "mesh 'dp_shard=2, tp=4' has no axis 'dp_replicate'\n  try  dp_shard, tp"


meshes = st.tuples(*[st.integers(1, 4)] * len(KINDS)).map(
    lambda sizes: MeshSpec.parse(dict(zip(KINDS, sizes, strict=True)))
)


@given(meshes)
def test_a_coordinate_names_its_rank(mesh: MeshSpec) -> None:
    assert [mesh.rank(mesh.coordinate(rank)) for rank in range(mesh.world_size)] == list(range(mesh.world_size))
    assert all(0 <= place < mesh.size(axis) for axis, place in mesh.coordinate(mesh.world_size - 1).items())


@given(meshes)
def test_a_mesh_prints_as_it_is_written(mesh: MeshSpec) -> None:
    assert MeshSpec.parse("" if mesh.world_size == 1 else str(mesh)) == mesh


@given(meshes, st.sets(st.sampled_from(KINDS)))
def test_groups_partition_the_ranks(mesh: MeshSpec, names: set[str]) -> None:
    groups = mesh.groups(*names)
    assert sorted(itertools.chain(*groups)) == list(range(mesh.world_size))
    assert {len(group) for group in groups} == {mesh.size(*names)}


@given(meshes, st.sets(st.sampled_from(KINDS)))
def test_ranks_of_a_group_differ_only_along_its_axes(mesh: MeshSpec, names: set[str]) -> None:
    for group in mesh.groups(*names):
        others = [{k: v for k, v in mesh.coordinate(rank).items() if k not in names} for rank in group]
        assert all(place == others[0] for place in others)


def test_neighbours_on_the_last_axis_are_consecutive_ranks() -> None:
    assert TWO_BY_FOUR.groups("tp") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert TWO_BY_FOUR.groups("dp_shard") == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_the_first_named_axis_of_a_group_is_the_major_one() -> None:
    assert TWO_BY_FOUR.groups("dp_shard", "tp") == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert TWO_BY_FOUR.groups("tp", "dp_shard") == [[0, 4, 1, 5, 2, 6, 3, 7]]


def test_groups_along_no_axis_are_single_ranks() -> None:
    assert TWO_BY_FOUR.groups() == TWO_BY_FOUR.groups("dp_replicate") == [[rank] for rank in range(8)]


def test_an_axis_in_parts_keeps_its_ranks() -> None:
    mesh = MeshSpec.parse("dp_shard=2, tp=16").split("tp", 8, 2)
    assert str(mesh) == "dp_shard=2, tp.0=8, tp.1=2"
    assert mesh.groups("tp.0")[:2] == [[0, 2, 4, 6, 8, 10, 12, 14], [1, 3, 5, 7, 9, 11, 13, 15]]
    assert mesh.groups("tp.1")[:3] == [[0, 1], [2, 3], [4, 5]]
    assert mesh.groups("tp") == mesh.groups("tp.0", "tp.1") == [list(range(16)), list(range(16, 32))]


def test_the_whole_has_the_size_of_its_parts() -> None:
    mesh = MeshSpec.parse("tp=16").split("tp", 8, 2)
    assert (mesh.size("tp"), mesh.size("tp.0"), mesh.size("tp.1"), mesh.size("tp.0", "tp.1")) == (16, 8, 2, 16)
    assert mesh.world_size == 16 and mesh.size("dp_shard") == 1


def test_parts_have_the_kind_of_their_whole() -> None:
    mesh = MeshSpec.parse("dp_shard=2, tp=16").split("tp", 8, 2)
    assert mesh.of_kind("tp") == ("tp.0", "tp.1")
    assert mesh.of_kind("tp", "dp_shard") == ("dp_shard", "tp.0", "tp.1")
    assert mesh["tp.1"] == Axis("tp.1", 2) and mesh["tp.1"].kind == "tp"


def test_a_part_of_size_one_vanishes() -> None:
    assert str(MeshSpec.parse("tp=4").split("tp", 4, 1)) == "tp.0=4"


def test_the_parts_of_an_axis_can_be_named_in_a_text() -> None:
    mesh = MeshSpec.parse("dp_shard=2, tp.1=2, tp.0=4")
    assert mesh == MeshSpec.parse("dp_shard=2, tp=8").split("tp", 4, 2)
    assert MeshSpec.parse(str(mesh)) == mesh


def test_an_axis_is_whole_or_in_parts() -> None:
    with pytest.raises(MeshError) as caught:
        MeshSpec.parse("tp=4, tp.0=2")
    assert str(caught.value) == "axis 'tp' is given whole and in parts in mesh 'tp=4, tp.0=2'\n  try  one of the two"
