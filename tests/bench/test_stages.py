"""What a deeper model costs to compile: the choice is as large as one block's, the rest grows as depth does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import ndcompile as nd
from ndcompile import choose
from tests.bench.compile_time import llama
from tests.models import Stack, tokens

MESH = "dp_shard=32, tp=8"
WIDTHS = (512, 1024, 16, 8, 4096)


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The number of variables of each choice that is made, one a mesh axis."""
    counts: list[int] = []
    solve = choose._Program.solve

    def counted(program: choose._Program) -> object:
        counts.append(len(program.cost))
        return solve(program)

    monkeypatch.setattr(choose._Program, "solve", counted)
    yield counts


@pytest.mark.parametrize("model", ["llama", "stack"])
def test_the_choice_does_not_grow_with_depth(model: str, variables: list[int]) -> None:
    for depth in (3, 12):
        if model == "llama":
            nd.compile(llama(depth, *WIDTHS), MESH)
        else:
            nd.compile(Stack(depth, 64, 128, 64), MESH, tokens(64, 8, 64))
    assert len(variables) == 4 and variables[:2] == variables[2:], "two axes for each depth"
    assert max(variables) > 100, "it is a real choice"


def stages(depth: int) -> float:
    """The seconds of all stages but capture, the least of two runs."""
    runs = [nd.compile(llama(depth, *WIDTHS), MESH).times for _ in range(2)]
    return min(sum(seconds for name, seconds in times.items() if name != "capture") for times in runs)


@pytest.mark.full
def test_four_times_the_depth_costs_less_than_six_times_the_stages_of_three_blocks() -> None:
    shallow, deep = stages(3), stages(12)
    assert deep < 6 * shallow, f"{shallow:.2f} s for 3 blocks, {deep:.2f} s for 12"
