"""Recorded steps on CPU: a stand-in for a CUDA graph notes a capture's ops, and does them again into the same memory.

What streams and a GPU's allocator do is not in it: `tests/gpu/recorded.py` is for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

import ndcompile as nd
from ndcompile.mesh import MeshSpec
from ndcompile.runtime import StaleWeights, private
from ndcompile.runtime.peers import Peers
from ndcompile.runtime.recorded import RecordedError
from ndcompile.verify.domain import namespace
from tests.claims import assert_same_gradients
from tests.equivalence.compare import own_rows
from tests.models import Stack, seeded, tokens
from tests.ranks import run

STEPS = 6


class Graph:
    """Ops with their operands and results, done again by `replay`.

    Graphs of one pool share memory: while one is replayed, another's results are overwritten.
    """

    of_the_pool: ClassVar[list[Graph]] = []
    recording: ClassVar[Graph | None] = None

    def __init__(self) -> None:
        self.ops: list[Callable[[], None]] = []
        self.own: list[Tensor] = []
        self.of_the_pool.append(self)

    def note(self, op: Any, args: Any, kwargs: Any) -> Any:
        result = op(*args, **kwargs)
        if op.is_view or op._schema.is_mutable:
            self.ops.append(lambda: op(*args, **kwargs))
            return result
        places = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
        given = {private.storage_id(x) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        self.own += [x for x in places if x.is_floating_point() and private.storage_id(x) not in given]

        def again() -> None:
            values = [x for x in pytree.tree_leaves(op(*args, **kwargs)) if isinstance(x, Tensor)]
            for place, value in zip(places, values, strict=True):
                value = private.wait(value) if namespace(op) == "_c10d_functional" else value
                if place.data_ptr() != value.data_ptr():
                    place.copy_(value)

        self.ops.append(again)
        return result

    @torch.no_grad()
    def replay(self) -> None:
        if self is self.of_the_pool[0]:  # a forward; what it made is there for the backward after it
            for other in self.of_the_pool[1:]:
                for x in other.own:
                    x.fill_(torch.nan)
        for op in self.ops:
            op()


@contextmanager
def capture(graph: Graph, **_: object) -> Iterator[None]:
    Graph.recording = graph
    with private.dispatched(graph.note):
        yield
    Graph.recording = None


def barrier(peers: Peers) -> None:
    peers._barrier()
    if Graph.recording is not None:
        Graph.recording.ops.append(peers._barrier)


def simulated(patch: pytest.MonkeyPatch) -> None:
    Graph.of_the_pool.clear()
    patch.setattr(Peers, "barrier", barrier)
    patch.setattr(torch.cuda, "graph", capture)
    patch.setattr(torch.cuda, "CUDAGraph", Graph)
    patch.setattr(private, "is_recording", lambda: Graph.recording is not None)
    for name in ("synchronize", "graph_pool_handle", "Stream"):
        patch.setattr(torch.cuda, name, lambda *_: None)


def mine(mesh: str, roll: int = 0) -> dict[str, Tensor]:
    rows = own_rows(tokens(), MeshSpec.parse(mesh), dist.get_rank())
    return {name: x.roll(roll, 1) for name, x in rows.items()}


def recorded(mesh: str, transport: str = "nccl") -> nd.ParallelModule:
    parallel = nd.parallelize(seeded(Stack, depth=2).double(), mesh, tokens(), float64=True, transport=transport)
    parallel.record()
    return parallel


def trains_as_one_device(mesh: str, transport: str) -> None:
    """Other values in each step; the last one adds its gradients to those of the one before."""
    model, parallel = seeded(Stack, depth=2).double(), recorded(mesh, transport)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (model, parallel)]
    for step in range(STEPS):
        (expected := model(**{n: x.roll(step, 1) for n, x in tokens().items()})["loss"]).backward()
        (loss := parallel(**mine(mesh, step))["loss"]).backward()
        assert abs(loss.item() - expected.item()) <= 1e-10 * abs(expected.item())
        assert_same_gradients(parallel, model)
        if step != STEPS - 2:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert parallel.replays
    parallel.compile(backend="eager")
    assert not parallel.replays, "what was recorded is not compiled"


def refuses(mesh: str) -> None:
    parallel = recorded(mesh)
    for _ in range(4):
        loss = parallel(**mine(mesh))["loss"]
        loss.backward()
    first, second = parallel(**mine(mesh)), parallel(**mine(mesh))
    with pytest.raises(RecordedError, match="a recorded step has one memory"):
        first["loss"].backward()
    with pytest.raises(RecordedError, match="a result that is no scalar was given a gradient"):
        logits = second["logits"]
        (
            private.local(logits) if private.is_distributed(logits) and not logits.requires_grad else logits
        ).sum().backward()
    with pytest.raises(RecordedError, match="a CUDA graph has fixed shapes"):
        parallel(**{name: x[:, :-2] for name, x in mine(mesh).items()})
    with pytest.raises(ValueError, match=r"accumulate\(\) of a recorded model"), parallel.accumulate():
        pass
    third = parallel(**mine(mesh))["loss"]
    with torch.no_grad():
        next(iter(parallel.parameters())).mul_(1.0)
    with pytest.raises(StaleWeights, match="parameters were changed after the forward"):
        third.backward()


def all_claims(mesh: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for transport in ("nccl", "symmetric"):
            simulated(patch)
            trains_as_one_device(mesh, transport)
        simulated(patch)
        refuses(mesh)


MORE = [pytest.param(mesh, marks=pytest.mark.full) for mesh in ("dp_replicate=2", "tp=2")]


@pytest.mark.parametrize("mesh", ["dp_shard=2", *MORE])
def test_recorded_steps(mesh):
    run(2, all_claims, mesh, timeout=120)
