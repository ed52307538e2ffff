"""The script of the long sequence, on two CPU ranks with small sizes; and what its bars let pass."""

from __future__ import annotations

import pytest
import torch

from ndcompile.verify.error_model import ALLOWED
from tests import ranks
from tests.gpu.long import TINY, UNIT, alone, make, on_mesh, ratios


def both() -> tuple[list[float], list[float], float]:
    torch.set_num_threads(1)
    model, batch = make(TINY, 2, 32)
    device = torch.device("cpu")
    right, found = list(alone(model, batch, device)), list(on_mesh(model, batch, device))
    worst = max(ratios(found[0][1], right[0][1], 2).values())
    return [loss for loss, _ in right], [loss for loss, _ in found], worst


@pytest.mark.equivalence
def test_it_runs_on_two_ranks() -> None:
    for right, found, worst in ranks.run(2, both, timeout=180):
        assert all(abs(a - b) <= ALLOWED * UNIT * b for a, b in zip(found, right, strict=True))
        assert right[0] > right[-1] + 0.1, "it learns"
        assert 0 < worst <= ALLOWED


def test_a_gradient_that_misses_a_part_is_rejected() -> None:
    right = {"a": torch.ones(100), "b": torch.ones(100)}
    assert max(ratios({"a": torch.ones(100), "b": 1.02 * torch.ones(100)}, right, 2).values()) < ALLOWED
    assert max(ratios({"a": torch.ones(100), "b": 0.5 * torch.ones(100)}, right, 2).values()) > ALLOWED
