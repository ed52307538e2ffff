"""Ranks that take turns in one process."""

from __future__ import annotations

import time

import pytest
import torch

from ndcompile.mesh import MeshSpec
from ndcompile.verify.domain import AsWritten
from ndcompile.verify.lockstep import run_ranks
from tests.verify.mutation import TooLong, limit


def test_a_limit_ends_a_rank_between_two_collectives() -> None:
    end = time.monotonic() + 20

    def computes(rank: int) -> None:
        while time.monotonic() < end:
            torch.zeros(4) + 1

    begin = time.monotonic()
    with pytest.raises(TooLong), limit(0.5):
        run_ranks(MeshSpec.parse("dp_shard=2"), AsWritten(0), computes)
    assert time.monotonic() - begin < 10


def test_a_limit_is_no_error_of_a_model() -> None:
    assert not issubclass(TooLong, Exception)
