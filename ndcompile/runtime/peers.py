"""Memory that all ranks of one host read and write: symmetric memory of GPUs, mapped files of processes on CPU."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ndcompile.errors import CompileError
from ndcompile.runtime import private
from ndcompile.runtime.agreement import everyones, together

TIMEOUT = 300.0
"""Seconds that a rank waits for the others at a barrier."""


class Peers:
    """`views[rank]` is the memory of a rank of a group, `size` bytes; all its ranks make it alike."""

    def __init__(self, size: int, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        make = _of_gpus if device.type == "cuda" else _mapped
        self.views, self._barrier = together(lambda: make(size, device, group), group)

    def barrier(self) -> None:
        """What any rank did before it (on its current stream), all ranks see after it."""
        self._barrier()


def _of_gpus(
    size: int, device: torch.device, group: dist.ProcessGroup | None
) -> tuple[list[Tensor], Callable[[], None]]:
    try:
        return private.symmetric_memory(size, device, group, TIMEOUT)
    except RuntimeError as error:
        raise _refusal("where torch cannot set it up", str(error).splitlines()[0]) from error


def _mapped(
    size: int, device: torch.device, group: dist.ProcessGroup | None
) -> tuple[list[Tensor], Callable[[], None]]:
    """A file a rank; their names are gone when all ranks have mapped them."""
    rank, ranks = dist.get_rank(group), range(dist.get_world_size(group))
    folder = Path(everyones(tempfile.mkdtemp(prefix="ndcompile-") if rank == 0 else None, group)[0])
    own = _map(folder / str(rank), size)
    dist.barrier(group)
    views = [own if other == rank else _map(folder / str(other), size) for other in ranks]
    dist.barrier(group)
    if rank == 0:
        shutil.rmtree(folder)
    return views, lambda: dist.barrier(group)


def _map(file: Path, size: int) -> Tensor:
    return torch.from_file(str(file), shared=True, size=size, dtype=torch.uint8)


def require(device: torch.device) -> None:
    """Raise, on every rank alike, where the ranks of the world cannot have such memory."""
    if len(set(everyones(_host()))) > 1:
        raise _refusal("on ranks of several hosts", "ranks copy from each other's memory, which one host has")
    if device.type != "cuda":
        return
    if not all(everyones(private.has_symmetric_memory())):
        raise _refusal("and a torch without it", "GPUs address each other through torch's symmetric memory")
    seen = everyones((os.environ.get("CUDA_VISIBLE_DEVICES"), device.index))
    far = everyones([rank for rank, (visible, index) in enumerate(seen) if not _reached(device, visible, index)])
    for rank, others in enumerate(far):
        if others:
            why = f"rank {rank}'s GPU cannot address the memory of that of rank {others[0]}"
            raise _refusal("on GPUs that are not peers", why)


def _reached(device: torch.device, visible: str | None, index: int) -> bool:
    """Whether the GPU is a peer of another; one that this process does not see is found out about when it is used."""
    if visible != os.environ.get("CUDA_VISIBLE_DEVICES") or index == device.index:
        return True
    return torch.cuda.can_device_access_peer(device, torch.device("cuda", index))


def _host() -> tuple[str, str]:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname(), boot.read_text() if boot.exists() else ""


def _refusal(what: str, why: str) -> CompileError:
    return CompileError(f"transport='symmetric' {what}", why=why, tries="transport='nccl'")
