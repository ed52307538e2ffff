"""Run a function on several ranks (processes of this machine, gloo), once for many cases."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TypeVar

Result = TypeVar("Result")

PRELOAD = [
    "torch",
    "torch.distributed.tensor",
    "torch._dynamo",
    "transformers.models.llama.modeling_llama",
    "ndcompile.api",
    "ndcompile.verify",
]
"""What the fork server imports once, so that a rank starts in milliseconds (without the last three, in 2 CPU s)."""


class RankFailed(AssertionError):
    """A rank raised, died or was late; the message holds its traceback."""


def run(world_size: int, function: Callable[..., Result], *args: object, timeout: float = 60.0) -> list[Result]:
    """Call `function(*args)` on `world_size` ranks in one gloo world and return what they return, in rank order.

    The function must be importable (defined at the top of a module), its arguments and results picklable; inside,
    `torch.distributed.get_rank()` says who it is. When a rank fails, all others are ended and `RankFailed` carries its
    traceback.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        call = pickle.dumps((function, args))
        ranks: dict[Connection, tuple[int, BaseProcess]] = {}
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process: BaseProcess = context.Process(
                target=_rank, args=(rank, world_size, f"{folder}/store", call, timeout, sender), daemon=True
            )
            process.start()
            sender.close()
            ranks[receiver] = (rank, process)
        try:
            return _collect(ranks, timeout)
        finally:
            for receiver, (_, process) in ranks.items():
                process.kill()
                process.join()
                receiver.close()


def _collect(ranks: dict[Connection, tuple[int, BaseProcess]], timeout: float) -> list[Result]:
    results: dict[int, Result] = {}
    failures: dict[int, str] = {}
    pending = dict(ranks)
    end = time.monotonic() + timeout
    while pending:
        ready = wait(list(pending), max(0.0, end - time.monotonic()))
        if not ready:
            failures |= {rank: f"no answer within {timeout:g} s" for rank, _ in pending.values()}
            break
        for receiver in [each for each in pending if each in ready]:
            rank, process = pending.pop(receiver)
            try:
                succeeded, answer = pickle.loads(receiver.recv_bytes())
            except EOFError:
                process.join(1)
                succeeded, answer = False, f"the process ended with exit code {process.exitcode}"
            (results if succeeded else failures)[rank] = answer
        if failures:  # the others may fail of the same cause: give them a moment, then end all
            end = min(end, time.monotonic() + 0.3)
            if not wait(list(pending), 0.3):
                break
    if failures:
        raise RankFailed("\n".join(f"rank {rank}: {failures[rank]}" for rank in failures))
    return [results[rank] for rank in range(len(ranks))]


def _rank(rank: int, world_size: int, store: str, call: bytes, timeout: float, sender: Connection) -> None:
    """What one process does: join the world, call, send the answer."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=min(timeout, 30.0)),
        )
        function, args = pickle.loads(call)
        answer = pickle.dumps((True, function(*args)))
    except BaseException:  # whatever ends this rank is the answer
        answer = pickle.dumps((False, traceback.format_exc()))
    sender.send_bytes(answer)
    try:
        dist.barrier()
    except (RuntimeError, ValueError):  # another rank failed, or this one: that is told already
        return
    dist.destroy_process_group()
