"""Local processes for the demonstration: started, heard, and ended together."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
import torch.distributed as dist

from ndcompile.demo.train import Record, Settings, train
from ndcompile.errors import CompileError
from ndcompile.mesh import MeshError
from ndcompile.runtime.agreement import Disagreement

TIMEOUT = timedelta(seconds=120)
_LOOPBACK = {"linux": "lo", "darwin": "lo0"}

Report = Callable[[int, float], None]
"""Is told the step and its loss."""


class RankFailed(RuntimeError):
    """A rank ended with an error: the text is its traceback, `user_error` the error's own text if it is for users."""

    def __init__(self, message: str, user_error: str | None = None) -> None:
        super().__init__(message)
        self.user_error = user_error


@dataclass(frozen=True)
class Place:
    """Where a process stands: `rank` is None in a run on one device, without a process group."""

    rank: int | None
    world_size: int
    on_gpus: bool

    @property
    def first(self) -> bool:
        return not self.rank

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.rank or 0) if self.on_gpus else torch.device("cpu")


def run_one_device(settings: Settings, on_gpus: bool, report: Report) -> Record:
    """Train in one process without a process group."""
    return _run(settings, [Place(None, 1, on_gpus)], report)


def run_mesh(settings: Settings, world_size: int, on_gpus: bool, report: Report) -> Record:
    """Train in one process a rank; the record is rank 0's. The first rank that fails ends all: `RankFailed`."""
    return _run(settings, [Place(rank, world_size, on_gpus) for rank in range(world_size)], report)


def enough_gpus(world_size: int) -> bool:
    """Every rank can have a GPU of its own: then NCCL, else gloo on the CPU."""
    return torch.cuda.is_available() and torch.cuda.device_count() >= world_size


def _run(settings: Settings, places: list[Place], report: Report) -> Record:
    context = _context()
    with tempfile.TemporaryDirectory() as folder:
        readers, workers = {}, []
        for place in places:
            reader, writer = context.Pipe(duplex=False)
            worker = context.Process(target=_work, args=(settings, place, folder, writer), daemon=True)
            worker.start()
            writer.close()
            readers[reader] = place.rank or 0
            workers.append(worker)
        try:
            _listen(readers, report)
        finally:
            for worker in workers:
                worker.terminate()
            for worker in workers:
                worker.join()
        record = torch.load(_record_path(folder), weights_only=False)
        assert isinstance(record, Record)
        return record


def _context() -> multiprocessing.context.ForkServerContext | multiprocessing.context.SpawnContext:
    if sys.platform == "win32":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _listen(readers: dict[Connection, int], report: Report) -> None:
    """Hear all ranks until each has said that it is done."""
    while readers:
        for reader in wait(list(readers)):
            assert isinstance(reader, Connection)
            try:
                kind, *news = reader.recv()
            except EOFError:
                raise RankFailed(f"rank {readers[reader]} ended without a word (was it killed?)") from None
            if kind == "failed":
                raise RankFailed(f"rank {readers[reader]} failed\n{news[0]}", news[1])
            if kind == "done":
                del readers[reader]
            else:
                report(*news)


def _work(settings: Settings, place: Place, folder: str, pipe: Connection) -> None:
    """One process: says `step`s if it is the first rank, then `done` or `failed`; the record goes to a file."""
    torch.set_num_threads(1)
    report: Report = (lambda step, loss: pipe.send(("step", step, loss))) if place.first else (lambda step, loss: None)
    try:
        if place.rank is not None:
            _join(place, folder)
        record = train(settings, place.device, place.rank, report)
        if place.first:
            torch.save(record, _record_path(folder))
        if place.rank is not None:
            dist.barrier()
            dist.destroy_process_group()
        pipe.send(("done",))
    except Exception as error:
        user_error = str(error) if isinstance(error, CompileError | MeshError | Disagreement) else None
        pipe.send(("failed", traceback.format_exc(), user_error))


def _join(place: Place, folder: str) -> None:
    """Meet the other ranks, by a file: no port to be free."""
    assert place.rank is not None
    if place.on_gpus:
        torch.cuda.set_device(place.device)
    elif sys.platform in _LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK[sys.platform])
    dist.init_process_group(
        "nccl" if place.on_gpus else "gloo",
        init_method=f"file://{Path(folder, 'rendezvous')}",
        rank=place.rank,
        world_size=place.world_size,
        timeout=TIMEOUT,
    )


def _record_path(folder: str) -> Path:
    return Path(folder, "record.pt")
