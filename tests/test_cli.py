"""The command line, as a user calls it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

MODEL = """
import torch

def mlp():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    return model, torch.zeros(4, 8)

def nothing():
    return 3
"""


ROOT = str(Path(__file__).parents[1])
ENVIRONMENT = {**os.environ, "PYTHONPATH": ROOT, "COLUMNS": "120", "NO_COLOR": "1"}


def ndcompile(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    (cwd / "my_models.py").write_text(MODEL)
    command = [sys.executable, "-c", "from ndcompile.cli import main; main()", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, env=ENVIRONMENT)


def test_inspect_shows_an_mlp_needs_one_all_reduce_forward(tmp_path: Path):
    done = ndcompile("inspect", "my_models:mlp", "--mesh", "tp=2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (row,) = [line for line in done.stdout.splitlines() if "all_reduce" in line and "│" in line]
    assert "tp" in row
    assert "class " in done.stdout
    hidden = ndcompile("inspect", "my_models:mlp", "--mesh", "tp=2", "--no-source", cwd=tmp_path)
    assert "class " not in hidden.stdout


def test_inspect_takes_a_transformers_configuration(tmp_path: Path):
    pytest.importorskip("transformers")
    config = tmp_path / "config.json"
    config.write_text(
        '{"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,'
        ' "num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 101}'
    )
    done = ndcompile("inspect", str(config), "--mesh", "dp_shard=2, tp=2", "--no-source", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "model.layers.0 … model.layers.1 (each of 2)" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("inspect", "my_models:mlp", "--mesh", "tpp=2"), "unknown axis 'tpp'"),
        (("inspect", "my_models:none", "--mesh", "tp=2"), "cannot find 'my_models:none'"),
        (("inspect", "my_models:nothing", "--mesh", "tp=2"), "my_models:nothing returned int"),
        (("inspect", "my_models", "--mesh", "tp=2"), "cannot read a model from 'my_models'"),
        (("inspect", "none.json", "--mesh", "tp=2"), "there is no file none.json"),
        (("demo", "--mesh", "tp=0"), "axis 'tp' has size 0"),
        (("demo", "--precision", "fp4"), "'fp4' is not float32 or bf16"),
    ],
)
def test_errors_are_their_text_and_status_2(arguments: tuple[str, ...], message: str, tmp_path: Path):
    done = ndcompile(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_demo_in_float64_equals_one_device(tmp_path: Path):
    done = ndcompile("demo", "--float64", "--steps", "2", "--mesh", "dp_shard=2, tp=2", "--out", "it.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal within the bar" in done.stdout
    assert "class DecoderBlock" in (tmp_path / "it.py").read_text()
