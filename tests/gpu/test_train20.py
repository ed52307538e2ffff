"""The script for two GPUs, on two CPU ranks with small sizes; and what its error model lets pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import ranks
from tests.gpu.train20 import MESHES, STEPS, TINY, UNIT, Compared, compared


def result(found: float, gradient: float = 1.0) -> Compared:
    """One device in bfloat16 is off by 0.5 where a loss of 100 is right; 4 · u · √4 · 100 is 3.125."""
    losses = {"float64": [100.0] * STEPS, "bfloat16": [100.5] * STEPS, "on mesh": [100.0] * (STEPS - 1) + [found]}
    return Compared("a model", "tp=2", 4, losses, {"w": gradient}, [], 0.0)


def test_a_step_beyond_the_error_model_is_rejected() -> None:
    assert UNIT * 2 * 100 == 0.78125
    assert result(103.1).holds and result(96.9).holds
    assert not result(103.2).holds and not result(96.8).holds
    assert not result(100.0, gradient=4.1).holds
    assert result(103.2).row()["rejects"] == 3.12 and result(103.2).row()["step"] == STEPS - 1


def rows_of(name: str) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    return [result.row() for result in compared(name, TINY, torch.device("cpu"))]


@pytest.mark.full
@pytest.mark.equivalence
def test_it_runs_on_two_ranks() -> None:
    rows, _ = ranks.run(2, rows_of, "ViT", timeout=180)
    assert [row["mesh"] for row in rows] == list(MESHES) and all(row["holds"] for row in rows)
    assert all(row["gradients"] == 38 and row["zero"] == 2 for row in rows), "the biases of two blocks' keys are zero"
    assert all(first > last + 0.2 for row in rows for first, last in row["losses"].values()), "it learns"
