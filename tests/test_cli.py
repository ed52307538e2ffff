"""The command line, as a user calls it."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

import ndcompile as nd
from ndcompile import cli

MODEL = """
import torch

def mlp():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    return model, torch.zeros(4, 8)

def nothing():
    return 3
"""


@pytest.fixture
def ndcompile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Call a command in a folder of its own, in which `my_models.py` is."""
    (tmp_path / "my_models.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "console", Console(width=120))
    return lambda *arguments: CliRunner().invoke(cli.app, arguments)


def test_inspect_shows_an_mlp_needs_one_all_reduce_forward(ndcompile: Callable[..., Result]):
    done = ndcompile("inspect", "my_models:mlp", "--mesh", "tp=2")
    assert done.exit_code == 0, done.output
    (row,) = [line for line in done.stdout.splitlines() if "all_reduce" in line and "│" in line]
    assert "tp" in row
    assert "class " in done.stdout
    hidden = ndcompile("inspect", "my_models:mlp", "--mesh", "tp=2", "--no-source")
    assert "class " not in hidden.stdout


def test_inspect_takes_a_transformers_configuration(ndcompile: Callable[..., Result]):
    pytest.importorskip("transformers")
    config = Path("config.json")
    config.write_text(
        '{"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,'
        ' "num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 101}'
    )
    done = ndcompile("inspect", str(config), "--mesh", "dp_shard=2, tp=2", "--no-source")
    assert done.exit_code == 0, done.output
    assert "model.layers.0 … model.layers.1 (each of 2)" in done.stdout


def test_inspect_tells_memory_for_each_choice(ndcompile: Callable[..., Result]):
    done = ndcompile(
        "inspect", "tests.models:stack_and_tokens", "--mesh", "dp_shard=2", "--remat", "linear", "--at", "b=2"
    )
    assert done.exit_code == 0, done.output
    assert '@recomputed(save=("linear",))' in done.stdout
    rows = [line for line in done.stdout.splitlines() if line.startswith("│ ") and line.count("│") == 9]
    choices = ["as compiled", *("nothing", "all but", "blocks")]
    assert all(any(choice in row for row in rows) for choice in choices), done.stdout
    assert "symmetric" not in done.stdout


def test_inspect_tells_what_copies_need(ndcompile: Callable[..., Result]):
    done = ndcompile("inspect", "tests.models:stack_and_tokens", "--mesh", "dp_shard=2", "--transport", "symmetric")
    assert done.exit_code == 0, done.output
    assert any("symmetric" in line and "┃" in line for line in done.stdout.splitlines()), done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("inspect", "my_models:mlp", "--mesh", "tpp=2"), "unknown axis 'tpp'"),
        (("inspect", "my_models:mlp", "--mesh", "tp=2", "--at", "b=x"), "'b' has no size"),
        (("inspect", "my_models:mlp", "--mesh", "tp=2", "--at", "q=2"), "no input of the model has a size 'q'"),
        (("inspect", "my_models:mlp", "--mesh", "tp=2", "--transport", "fax"), "transport='fax' is no option"),
        (("inspect", "my_models:mlp", "--mesh", "tp=2", "--halves"), "halves=True, and the model has no blocks"),
        (("verify", "my_models:mlp", "--mesh", "dp_shard=2", "--halves"), "which has no axis 'tp'"),
        (("inspect", "my_models:none", "--mesh", "tp=2"), "cannot find 'my_models:none'"),
        (("inspect", "my_models:nothing", "--mesh", "tp=2"), "my_models:nothing returned int"),
        (("inspect", "my_models", "--mesh", "tp=2"), "cannot read a model from 'my_models'"),
        (("inspect", "none.json", "--mesh", "tp=2"), "there is no file none.json"),
        (("demo", "--mesh", "tp=0"), "axis 'tp' has size 0"),
        (("demo", "--precision", "fp4"), "'fp4' is not float32 or bf16"),
        (("verify", "my_models:mlp", "--mesh", "tp=2", "--also", "reals"), "also='reals' is no option"),
        (("verify", "my_models:mlp", "--mesh", "tp=2", "--device", "gpu7"), "device='gpu7' cannot be used"),
        (("verify", "my_models:mlp", "--mesh", "tp=2", "--device", "meta"), "device='meta' is no option"),
    ],
)
def test_errors_are_their_text_and_status_2(arguments: tuple[str, ...], message: str, ndcompile: Callable[..., Result]):
    done = ndcompile(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert "Traceback" not in done.output


def test_demo_in_float64_equals_one_device(ndcompile: Callable[..., Result]):
    done = ndcompile("demo", "--float64", "--steps", "2", "--mesh", "dp_shard=2, tp=2", "--out", "it.py")
    assert done.exit_code == 0, done.output
    assert "equal within the bar" in done.stdout
    assert "class DecoderBlock" in Path("it.py").read_text()


def test_verify_says_what_is_equal_and_writes_json(ndcompile: Callable[..., Result]):
    done = ndcompile("verify", "my_models:mlp", "--mesh", "dp_shard=2, tp=2", "--seeds", "1", "--json", "report.json")
    assert done.exit_code == 0, done.output
    assert "equal to one device" in done.stdout and "the difference is 0" in done.stdout
    report = json.loads(Path("report.json").read_text())
    assert report["equal"] is True and [claim["held"] for claim in report["claims"]] == [True] * 4


def test_verify_takes_more_arithmetics_and_a_device(ndcompile: Callable[..., Result]):
    options = ("--seeds", "1", "--also", "dtypes, integers", "--device", "cpu", "--json", "report.json")
    done = ndcompile("verify", "my_models:mlp", "--mesh", "tp=2", *options)
    assert done.exit_code == 0, done.output
    kinds = [claim["kind"] for claim in json.loads(Path("report.json").read_text())["claims"]]
    assert kinds[-2:] == ["tested (float32)", "equal over small integers"]


def test_verify_writes_a_page(ndcompile: Callable[..., Result]):
    done = ndcompile("verify", "my_models:mlp", "--mesh", "tp=2", "--seeds", "1", "--html", "report.html")
    assert done.exit_code == 0, done.output
    assert "equal to one device" in Path("report.html").read_text()
    assert not done.stderr, "no bar where there is no terminal"


def test_the_bar_goes_from_nothing_to_the_end(monkeypatch: pytest.MonkeyPatch):
    written = io.StringIO()
    monkeypatch.setattr(cli, "errors", Console(force_terminal=True, file=written, width=100))
    with cli.progress_bar() as tell:
        tell("types", 0, 4)
        tell("done", 4, 4)
    text = written.getvalue()
    assert "types" in text and "0%" in text and "100%" in text


def test_verify_ends_with_status_1_on_a_difference(ndcompile: Callable[..., Result], monkeypatch: pytest.MonkeyPatch):
    right = nd.compile

    def wrong(*arguments, **options):
        program = right(*arguments, **options)
        program.source = program.source.replace("all_reduce_invariant(m2, tp)", "m2")
        return program

    monkeypatch.setattr(nd, "compile", wrong)
    done = ndcompile("verify", "my_models:mlp", "--mesh", "tp=2", "--seeds", "1")
    assert done.exit_code == 1, done.output
    assert "NOT equal to one device" in done.stdout and "begins at" in done.stdout


def test_mutate_counts_what_is_seen(ndcompile: Callable[..., Result]):
    done = ndcompile("mutate", "my_models:mlp", "--mesh", "tp=2", "--only", "drop")
    assert done.exit_code == 0, done.output
    assert "100.0% of those that are not equivalent were seen" in done.stdout
