"""Rows of docs/bugs.md on checkpoints: what is saved on one mesh goes on on another, optimizer and all."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

from tests.bugs import saved
from tests.bugs.conftest import Found
from tests.bugs.models import batch
from tests.claims import assert_close, whole


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


def steps(module: nn.Module, optimizer: torch.optim.Optimizer, given: dict[str, Tensor], count: int) -> None:
    for _ in range(count):
        module(**given)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()


def common_folder() -> str:
    made: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    return str(made[0])


def goes_on(first: str, then: str) -> None:
    """Two steps on one mesh, an evaluation, a checkpoint to which each rank writes, loaded at once on another mesh:
    moments are those of one device, and so are the parameters after a third step."""
    model, one, folder = saved.model(), saved.load(first), common_folder()
    single, optimizer = adamw(model), adamw(one)
    steps(model, single, batch(), 2)
    steps(one, optimizer, saved.share(first), 2)
    with torch.no_grad():
        one(**saved.share(first))
    parameters, moments = get_state_dict(one, optimizer)
    state_dict_saver.save({"model": parameters, "optimizer": moments}, checkpoint_id=folder)
    assert sorted(p.name for p in Path(folder).glob("*.distcp")) == [f"__{r}_0.distcp" for r in range(4)]

    other = saved.load(then)
    resumed = adamw(other)
    parameters, moments = get_state_dict(other, resumed)
    state: dict[str, Any] = {"model": parameters, "optimizer": moments}
    state_dict_loader.load(state, checkpoint_id=folder)
    set_state_dict(other, resumed, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    mine = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        assert_close(mine[name], parameter, what=name)
        for kind, value in single.state[parameter].items():
            assert_close(resumed.state[mine[name]][kind], value, what=f"{kind} of {name}")
    steps(model, single, batch(), 1)
    steps(other, resumed, saved.share(then), 1)
    for name, parameter in model.named_parameters():
        assert_close(mine[name], parameter, what=f"{name} after a step")


def tp_goes_on_on_hsdp() -> None:
    """The rows of gate and values, in one matrix that tp cuts in two, are where they were."""
    goes_on("tp", "hsdp")


def hsdp_goes_on_on_tp() -> None:
    goes_on("hsdp", "tp")


def cp_goes_on_on_tp() -> None:
    goes_on("cp", "tp")


def a_state_dict_loads_where_parameters_are_cut_along_other_dims() -> None:
    one, other, model = saved.load("tp"), saved.load("tp, other dims"), saved.model()
    state = one.state_dict()
    cut = {name: (str(state[name].placements), str(p.placements)) for name, p in other.named_parameters()}  # type: ignore[attr-defined]
    assert sum(before != after for before, after in cut.values()) >= 2, cut
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(state)
    found = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        assert_close(found[name], parameter, what=name)
    assert_close(other(**saved.share("tp"))["loss"], model(**batch())["loss"])


def torch_save_takes_a_state_dict() -> None:
    """Of DTensors, as each rank has them, and whole on rank 0."""
    one, model = saved.load("tp"), saved.model()
    file = io.BytesIO()
    torch.save(one.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert list(loaded) == list(model.state_dict())
    for name, value in model.state_dict().items():
        assert_close(whole(loaded[name]), value, what=name)
    full = get_model_state_dict(one, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert list(full) == (list(model.state_dict()) if dist.get_rank() == 0 else [])


def one_rank_alone_may_ask_for_its_state() -> None:
    """Nothing is sent: what waits for the other ranks is `full_tensor`, and what torch saves with."""
    one = saved.load("hsdp")
    if dist.get_rank() == 0:
        assert all(type(p.to_local()) is Tensor for p in one.state_dict().values())


ON_FOUR = (
    tp_goes_on_on_hsdp,
    hsdp_goes_on_on_tp,
    cp_goes_on_on_tp,
    a_state_dict_loads_where_parameters_are_cut_along_other_dims,
    torch_save_takes_a_state_dict,
    one_rank_alone_may_ask_for_its_state,
)


@pytest.mark.parametrize("claim", ON_FOUR, ids=lambda claim: claim.__name__)
def test_on_four_ranks(claim: Callable[[], None], found: Found) -> None:
    assert [theirs[claim.__name__] for theirs in found] == [""] * 4
