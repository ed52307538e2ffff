"""The benchmark's ways train the same model on the same data: their first losses agree, within bfloat16."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from tests import ranks
from tests.bench.step_time import Case, Row, table
from tests.bench.workloads import WORKLOADS

UNIT = 2**-8
"""Relative rounding of bfloat16; a loss of two blocks may be off by about that."""


def rows_of(cases: tuple[str, ...], model: str = "llama-tiny") -> list[Row]:
    workload = WORKLOADS[model]()
    made = [Case(name, workload, torch.device("cpu"), compiled=False) for name in cases]
    rounds = [[{"case": case.name} | case.round(steps=1, warmup=1) for case in made] for _ in range(2)]
    assert all("error" in a or a["last_loss"] > b["last_loss"] for a, b in zip(*rounds, strict=True)), "it trains on"
    return rounds[0]


@pytest.mark.parametrize(
    "cases",
    [
        ("single", "fsdp2", "ndcompile:dp_shard=2"),
        pytest.param(("tp", 'ndcompile:tp=2/outputs="sharded"'), marks=pytest.mark.full),
        pytest.param(
            ("single", "ddp", "ndcompile:dp_replicate=2", 'ndcompile:dp_shard=2/remat="block"'), marks=pytest.mark.full
        ),
    ],
    ids=["data", "tp", "more data"],
)
def test_ways_begin_with_the_same_loss(cases: tuple[str, ...]) -> None:
    for rows in ranks.run(2, rows_of, cases, timeout=200.0):
        first, *others = (row["first_loss"] for row in rows)
        assert all(abs(other - first) < UNIT * first for other in others)


@pytest.mark.full
@pytest.mark.parametrize("model", ["gpt2-tiny", "vit-tiny"])
def test_other_models_too(model: str) -> None:
    cases = ("single", "ddp", "fsdp2", "ndcompile:dp_replicate=2", "ndcompile:dp_shard=2")
    for rows in ranks.run(2, rows_of, cases, model, timeout=200.0):
        first, *others = (row["first_loss"] for row in rows)
        assert all(abs(other - first) < 2 * UNIT * first for other in others)


def test_a_case_that_all_refuse_is_told() -> None:
    for rows in ranks.run(2, rows_of, ("fsdp2:cp=2", "ndcompile:dp_shard=3")):
        assert rows[0]["error"] == "ValueError: Fsdp2 has the axes dp_shard, tp, not cp"
        assert "3" in rows[1]["error"]


@pytest.mark.full
def test_one_process_measures_what_a_rank_computes() -> None:
    cases = ["--cases", "single,ndcompile:tp=2", "--others", "1", "--rounds", "1", "--no-compiled"]
    command = [sys.executable, "-m", "tests.bench.step_time", "--model", "llama-tiny", *cases]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert [row["case"] for row in rows] == ["single", "ndcompile:tp=2"] and all("error" not in row for row in rows)


def test_ratios_are_of_the_same_round() -> None:
    found = [
        {"case": "single", "per_s_gpu": 100.0, "gib": None, "first_s": 1.0},
        {"case": "a", "per_s_gpu": 90.0, "gib": None, "first_s": 1.0},
        {"case": "single", "per_s_gpu": 50.0, "gib": None, "first_s": 1.0},
        {"case": "a", "per_s_gpu": 55.0, "gib": None, "first_s": 1.0},
    ]
    cells = [list(column.cells) for column in table(found, "").columns]
    assert cells[:3] == [["single", "a"], ["75", "72"], ["1.000", "1.000"]]
