"""All claims of this folder that need real ranks, in one world of four."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import ranks
from tests.claims import run_claims

Found = list[dict[str, str]]
"""By rank: what went wrong with each claim."""


@pytest.fixture(scope="session")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    from tests.bugs import saved

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("programs")
    saved.save(folder)
    return ranks.run(4, claims_of_this_rank, str(folder), timeout=240)


def claims_of_this_rank(folder: str) -> dict[str, str]:
    from tests.bugs import saved, test_checkpoints, test_norm, test_order

    saved.folder = Path(folder)
    return run_claims((*test_norm.ON_FOUR, *test_checkpoints.ON_FOUR, *test_order.ON_FOUR))
