"""What the host pays for: one compiled region a block, attention over ranks among it."""

from __future__ import annotations

import pytest

from tests.bench.host_time import apart


@pytest.mark.full
def test_a_block_is_one_compiled_region() -> None:
    """One for all blocks, one before them, and behind them one of the logits and one of the loss; nothing cuts them."""
    found = apart("cp=2", blocks=2, tokens=16, steps=1, backend="eager", transport="nccl", profile=0)
    assert (found["graphs"], found["breaks"]) == (4, 0)
