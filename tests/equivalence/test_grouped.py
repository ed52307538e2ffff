"""Keys and values of fewer heads than tp has ranks: parallel programs against one device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.equivalence.compare import Case
from tests.equivalence.test_matrix import check

CASES = {
    2: [Case("8 heads, 1 of keys, shared", "tp=2"), Case("8 heads, 1 of keys, repeated", "tp=2")],
    4: [
        Case("8 heads, 2 of keys, repeated", "tp=4"),
        Case("8 heads, 2 of keys, shared", "tp=4"),
        Case("8 heads, 2 of keys, shared, dropout", "tp=4"),
        Case("8 heads, 1 of keys, shared", "tp=4"),
        Case("8 heads, 1 of keys, repeated", "dp_shard=2, tp=2"),
        Case("Qwen3", "tp=4"),
    ],
    6: [Case("6 heads, 3 of keys, shared", "tp=6")],
    8: [
        Case("llama", "tp=8"),
        Case("8 heads, 2 of keys, repeated", "dp_shard=2, tp=4"),
        Case("8 heads, 2 of keys, shared, dropout", "dp_replicate=2, tp=4"),
    ],
}
"""One or two heads of keys on more ranks, by both ways to repeat them, with both data axes; 4 heads on 8, 3 on 6."""


@pytest.mark.equivalence
@pytest.mark.parametrize("world_size", [pytest.param(n, marks=[pytest.mark.full] if n != 4 else []) for n in CASES])
def test_grouped_heads_equal_one_device(world_size: int, tmp_path: Path) -> None:
    check(world_size, CASES[world_size], tmp_path)
