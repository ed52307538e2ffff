"""Projections that are one matrix, cut in pieces on tp: parallel programs against one device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.equivalence.compare import Case
from tests.equivalence.test_matrix import check

CASES = {
    2: [Case("GPT-2 with dropout", "tp=2"), Case("Phi-3", "tp=2"), Case("fused attention", "tp=2")],
    4: [
        Case("GPT-2", "tp=4"),
        Case("GPT-2", "dp_shard=2, tp=2"),
        Case("Phi-3", "tp=4"),
        Case("Phi-3", "dp_replicate=2, tp=2"),
        Case("gated", "dp_shard=2, tp=2"),
    ],
    8: [Case("Phi-3", "dp_shard=2, tp=4"), Case("fused attention", "dp_replicate=2, dp_shard=2, tp=2")],
}
"""Equal pieces (GPT-2), unequal ones with fewer heads of keys than tp (Phi-3), pieces that do not divide (gated)."""


@pytest.mark.equivalence
@pytest.mark.parametrize("world_size", [pytest.param(n, marks=[pytest.mark.full] if n != 4 else []) for n in CASES])
def test_fused_projections_equal_one_device(world_size: int, tmp_path: Path) -> None:
    check(world_size, CASES[world_size], tmp_path)
