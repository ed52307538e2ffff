"""Blocks that compute two halves of their batch in turn: two steps on real ranks equal one device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.equivalence.compare import Case
from tests.equivalence.test_matrix import check

CASES = {
    2: [Case(model, "tp=2", halves=True) for model in ("llama", "GPT-2")]
    + [Case("llama", "tp=2", halves=True, remat=("linear", "all_gather", "reduce_scatter"))],
    4: [Case(model, "dp_shard=2, tp=2", halves=True) for model in ("llama", "GPT-2")]
    + [Case("gpt", "dp_replicate=2, tp=2", halves=True, remat="block")],
}

MORE = [Case(model, "tp=2", halves=True) for model in ("Qwen3", "BERT", "ViT", "T5", "gpt")]


@pytest.mark.equivalence
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.full), 4])
def test_blocks_in_halves_equal_one_device(world_size: int, tmp_path: Path) -> None:
    check(world_size, CASES[world_size], tmp_path)


@pytest.mark.full
def test_more_models_in_halves_equal_one_device(tmp_path: Path) -> None:
    check(2, MORE, tmp_path)
