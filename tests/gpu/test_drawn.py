"""Drawn cases of attention over ranks, on two processes of this machine; and that a wrong way is seen."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from ndcompile.mesh import MeshSpec
from ndcompile.runtime import Mesh, ring
from tests import ranks
from tests.gpu.drawn import check


def drawn(number: int) -> tuple[int, float]:
    torch.set_num_threads(1)
    found = check(Mesh.bound(MeshSpec.parse("cp=2"))["cp"], torch.device("cpu"), number)
    return found.count, found.worst


def without_a_ring(number: int) -> str:
    """Keys and values stay where they are."""
    with mock.patch.object(ring, "_start", lambda x, axis: x):
        try:
            drawn(number)
        except AssertionError as error:
            return str(error)
    return ""


@pytest.mark.equivalence
def test_all_ways_on_drawn_cases() -> None:
    counts = ranks.run(2, drawn, 60, timeout=180)
    assert all(count >= 60 for count, _ in counts) and 0 < counts[0][1] <= 4


@pytest.mark.equivalence
def test_a_ring_that_does_not_go_round_is_seen() -> None:
    assert all("how='ring'" in text for text in ranks.run(2, without_a_ring, 60, timeout=180))
