"""Ranks and their groups, as each process sees them."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ndcompile.mesh import MeshSpec
from ndcompile.runtime.collectives import all_gather
from ndcompile.runtime.mesh import Mesh, Ranks, current, use
from tests.ranks import run

SPEC = MeshSpec.parse("dp_shard=2, tp=2")


@pytest.mark.parametrize("size", [0, 1, 3, 8, 9, 10])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_parts_are_those_of_torch_chunk(size, ranks):
    whole = torch.arange(size)
    chunks = list(whole.chunk(ranks)) if size else []
    chunks += [whole[:0]] * (ranks - len(chunks))
    assert Ranks("tp", ranks, 0, "tp").parts(size) == tuple(len(chunk) for chunk in chunks)
    for index, chunk in enumerate(chunks):
        mine = Ranks("tp", ranks, index, "tp")
        assert whole[mine.start(size) : mine.start(size) + mine.part(size)].tolist() == chunk.tolist()


def test_an_unbound_mesh_names_its_groups_by_axis():
    mesh = Mesh(SPEC, rank=2)
    assert mesh["dp_shard"] == Ranks("dp_shard", 2, 1, "dp_shard")
    assert mesh["tp"] == Ranks("tp", 2, 0, "tp")
    assert mesh["dp_replicate"] == Ranks("dp_replicate", 1, 0, "dp_replicate")
    assert mesh["dp_shard", "tp"] == Ranks("dp_shard,tp", 4, 2, "dp_shard,tp")
    assert mesh["dp_replicate", "tp"].size == 2


def test_an_axis_in_parts_is_still_found_by_its_name():
    assert Mesh(MeshSpec.parse("tp=8").split("tp", 4, 2), rank=5)["tp"].index == 5


def gathered_ranks(with_device_mesh: bool) -> dict[str, list[int]]:
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp")) if with_device_mesh else None
    flattened = [("dp_replicate", "dp_shard"), ("dp_shard", "tp")]
    mesh = Mesh.bound(SPEC, flattened, device_mesh, timeout=timedelta(seconds=20))
    if device_mesh is not None:
        assert mesh["tp"].group == device_mesh.get_group("tp").group_name
    me = torch.tensor([dist.get_rank()])
    found = {}
    for names in ("tp", "dp_shard", *flattened):
        axis = mesh[names]
        found[axis.name] = all_gather(me, axis, 0).tolist()
        assert found[axis.name][axis.index] == dist.get_rank()
    return found


@pytest.mark.parametrize("with_device_mesh", [False, True])
def test_a_bound_mesh_gathers_in_the_order_of_its_axes(with_device_mesh):
    answers = run(4, gathered_ranks, with_device_mesh)
    for rank, found in enumerate(answers):
        dp, tp = divmod(rank, 2)
        assert found == {
            "tp": [2 * dp, 2 * dp + 1],
            "dp_shard": [tp, tp + 2],
            "dp_replicate,dp_shard": [tp, tp + 2],
            "dp_shard,tp": [0, 1, 2, 3],
        }


def refusal() -> str:
    with pytest.raises(ValueError) as caught:
        Mesh.bound(MeshSpec.parse("tp=4"))
    return str(caught.value)


def test_a_mesh_that_is_not_the_worlds_is_refused():
    for answer in run(2, refusal):
        assert "mesh 'tp=4' has 4 ranks, but the world has 2" in answer


def test_axes_are_flattened_in_mesh_order_only():
    with pytest.raises(ValueError, match=r"(?s)cannot flatten tp, dp_shard in this order.*try  dp_shard, tp"):
        Mesh(SPEC)["tp", "dp_shard"]


def test_current_is_the_mesh_in_use():
    assert current("dp_shard=2, tp=2")["tp"].index == 0
    assert current(str(MeshSpec(())))["tp"].size == 1
    with use(Mesh(SPEC, rank=3)) as mesh:
        assert current("dp_shard=2, tp=2", ("dp_shard", "tp")) is mesh
        with pytest.raises(ValueError, match="compiled for mesh 'tp=4', but 'dp_shard=2, tp=2' is in use"):
            current("tp=4")
    lacking = Mesh(SPEC, 0, {("tp",): "a", ("dp_shard",): "b"})
    with use(lacking), pytest.raises(ValueError, match="no process group over dp_shard, tp together"):
        current("dp_shard=2, tp=2", ("dp_shard", "tp"))
