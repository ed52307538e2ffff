"""Buffers that a forward writes, on ranks: equal on all of them, and the single device's, in training and after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ndcompile as nd
from tests import ranks
from tests.claims import FLOAT64, Claims, assert_close, assert_same_gradients, own, run_claims
from tests.equivalence.images import IMAGES
from tests.equivalence.zoo import ALL

Found = list[dict[str, str]]


def prepared(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    model, batch = (IMAGES | ALL)[name](8)
    return model.double(), {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}


def step(model: nn.Module, batch: dict[str, Tensor], optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(**batch)["loss"].backward()
    optimizer.step()


def same_buffers(parallel: nn.Module, model: nn.Module) -> None:
    for name, buffer in model.named_buffers():
        mine = parallel.get_buffer(name)
        assert_close(mine, buffer, FLOAT64, name)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine.tolist())
        assert all(theirs == everyone[0] for theirs in everyone), f"'{name}' differs between ranks"


def trained(name: str, mesh: str, parts: int, index: int, compiled: bool = False) -> tuple[nn.Module, nn.Module, Any]:
    """Two steps on the mesh and on one device, buffers compared after each."""
    model, batch = prepared(name)
    parallel = nd.parallelize(model, mesh, batch, float64=True)
    if compiled:
        parallel.compile(backend="aot_eager")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, parallel)]
    for _ in range(2):
        step(model, batch, optimizers[0])
        step(parallel, own(batch, parts, index), optimizers[1])
        same_buffers(parallel, model)
        assert_same_gradients(parallel, model)
    return parallel, model, batch


def after_training_batch_norm_uses_what_it_kept() -> None:
    parallel, model, batch = trained("batch norm", "dp_shard=2", 2, dist.get_rank())
    parallel.eval()
    model.eval()
    mine = own(batch)
    for _ in range(2):
        assert_close(parallel(**mine)["logits"], own({"logits": model(**batch)["logits"]})["logits"])
        same_buffers(parallel, model)
    parallel.train()
    model.train()
    model(**batch)
    parallel(**mine)
    same_buffers(parallel, model)


def statistics_are_whole_where_channels_are_sharded() -> None:
    trained("batch norm", "tp=2", 1, 0)


def buffers_are_written_when_blocks_are_compiled() -> None:
    trained("batch norm", "dp_replicate=2", 2, dist.get_rank(), compiled=True)


def a_state_dict_holds_the_written_buffers() -> None:
    parallel, model, _ = trained("remembers", "dp_shard=2", 2, dist.get_rank())
    kept = parallel.state_dict()
    assert int(kept["count"]) == 2
    assert_close(kept["table"], model.get_buffer("table"))
    fresh, batch = prepared("remembers")
    again = nd.parallelize(fresh, "dp_shard=2", batch, float64=True)
    again.load_state_dict(kept)
    same_buffers(again, model)


def without_gradients_the_buffers_are_written_too() -> None:
    model, batch = prepared("remembers")
    parallel = nd.parallelize(model, "dp_shard=2", batch, float64=True)
    with torch.no_grad():
        model(**batch)
        parallel(**own(batch))
    same_buffers(parallel, model)


CLAIMS: Claims = (
    after_training_batch_norm_uses_what_it_kept,
    statistics_are_whole_where_channels_are_sharded,
    buffers_are_written_when_blocks_are_compiled,
    a_state_dict_holds_the_written_buffers,
    without_gradients_the_buffers_are_written_too,
)


@pytest.fixture(scope="module")
def found() -> Found:
    return ranks.run(2, run_claims, CLAIMS, timeout=240.0)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.__name__)
def test_on_two_ranks(claim: Callable[[], None], found: Found) -> None:
    told = [of_rank[claim.__name__] for of_rank in found]
    assert not any(told), "\n".join(told)
