"""Real ranks whose weights travel by copies, and whose steps are recorded: each bug that is planted there is seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ndcompile import bind
from ndcompile.errors import CompileError
from ndcompile.runtime import symmetric
from ndcompile.runtime.peers import Peers
from ndcompile.runtime.symmetric import Symmetric
from ndcompile.runtime.wires import Wire
from ndcompile.verify import real_ranks
from ndcompile.verify.real_ranks import Job, OnRanks, References, claims_of, report, verify_on_ranks
from ndcompile.verify.report import Claim, Report
from tests import ranks
from tests.models import stack_and_tokens
from tests.runtime.test_recorded import Graph, simulated
from tests.runtime.test_symmetric import Site, without
from tests.verify.test_real_ranks import start

RUNS = 10
"""With delays: by luck one run is right."""


@contextmanager
def one_slot() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Symmetric, "next_turn", lambda memory: 0)
        yield


def barriers(here: OnRanks, right: References) -> dict[str, Site]:
    """Those that a step of training needs: what was pushed, and what was shown, is read after it.

    When weights are shown anew, a reduction's barrier has been passed after the last of them was read.
    """
    met: set[Site] = set()
    with without(None, met):  # which looks for callers of what delays
        assert here.delays(right, 1, "eager").held
    (pushed,), (_, shown) = (sorted(site for site in met if site[0] == name) for name in ("_exchange", "_show"))
    return {"pushed": pushed, "shown": shown}


def bugs_are_seen(mesh: str, precision: str) -> dict[str, list[Claim]]:
    torch.set_num_threads(1)
    job = Job.of(*stack_and_tokens(), precision, 2, torch.device("cpu"), transport="symmetric")
    program = job.compiled(mesh)
    here, right = OnRanks(job, program), References.of(job, program)
    found = {"right": [here.payloads(), here.in_the_field(), *claims_of(here, right, "eager", 1)]}
    assert 'tensors travel by transport="symmetric"' in str(report(here, found["right"]))
    planted: dict[str, Callable[[], AbstractContextManager[None]]] = {
        name: partial(without, site, set()) for name, site in barriers(here, right).items()
    }
    for name, plant in {**planted, "one slot": one_slot}.items():
        with plant():
            found[name] = [here.delays(right, RUNS, "eager")]
    return found


def test_copies_pass_and_each_bug_in_them_is_seen() -> None:
    found, other = ranks.run(2, bugs_are_seen, "dp_shard=2", "float64", timeout=120)
    for claims in (found, other):
        held = {bug: [claim.held for claim in found] for bug, found in claims.items()}
        assert held == {"right": [True] * 4, "pushed": [False], "shown": [False], "one slot": [False]}, found
    assert [claim.kind for claim in found["right"]] == [
        "tested (real ranks, integers)", "equal over F_p (real ranks)", "tested (real ranks, float64, eager)",
        "tested (real ranks, float64, eager, delays)",
    ]  # fmt: skip
    assert " collectives and copies in 1 runs with delays: the same bits" in found["right"][-1].evidence[0]


def copies_of_zeros(mesh: str) -> list[bool | None]:
    torch.set_num_threads(1)
    job = Job.of(*stack_and_tokens(), "float64", 2, torch.device("cpu"), transport="symmetric")
    here = OnRanks(job, job.compiled(mesh))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symmetric, "copy", lambda to, value: to.zero_())
        return [here.payloads().held, here.in_the_field().held]


def in_bfloat16(mesh: str) -> list[bool | None]:
    """Memory for parts in bfloat16, gradients that are sent so and summed in float32."""
    torch.set_num_threads(1)
    job = Job.of(*stack_and_tokens(), "bf16", 2, torch.device("cpu"), transport="symmetric")
    here = OnRanks(job, job.compiled(mesh))
    return [here.payloads().held, here.in_the_field().held, here.trained(References.of(job, here.program), "").held]


def test_bfloat16_by_copies() -> None:
    assert ranks.run(2, in_bfloat16, "dp_replicate=2", timeout=120) == [[True] * 3] * 2


def test_integers_and_the_field_go_by_copies() -> None:
    assert ranks.run(2, copies_of_zeros, "dp_shard=2", timeout=120) == [[False, False]] * 2


gather = Wire.gather


def turned(wire: Wire, x: Tensor, dim: int) -> Tensor:
    """In another order of ranks."""
    return gather(wire, x, dim).roll(x.shape[dim], dim)


RACES: tuple[tuple[type, str, Callable[..., object]], ...] = (
    (Wire, "_after", lambda wire, turn: 0),
    (Peers, "barrier", lambda peers: None),
)
"""One slot, and no barrier."""


def bugs_of_wires_are_seen(mesh: str) -> list[list[bool | None]]:
    torch.set_num_threads(1)
    job = Job.of(*stack_and_tokens(), "float64", 2, torch.device("cpu"), transport="symmetric")
    here = OnRanks(job, job.compiled(mesh))
    right = References.of(job, here.program)
    found = [here.payloads(), here.in_the_field(), *claims_of(here, right, "eager", 1)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Wire, "gather", turned)
        exact = [here.payloads(), here.in_the_field()]
    delayed = []
    for bug in RACES:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(*bug)
            delayed.append(here.delays(right, RUNS, "eager"))
    return [[claim.held for claim in claims] for claims in (found, exact, delayed)]


@pytest.mark.full
def test_wires_pass_and_each_bug_in_them_is_seen() -> None:
    for found in ranks.run(2, bugs_of_wires_are_seen, "tp=2", timeout=200):
        assert found == [[True] * 4, [False, False], [False, False]]


# ---- the command ----------------------------------------------------------------------------------------------------

PLANTED = """
import sys
from ndcompile.runtime.symmetric import Symmetric
from tests.models import stack_and_tokens as right

