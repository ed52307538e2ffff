"""Gathers and reduce-scatters by copies give what collectives give, however slow a rank is."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ndcompile.runtime import collectives, private, wires
from ndcompile.runtime.agreement import everyones
from ndcompile.runtime.mesh import Ranks
from ndcompile.runtime.peers import Peers
from ndcompile.runtime.wires import Wire
from tests.ranks import run
from tests.runtime.test_collectives import axis_of

EXCHANGES = 40


# ---- values: each conversion is in test_collectives.py and, started and waited for, in test_halves.py ----------------


def in_many_pieces(ranks: int) -> bool:
    axis = axis_of(ranks, copies=True)
    whole = torch.arange(40.0 * 3 * 6).view(40, 3, 6)
    assert wires.PIECES < 40 * 3
    return torch.equal(collectives.all_gather(whole.chunk(ranks, 2)[axis.index], axis, 2), whole)


def test_what_comes_in_many_pieces_is_put_together():
    assert all(run(2, in_many_pieces, 2))


def sums(ranks: int) -> list[Tensor]:
    axis = axis_of(ranks, copies=True)
    mine = torch.full((ranks,), 256.0 if axis.index == 0 else 1.0, dtype=torch.bfloat16)
    return [collectives.reduce_scatter(mine, axis, 0, dtype=d) for d in (None, torch.float32)]


def test_sums_of_many_are_rounded_once():
    """256 + 1 + 1 is 258 in bfloat16, which has no 257."""
    for found in run(3, sums, 3):
        assert [x.item() for x in found] == [258.0, 258.0]


# ---- slots and barriers ----------------------------------------------------------------------------------------------


@contextmanager
def slow(seconds: Callable[[], float]) -> Iterator[None]:
    """This rank waits for so long after each barrier, before it takes what others have sent."""
    barrier = Peers.barrier

    def late(peers: Peers) -> None:
        barrier(peers)
        time.sleep(seconds())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Peers, "barrier", late)
        yield


def exchanged(axis: Ranks) -> bool:
    """Whether many gathers and sums in a row, of growing sizes, bring what was sent."""
    right = True
    for number in range(EXCHANGES):
        length = 3 if number < EXCHANGES // 2 else wires.PAGE // 4
        own = torch.full((length,), float(100 * number + axis.index))
        gathered = private.wait(wires.start_all_gather(own, 0, axis.size, axis.group)).view(axis.size, length)
        expected = 100.0 * number + torch.arange(axis.size, dtype=torch.float32)[:, None]
        right &= torch.equal(gathered, expected.expand(-1, length))
        summed = private.wait(wires.start_reduce_scatter(gathered + axis.index, 0, axis.size, axis.group))
        total = axis.size * (100.0 * number + axis.index) + sum(range(axis.size))
        right &= torch.equal(summed, torch.full((1, length), total))
    return right


def late_ranks(ranks: int) -> list[bool]:
    axis = axis_of(ranks, copies=True)
    chance = random.Random(dist.get_rank())
    found = []
    for late in range(ranks):
        with slow(lambda late=late: 0.002 * chance.random() if dist.get_rank() == late else 0.0):
            found.append(all(everyones(exchanged(axis))))
    return found


def broken() -> dict[str, bool]:
    """Whether values stay right without barriers, and with one slot."""
    found = {}
    for what, patches in (
        ("no barrier", lambda patch: patch.setattr(Peers, "barrier", lambda peers: None)),
        ("one slot", lambda patch: patch.setattr(Wire, "_after", lambda wire, turn: 0)),
    ):
        for late in range(2):
            with pytest.MonkeyPatch.context() as patch:
                patches(patch)
                wires._wires.clear()
                axis = axis_of(2, copies=True)
                with slow(lambda late=late: 0.003 if dist.get_rank() == late else 0.0):
                    right = exchanged(axis)
                dist.barrier()
                found[what] = found.get(what, True) and all(everyones(right))
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.full)])
def test_late_ranks_change_nothing(ranks):
    assert all(run(ranks, late_ranks, ranks)[0])


def test_barriers_and_slots_are_needed():
    assert run(2, broken)[0] == {"no barrier": False, "one slot": False}
