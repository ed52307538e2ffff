"""Claims that hold on ranks: functions that assert, run one after the other in one set of processes."""

from __future__ import annotations

import traceback
from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

FLOAT64 = 1e-10

Claims = tuple[Callable[[], None], ...]


def run_claims(claims: Claims) -> dict[str, str]:
    """What went wrong with each claim on this rank; nothing where it holds."""
    found = {}
    for claim in claims:
        try:
            claim()
            found[claim.__name__] = ""
        except Exception:
            found[claim.__name__] = traceback.format_exc()
        dist.barrier()
    return found


def own(batch: dict[str, Tensor], parts: int = 2, index: int | None = None) -> dict[str, Tensor]:
    """This rank's share of a batch on a mesh of one data axis."""
    at = dist.get_rank() if index is None else index
    return {name: value.chunk(parts)[at] for name, value in batch.items()}


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_close(found: Tensor, expected: Tensor, tolerance: float = FLOAT64, what: str = "") -> None:
    difference = (whole(found).double() - expected.double()).norm().item()
    assert difference <= tolerance * max(expected.double().norm().item(), 1e-6), f"{what} differs by {difference}"


def assert_same_gradients(parallel: nn.Module, model: nn.Module, tolerance: float = FLOAT64) -> None:
    found = dict(parallel.named_parameters())
    for name, parameter in model.named_parameters():
        mine = found[name].grad
        assert (mine is None) == (parameter.grad is None), f"'{name}' has a gradient on one side only"
        if mine is not None and parameter.grad is not None:
            assert_close(mine, parameter.grad, tolerance, name)
