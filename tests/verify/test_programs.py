"""Random programs, a sample that is always the same: each is equal to one device, or is refused with a clear error."""

from __future__ import annotations

import time
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

from ndcompile.codegen.sizes import SizeNames
from tests.programs import long_run
from tests.programs.builder import Builder, Dim, Rejected
from tests.programs.generate import generate, sketches
from tests.programs.judge import judge
from tests.programs.long_run import rows, run, smallest, table
from tests.programs.sketch import Body, Input, Sketch, Statement

SAMPLE = settings(
    max_examples=25, derandomize=True, database=None, deadline=None, phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
"""Without hypothesis' own shrinking: `reduce` knows what a program is, and needs fewer trials."""


@SAMPLE
@given(sketches)
def test_random_programs_are_equal_or_refused(sketch: Sketch) -> None:
    torch.set_num_threads(1)
    verdict = judge(sketch)
    if not verdict.good:
        small = smallest(sketch, verdict)
        pytest.fail(f"{verdict.kind}: {judge(small).detail}\n\n{small}")


def lines(*texts: str) -> tuple[Statement, ...]:
    return tuple(Statement((text.partition(" =")[0],), text) for text in texts)


LONG = Sketch(
    (
        Body(
            "Model", ("x", "target"),
            ("self.m0 = nn.Linear(8, 12)", "self.m1 = nn.LayerNorm(12)", "self.m2 = nn.Linear(12, 8)"),
            lines("v0 = self.m0(x)", "v1 = F.gelu(v0)", "v2 = self.m1(v1)", "v3 = v2 / (x.shape[0] - 1)",
                  "v4 = self.m2(v3)", "v5 = v4 + x", "v6 = F.mse_loss(v5, target)"),
            '{"loss": v6, "y": v5}',
        ),
    ),
    (Input("x", ("b", 8)), Input("target", ("b", 8))), "dp_replicate=2, dp_shard=2", (), 5,
)  # fmt: skip


def test_a_planted_bug_is_found_and_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug: a size of the batch is this rank's own."""
    assert judge(LONG).kind == "equal"
    monkeypatch.setattr(SizeNames, "expression", lambda sizes, size: str(size))
    verdict = judge(LONG)
    assert verdict.kind == "wrong"
    body = smallest(LONG, verdict).bodies[-1]
    assert [s.text for s in body.statements] == ["v3 = x / (x.shape[0] - 1)"]
    assert body.result == "v3"


def test_a_seed_is_a_program() -> None:
    assert [str(generate(Random(seed))) for seed in (7, 8)] == [str(generate(Random(seed))) for seed in (7, 8)]


def test_sizes_are_read_off_from_three_points() -> None:
    """The batch is 5, 11, 5 there, the sequence 7, 7, 13."""
    texts = [Dim(sizes).text for sizes in ((12, 12, 12), (5, 11, 5), (42, 42, 78), (35, 77, 65), (6, 6, 12))]
    assert texts == ["12", "b", "6 * s", "b * s", None]


def test_a_log_is_taken_up_and_a_hanging_program_is_a_row_of_it(tmp_path: Path) -> None:
    log = tmp_path / "programs.jsonl"
    log.write_text('{"seed": 0, "kind": "equal", "detail": "", "seconds": 0.5, "mesh": "tp=2"}\n')
    run(log, range(2), seconds=60, jobs=1, limit=1e-3)
    assert [(row["seed"], row["kind"]) for row in rows(log)] == [(0, "equal"), (1, "hang")]
    assert "failures: 1 hang" in table(rows(log))


def body_of_x() -> Builder:
    return Builder.of_inputs(Random(0), [Input("x", ("b", 4, 6))])


def test_parameters_of_a_list_have_the_names_that_python_reads() -> None:
    g = body_of_x()
    g.member("nn.ModuleList(nn.Linear(6, 2) for _ in range(2))", prefix="blocks")
    assert [name for name, _ in g.parameters()][-1] == "self.blocks0[1].bias"
    assert g.let("F.linear(x, self.blocks0[1].weight)").last == 2


def test_a_line_with_a_size_that_the_body_does_not_know_is_not_written() -> None:
    with pytest.raises(Rejected):
        body_of_x().let("x.view(b, 24)")


def test_a_seed_of_which_no_program_comes_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(random: Random) -> Sketch:
        raise SyntaxError("no program")

    monkeypatch.setattr(long_run, "generate", fails)
    log = tmp_path / "programs.jsonl"
    long_run.work(log, [3, 5], end=time.time() + 60, job=0, limit=60)
    assert [(row["seed"], row["kind"]) for row in rows(log)] == [(3, "generator"), (5, "generator")]
    assert "failures: 3 generator, 5 generator" in table(rows(log)) and "SyntaxError: no program" in table(rows(log))
