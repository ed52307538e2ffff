"""docs/bugs.md: each report is there once, each test that it names exists, and what is not there names none."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "bugs.md").read_text()
REPORTS = {
    "A": "1 2 3 4 5 6 7 10 12 14 15 17 18 19 20",
    "B": "1 2 4 6 8 9 10",
    "C": "1 2 4 5 6",
    "D": "1 2 3 4 5 6 7 8 9 10 12 14 15 16 17 18 20 22",
    "E": "1 2 3 4 8 9 10 11 13 14",
    "F": "2 4 5 6 7 8",
    "G": "1 3 4 6 8 9",
    "H": "1 2 3 4 5 7 9",
    "I": "2 4 5 6 7 8",
    "J": "1 3 4 5",
    "K": "2 3 4",
    "U": "1 2 4 5 6 7 8 11 12 13 15 16 17 19 20 21 23 24 25 26 27 30 32 33 34 35 37 38 39 40 42 43 44 45 46 47 48 49 "
    "50 51 52 55 56 57 58 59 60 61 62 64 65 66 67 69 70 71 72 73 75 76 77",
}
"""The reports that were collected, by section."""


class Row(NamedTuple):
    id: str
    report: str
    kind: str
    does: str
    tests: tuple[str, ...]


def rows() -> list[Row]:
    found = []
    for line in PAGE.splitlines():
        if re.match(r"\| [A-Z]\d+ \|", line):
            one, report, kind, does, tests = (cell.strip() for cell in line.strip("|").split(" | "))
            found.append(Row(one, report, kind, does, tuple(re.findall(r"`(tests/[^`]+)`", tests))))
    return found


def test_each_report_has_one_row() -> None:
    expected = [section + number for section, numbers in REPORTS.items() for number in numbers.split()]
    assert [row.id for row in rows()] == expected and len(expected) == 148


def test_classes_are_counted() -> None:
    counted = dict(re.findall(r"^\| (impossible|caught|works|not yet) \| .* \| (\d+) \|$", PAGE, re.MULTILINE))
    assert counted == {kind: str(count) for kind, count in Counter(row.kind for row in rows()).items()}


def test_what_is_not_yet_there_names_no_test_and_all_else_does() -> None:
    for row in rows():
        assert bool(row.tests) == (row.kind != "not yet"), row
        assert row.tests or row.does, f"{row.id} does not say why"


@pytest.mark.parametrize("name", sorted({name for row in rows() for name in row.tests}))
def test_a_test_that_is_named_exists(name: str) -> None:
    path, _, function = name.partition("::")
    assert (ROOT / path).is_file(), name
    assert function in names_in(path) or any(known.partition("[")[0] == function for known in names_in(path)), name


def test_each_planted_bug_has_a_row() -> None:
    named = {name.partition("[")[0] for row in rows() for name in row.tests}
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        if path != Path(__file__):
            relative = str(path.relative_to(ROOT))
            assert {f"{relative}::{name.partition('[')[0]}" for name in names_in(relative)} <= named


@cache
def names_in(path: str) -> set[str]:
    """The tests of a file as pytest calls them, with their parameter where they have one."""
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    found: set[str] = set()
    for name, function in vars(module).items():
        if name.startswith("test_"):
            marks = [m for m in getattr(function, "pytestmark", []) if m.name == "parametrize"]
            found |= {f"{name}[{each}]" for m in marks for each in called(*m.args, **m.kwargs)} or {name}
    return found


def called(argument: str, values: Any, ids: Any = None) -> list[str]:
    """What pytest calls each value of one parameter."""
    if isinstance(ids, (list, tuple)):
        return list(ids)
    return [str((ids or (lambda v: getattr(v, "__name__", v)))(value)) for value in values]