def one_slot():
    Symmetric.next_turn = lambda memory: 0
    return right()

def no_barrier():
    barrier = Symmetric.barrier
    def some(memory):
        if "_exchange" not in [sys._getframe(depth).f_code.co_name for depth in (1, 2)]:
            barrier(memory)
    Symmetric.barrier = some
    return right()
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "status"),
    [("one_slot", 1), ("right", 0), ("no_barrier", 1)],
)
def test_the_command_sees_a_bug_in_copies(model: str, status: int, tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text(PLANTED)
    arguments = ("--mesh", "dp_shard=2", "--precision", "float64", "--transport", "symmetric", "--delays", str(RUNS))
    statuses, out, errors = start(tmp_path, f"planted:{model}", *arguments)
    assert statuses == [status] * 2, out + errors
    assert 'tensors travel by transport="symmetric"' in out
    assert "FAILED" not in out if status == 0 else "with delays" in out


# ---- recorded steps, on the stand-in for a CUDA graph ----------------------------------------------------------------


def recorded(mesh: str, transport: str, breaks: bool) -> Report:
    """With a graph that, where it `breaks`, does nothing when it is replayed."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        simulated(patch)
        patch.setattr(real_ranks, "require_recordable", lambda: None)
        if breaks:
            patch.setattr(Graph, "replay", lambda graph: None)
        model, batch = stack_and_tokens()
        return verify_on_ranks(model, mesh, batch, precision="float64", transport=transport, cuda_graph=True)


def each_recorded(mesh: str) -> list[Report]:
    return [recorded(mesh, transport, breaks) for transport in bind.TRANSPORTS for breaks in (False, True)]


def test_what_is_compared_is_replayed() -> None:
    for reports in ranks.run(2, each_recorded, "dp_shard=2", timeout=120):
        held = [[claim.held for claim in told.claims] for told in reports]
        assert held == [[True, True, right, None] for right in (True, False)] * 2, reports
        for told in reports:
            assert told.claims[2].kind == "tested (real ranks, float64, eager, recorded)"
            assert told.claims[3].evidence == ["a recorded step is delayed on GPUs only"]
            assert "steps are replayed from a CUDA graph, after 3 others" in told.sizes[0]


def refused() -> None:
    model, batch = stack_and_tokens()
    options: tuple[tuple[dict[str, Any], str], ...]
    options = ({"cuda_graph": True}, "this rank has no GPU"), ({"transport": "fax"}, "is no option")
    for option, text in options:
        with pytest.raises(CompileError, match=text):
            verify_on_ranks(model, "dp_shard=2", batch, **option)


def test_what_cannot_be_is_refused() -> None:
    ranks.run(2, refused)
