"""Joining the ranks that torchrun started."""

from __future__ import annotations

import os
from datetime import timedelta

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
