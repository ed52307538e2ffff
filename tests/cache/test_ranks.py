"""One rank compiles for all, where all are known to ask for the same; what it raises, all raise, and none waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ndcompile as nd
from ndcompile import compiler
from ndcompile.runtime.agreement import Disagreement
from tests import ranks
from tests.cache.counting import counted
from tests.cache.test_store import GivesPair
from tests.claims import assert_close, assert_same_gradients
from tests.models import Stack, seeded, tokens

Found = tuple[int, str]
"""How many captures a rank made, and what it raised."""


def stack() -> nn.Module:
    return seeded(Stack).double()


def outcome(model: nn.Module, example: object, mesh: str = "tp=2", **options: Any) -> tuple[Found, list[str]]:
    """What becomes of `nd.parallelize` on this rank, and its log."""
    raised = ""
    with counted() as found:
        try:
            nd.parallelize(model, mesh, example, **options)
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
    return (found.captures, raised), found.log


def trained(cache: str | None) -> tuple[int, str]:
    """Train for one step and compare with one device; the captures, and what the program is."""
    model, batch = stack(), tokens()
    with counted() as found:
        parallel = nd.parallelize(model, "dp_replicate=2, tp=2", batch, cache=cache)
    index = dist.get_rank() // 2
    parallel(**{name: value.chunk(2)[index] for name, value in batch.items()})["loss"].backward()
    expected = model(**batch)["loss"]
    expected.backward()
    assert_same_gradients(parallel, model)
    return found.captures, str(parallel.program.to_json())


def test_one_rank_captures_and_all_have_its_program() -> None:
    found = ranks.run(4, trained, None)
    assert [captures for captures, _ in found] == [1, 0, 0, 0]
    assert len({program for _, program in found}) == 1


def test_at_the_second_start_no_rank_captures(tmp_path: Path) -> None:
    first, second = (ranks.run(4, trained, str(tmp_path)) for _ in range(2))
    assert [captures for captures, _ in first] == [1, 0, 0, 0]
    assert [captures for captures, _ in second] == [0, 0, 0, 0]
    assert first[0][1] == second[0][1]


def evaluated(cache: str) -> tuple[int, Tensor, Tensor]:
    """The program of the other mode, which is compiled when it is first used."""
    model, batch = stack(), tokens()
    parallel = nd.parallelize(model, "tp=2", batch, outputs="local", cache=cache)
    with counted() as found:
        result = parallel.eval()(**batch)["loss"]
    return found.captures, result.detach(), model.eval()(**batch)["loss"].detach()


def test_one_rank_of_a_folder_captures_the_other_mode(tmp_path: Path) -> None:
    first = ranks.run(2, evaluated, str(tmp_path))
    assert sum(captures for captures, _, _ in first) == 1
    second = ranks.run(2, evaluated, str(tmp_path))
    assert [captures for captures, _, _ in second] == [0, 0]
    for _, result, expected in (*first, *second):
        assert_close(result, expected)


class ReadsAValue(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.sum().item()


def refused() -> Found:
    return outcome(ReadsAValue(), torch.zeros(4, 12))[0]


def test_an_error_of_the_model_is_the_same_on_every_rank() -> None:
    first, *others = ranks.run(3, refused_on_three)
    assert first[0] == 1 and [captures for captures, _ in others] == [0, 0]
    assert first[1].startswith("CompileError: forward reads a number out of a tensor\n  node")
    assert {raised for _, raised in others} == {first[1]}


def refused_on_three() -> Found:
    return outcome(ReadsAValue(), torch.zeros(4, 12), "dp_shard=3")[0]


class NotSent(Exception):
    """An error that cannot be sent."""

    def __init__(self, a: str, b: str) -> None:
        super().__init__(f"{a}{b}")


def broken(error: str) -> Found:
    raised = {"assertion": AssertionError("a bug"), "unsendable": NotSent("a ", "bug")}[error]
    with mock.patch.object(compiler, "compiled", mock.Mock(side_effect=raised)):
        return outcome(stack(), tokens())[0]


@pytest.mark.parametrize("error", ["assertion", "unsendable"])
def test_a_bug_of_the_compilers_reaches_all_ranks_too(error: str) -> None:
    found = ranks.run(2, broken, error)
    told = {"assertion": "AssertionError: a bug", "unsendable": "RuntimeError: rank 0 failed: NotSent('a bug')"}
    assert found == [(0, "NotSent: a bug" if error == "unsendable" else told[error]), (0, told[error])]


class Scaled(nn.Module):
    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by


def other_model() -> tuple[Found, list[str]]:
    return outcome(Scaled(1.0 + dist.get_rank()), torch.zeros(4, 12), "dp_shard=2")


def test_ranks_with_other_models_each_compile_and_binding_tells_them_apart() -> None:
    for (captures, raised), log in ranks.run(2, other_model):
        assert captures == 1 and raised.startswith(f"{Disagreement.__name__}: programs differ between ranks 0 and 1")
        assert log == ["each rank compiles Scaled for itself: ranks 0 and 1 differ in model"]


class ByRank(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (1.0 + dist.get_rank())


def by_rank() -> tuple[Found, list[str]]:
    return outcome(ByRank(), torch.zeros(4, 12), "dp_shard=2")


def test_a_model_that_asks_for_its_rank_is_compiled_by_each_and_told_apart() -> None:
    for (captures, raised), log in ranks.run(2, by_rank):
        assert captures == 1 and "programs differ" in raised
        assert log == [
            "each rank compiles ByRank for itself: ByRank.forward, function ByRank.forward reads dist: "
            "a program cannot be kept for that"
        ]


def gives_pair() -> tuple[Found, list[str]]:
    return outcome(GivesPair(), torch.zeros(4, 12), "dp_shard=2")


def test_a_program_that_cannot_be_handed_on_is_compiled_by_each() -> None:
    for (captures, raised), log in ranks.run(2, gives_pair):
        assert (captures, raised) == (1, "") and "results are of a class without a name" in log[-1]


def other_options() -> Found:
    return outcome(stack(), tokens(), "tp=2", outputs="local" if dist.get_rank() else "nothing")[0]


def test_an_option_that_is_wrong_on_one_rank_is_an_error_on_all() -> None:
    first, second = ranks.run(2, other_options)
    assert first == (0, "CompileError: outputs='nothing' is no option\n  try     'sharded' or 'local'")
    assert second == (0, f"Disagreement: rank 0 failed: {first[1].removeprefix('CompileError: ')}")
