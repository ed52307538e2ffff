"""DTensor as an oracle: what it runs without communication is a row here, after conversions that are free."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from torch import Tensor

from ndcompile.placement import Placement
from ndcompile.rules.rows import rows
from tests import ranks
from tests.rules.case import case, f

debug = pytest.importorskip("torch.distributed.tensor.debug")

CALLS = {
    "mm": case("aten.mm.default", f(4, 6), f(6, 8)),
    "bmm": case("aten.bmm.default", f(2, 4, 6), f(2, 6, 8)),
    "layer_norm": case("aten.layer_norm.default", f(4, 6, 8), [8], f(8), f(8)),
}
Accepted = tuple[tuple[str, ...], str]


@pytest.fixture(scope="module")
def accepted() -> dict[str, set[Accepted]]:
    return ranks.run(2, without_communication)[0]


def without_communication() -> dict[str, set[Accepted]]:
    """For each call the placements that DTensor takes on two ranks without communication, and what it makes."""
    return {name: _accepted(name) for name in CALLS}


def _accepted(name: str) -> set[Accepted]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    mesh, call = init_device_mesh("cpu", (2,)), CALLS[name]
    tensors = call.trial().operands
    found = set()
    for chosen in itertools.product(*(_choices(x) for x in tensors)):
        placed = [
            DTensor.from_local(_local(x, p), mesh, [p], run_check=False) for x, p in zip(tensors, chosen, strict=True)
        ]
        values = iter(placed)
        args = [next(values) if hasattr(a, "make") else a for a in call.args]
        with debug.CommDebugMode() as counter:
            try:
                result = call.target(*args)
            except (RuntimeError, NotImplementedError, ValueError):
                continue
        if counter.get_total_counts() == 0:
            found.add((tuple(map(_text, chosen)), _text(result.placements[0])))
    return found


def _choices(x: Tensor) -> list[Any]:
    from torch.distributed.tensor import Partial, Replicate, Shard

    return [Replicate(), Partial(), *map(Shard, range(x.dim()))]


def _local(x: Tensor, placement: Any) -> Tensor:
    return x.chunk(2, placement.dim)[0] if placement.is_shard() else x


def _text(placement: Any) -> str:
    if placement.is_shard():
        return f"S({placement.dim})"
    return "P" if placement.is_partial() else "R"


def _ours(placement: Placement) -> str:
    return "R" if placement.whole else str(placement)


@pytest.mark.parametrize("name", CALLS)
def test_what_dtensor_runs_without_communication_is_a_row(name: str, accepted: dict[str, set[Accepted]]) -> None:
    found = rows(CALLS[name].trial().signature, 2)
    ours = {(tuple(map(_ours, row.operands)), _ours(row.output)) for row in found}
    assert accepted[name], "DTensor runs some"
    unexplained = {theirs for theirs in accepted[name] if not any(_reaches(theirs, row) for row in ours)}
    assert unexplained == set()


def _reaches(theirs: Accepted, row: Accepted) -> bool:
    """The same output, from the same operands or from replicated ones that are cut or made partial for free."""
    free = [a == b or a == "R" for a, b in zip(theirs[0], row[0], strict=True)]
    return all(free) and theirs[1] == row[1]


def test_no_row_of_mm_is_missing(accepted: dict[str, set[Accepted]]) -> None:
    exact = {theirs for theirs in accepted["mm"] if theirs[1] != "R"}
    ours = {(tuple(map(_ours, r.operands)), _ours(r.output)) for r in rows(CALLS["mm"].trial().signature, 2)}
    assert {row for row in ours if row[1] != "R"} <= exact
