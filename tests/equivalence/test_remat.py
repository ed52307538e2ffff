"""What backward recomputes and what weights stay changes nothing: two steps on real ranks equal one device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.equivalence.compare import Case
from tests.equivalence.test_matrix import check

DROPOUT = "gpt with dropout"

CASES = {
    2: [
        Case(DROPOUT, "tp=2", remat=("linear", "all_gather", "reduce_scatter")),
        Case("llama", "cp=2", remat=("linear", "attention")),
        Case("llama", "dp_shard=2", False, remat=("linear", "attention")),
    ],
    4: [
        Case(DROPOUT, "dp_shard=2, tp=2", remat="block"),
        Case(DROPOUT, "dp_replicate=2, dp_shard=2", remat=("linear",), reshard=False),
        Case("llama", "cp=2, tp=2", remat=("linear", "attention", "reduce_scatter")),
    ],
}

MORE = [
    *(Case(DROPOUT, mesh, remat="block") for mesh in ("dp_shard=2", "dp_replicate=2", "tp=2", "cp=2")),
    Case("llama", "dp_shard=2", reshard=False),
    Case(DROPOUT, "cp=2", remat="block", reshard=False),
]


@pytest.mark.equivalence
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.full), 4])
def test_recomputed_blocks_equal_one_device(world_size: int, tmp_path: Path) -> None:
    check(world_size, CASES[world_size], tmp_path)


@pytest.mark.full
def test_more_recomputed_blocks_equal_one_device(tmp_path: Path) -> None:
    check(2, MORE, tmp_path)
