"""The runner of planted bugs over the matrix: a fair order, a log that is taken up, and in CI a sample by one seed."""

from __future__ import annotations

import io
import random
import time
from collections import Counter
from pathlib import Path

from rich.console import Console

from ndcompile.verify.mutants import Mutant
from tests.equivalence import deep, grouped, recurrent, torch_nn, zoo
from tests.equivalence.odd import ODD
from tests.verify.mutation import MESHES, Work, in_turn, key, rows, run_model, settled_of, show, write

SMALL = ("mlp", *ODD, *deep.DEEP, *grouped.GROUPED, *recurrent.RECURRENT, "nn.MultiheadAttention")
"""Models that compile and run in a second or two; the command takes all."""


def test_every_operator_has_its_turn_before_any_has_a_second() -> None:
    planted = [Mutant(operator, line, "", "", "") for operator in "ab" for line in range(10)] + [Mutant("c", 0, *"xyz")]
    turns = in_turn(planted, "seed")
    assert [m.operator for m in turns[:5]] == ["a", "b", "c", "a", "b"]
    assert sorted(map(str, turns)) == sorted(map(str, planted))
    assert in_turn(planted, "seed") == turns != in_turn(planted, "another")
    assert Counter(m.operator for m in in_turn(planted, "seed", every=4)) == dict(a=3, b=3, c=1)


def test_a_log_is_taken_up_and_says_what_is_alive(tmp_path: Path) -> None:
    log, work = tmp_path / "log.jsonl", Work(tmp_path / "log.jsonl", ("tp=2", "dp_shard=2"), count=2, every=3)
    run_model("mlp", work, set(), time.time() + 1)
    before = [row for row in rows(log) if "verdict" in row]
    run_model("mlp", work, {key(row) for row in before}, time.time() + 100)
    judged = [row for row in rows(log) if "verdict" in row]
    assert judged[: len(before)] == before and len({key(row) for row in judged}) == len(judged) > 10
    console = Console(file=io.StringIO(), width=150)
    assert show(log, console)
    write(log, dict(model="mlp", mesh="tp=2", operator="x", line=1, before="a", after="b", verdict="alive"))
    assert not show(log, console)


def test_what_a_log_is_through_with_is_not_compiled_again(tmp_path: Path) -> None:
    log, work = tmp_path / "log.jsonl", Work(tmp_path / "log.jsonl", ("tp=2", "dp_shard=2"), count=2, every=20)
    run_model("mlp", work, set(), time.time() + 100)
    known = rows(log)
    refused = dict(model="gpt", mesh="tp=3", refused="no such program")
    assert settled_of([*known, refused], 20) == {
        ("mlp", "tp=2"): True,
        ("mlp", "dp_shard=2"): True,
        ("gpt", "tp=3"): False,
    }
    assert settled_of(known, 1) == {} and list(settled_of(known[:-1], 20)) == [("mlp", "tp=2")]
    run_model("mlp", work, set(), time.time() + 100, settled_of(known, 20))
    assert rows(log) == known


def test_a_sample_of_the_matrix_leaves_no_bug_alive(tmp_path: Path) -> None:
    """Fails under 100 %: two programs and a bug or two by each operator, all drawn by one seed."""
    draw = random.Random(20261130)
    for model in draw.sample([name for name in SMALL if name in zoo.ALL | torch_nn.TORCH_NN], 2):
        work = Work(tmp_path / "log.jsonl", (draw.choice(MESHES), "dp_shard=2"), count=1, every=50)
        run_model(model, work, set(), time.time() + 600)
    shown = io.StringIO()
    assert show(tmp_path / "log.jsonl", Console(file=shown, width=150)), shown.getvalue()
