"""Random programs: what is kept of one is its text and no other's."""

from __future__ import annotations

import itertools
from pathlib import Path
from random import Random

import pytest

import ndcompile as nd
import tests.programs.sketch
from tests.cache.counting import counted
from tests.programs.generate import generate
from tests.programs.judge import REFUSALS, compiled
from tests.programs.sketch import build

SEEDS = range(400, 412)


def drawn(seed: int, monkeypatch: pytest.MonkeyPatch) -> nd.Program:
    """The program of a random sketch, whose file has the same name at each draw: emitted comments hold it."""
    monkeypatch.setattr(tests.programs.sketch, "_FILES", itertools.count(seed))
    sketch = generate(Random(seed))
    return compiled(sketch, build(sketch))


@pytest.mark.full
def test_random_programs_are_kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NDCOMPILE_CACHE", str(tmp_path))
    texts: dict[int, str] = {}
    for seed in SEEDS:
        with counted() as missed:
            try:
                texts[seed] = str(drawn(seed, monkeypatch))
            except REFUSALS:
                continue
        assert missed.captures == 1 and not missed.log, f"seed {seed} finds another's program: {missed.log}"
    assert len(texts) > len(SEEDS) / 2, "most are compiled"
    assert len(list(tmp_path.glob("*.json"))) == len(texts)
    for seed, text in texts.items():
        with counted() as found:
            assert str(drawn(seed, monkeypatch)) == text
        assert found.captures == 0, f"seed {seed} is found again"
