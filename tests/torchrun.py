"""Joining the ranks that torchrun started, and telling what they found."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist


def join(seconds: float = 300.0) -> torch.device:
    """Start the process group (NCCL where each rank has a GPU, else gloo), with this timeout; the rank's device."""
    on_gpus = torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    backend = "nccl" if on_gpus else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=seconds), device_id=device if on_gpus else None)
    return device


def join_on_one_gpu(seconds: float = 300.0) -> torch.device:
    """Be one of several ranks on one GPU, over gloo, which NCCL refuses. Copies between ranks need
    `TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1`.
    """
    if not torch.cuda.is_available():
        return join(seconds)
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:gloo", timeout=timedelta(seconds=seconds))
    return torch.device("cuda", 0)


def alone(ranks: int) -> torch.device:
    """Be rank 0 of a world whose other ranks are not there: a collective copies (torch's fake process group)."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks)}
    dist.init_process_group("cpu:fake,cuda:fake", store=FakeStore(), rank=0, world_size=ranks)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


def finish(rows: Iterable[dict[str, Any]]) -> NoReturn:
    """Rank 0 prints each row as a JSON line. Ends with status 1 where one does not hold, or did not refuse."""
    fine = True
    for row in rows:
        fine &= row.get("holds", True) and all(row.get("refuses", {}).values())
        if dist.get_rank() == 0:
            print(json.dumps(row), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(0 if fine else 1)
