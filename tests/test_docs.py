"""The pages: their Python runs and prints what follows it, commands parse, links lead somewhere."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import nn

from ndcompile.cli import app
from ndcompile.rules.registry import RULES
from tests import ranks
from tests.models import Stack, seeded, tokens
from tests.test_project import MAY_IMPORT

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = {path.stem: path for path in [README, *sorted((ROOT / "docs").glob("*.md"))]}
EMITTED = "class DecoderBlock(Block):"
"""How the README's excerpt of emitted code starts: tests/test_readme.py holds that."""


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(), re.DOTALL | re.MULTILINE)


def python_blocks(path: Path) -> list[tuple[str, str | None]]:
    """Each block of Python with the text block that follows it without a word between, which is what it prints."""
    pattern = r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```$)?"
    found = re.findall(pattern, path.read_text(), re.DOTALL | re.MULTILINE)
    return [(code, printed or None) for code, printed in found if not code.startswith(EMITTED)]


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """What a page registers is forgotten after it."""
    before = dict(RULES)
    yield
    RULES.clear()
    RULES.update(before)


@pytest.mark.parametrize("page", [name for name, path in PAGES.items() if path != README and python_blocks(path)])
def test_python_of_a_page_runs_and_prints_what_follows(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "page"}
    for code, expected in python_blocks(PAGES[page]):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, f"{page}.md", "exec"), namespace)
        assert printed.getvalue() == (expected or "")


def llama() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model and the batch that the README's code is about."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=131, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(131, (4, 8))
    model = LlamaForCausalLM(config)
    assert isinstance(model, nn.Module)
    return model, {"input_ids": ids, "labels": ids.clone()}


def train_as_the_readme(code: str) -> float:
    """How far the parameter has moved that moved least."""
    model = seeded(Stack)
    namespace: dict[str, Any] = {"torch": torch, "model": model, "batch": tokens()}
    exec(compile(code, "README.md", "exec"), namespace)
    moved = dict(namespace["model"].named_parameters())
    return min((moved[name].full_tensor() - p).norm().item() for name, p in model.named_parameters())


def test_the_readmes_loop_trains_on_eight_ranks() -> None:
    (loop, _), *_ = python_blocks(README)
    assert 'nd.parallelize(model, "dp_shard=2, tp=4", example_inputs=batch)' in loop
    assert min(ranks.run(8, train_as_the_readme, loop, timeout=120)) > 0, "every parameter has moved"


def test_the_readmes_look_inside_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model, batch = llama()
    _, (code, _) = python_blocks(README)
    exec(compile(f"import ndcompile as nd\n{code}", "README.md", "exec"), {"model": model, "batch": batch})
    text = capsys.readouterr().out
    assert "class LlamaDecoderLayer(Block)" in text and "MB sent" in text
    assert {path.name for path in tmp_path.iterdir()} == {"program.py", "program.json"}


def commands() -> Iterator[tuple[str, str]]:
    """Each `ndcompile …` of a shell block or of a line of text, with its page."""
    for name, path in PAGES.items():
        shell = [part for text in blocks(path, "bash") for line in text.splitlines() for part in line.split("&&")]
        named = re.findall(r"`(ndcompile \w+ [^`…]+)`", path.read_text())
        for text in dict.fromkeys(part.partition(" #")[0].strip() for part in [*shell, *named]):
            if text.startswith("ndcompile "):
                yield name, text


@pytest.mark.parametrize(("page", "text"), list(commands()))
def test_commands_parse(page: str, text: str) -> None:
    _, name, *arguments = shlex.split(text)
    group = typer.main.get_command(app)
    command = group.get_command(None, name)  # type: ignore[attr-defined]
    assert command is not None, f"{page}: there is no command {name}"
    command.make_context(name, arguments)


def test_errors_are_quoted_from_their_tests() -> None:
    files = ("bad_input", "mesh", "checkpoints", "drawn", "own_backward")
    told = "".join((ROOT / "tests" / f"test_{name}.py").read_text() for name in files)
    for block in blocks(PAGES["errors"], "text"):
        for line in block.splitlines():
            assert line.startswith("  source  ") or line in told, f"no test has: {line}"


def test_every_step_has_its_row() -> None:
    from ndcompile.pipeline import PIPELINE

    text = PAGES["architecture"].read_text()
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\|([^|]*)\|$", text, re.MULTILINE)
    assert [name for name, _ in rows] == ["capture", *(step.name for step in PIPELINE)]
    for (_, named), step in zip(rows[1:], PIPELINE, strict=True):
        assert re.findall(r"`(\w+)`", named) == [check.__name__ for check in step.ensures]


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_every_part_that_is_held_is_in_the_table(part: str) -> None:
    text = PAGES["architecture"].read_text()
    assert part == "errors" or f"`{part}.py`" in text or f"`{part}/`" in text


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", PAGES[page].read_text()):
        assert (PAGES[page].parent / target).exists(), target
