"""Each example runs as its first lines say, and what it prints is what it claims."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def output(*arguments: str, folder: Path = ROOT) -> str:
    """What `python arguments…` prints, on one thread a process."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def masked_tokens(text: str) -> list[dict[str, tuple[float, float]]]:
    """For each of the two batches how far loss and gradients of each way are off."""
    row = r"^(FSDP2|ndcompile) .*? +\d\.\d+ +(\S+) +(\S+)$"
    found = [(name, (float(loss), float(far))) for name, loss, far in re.findall(row, text, re.MULTILINE)]
    assert [name for name, _ in found] == ["FSDP2", "ndcompile"] * 2
    return [dict(found[:2]), dict(found[2:])]


@pytest.mark.parametrize(
    ("start", "options", "bar"),
    [((*TORCHRUN, "2"), (), 1e-6), pytest.param((), ("--float64",), 1e-10, marks=pytest.mark.full)],
    ids=["float32 by torchrun", "float64 by python"],
)
def test_masked_tokens(start: tuple[str, ...], options: tuple[str, ...], bar: float) -> None:
    text = output(*start, "examples/masked_tokens.py", *options)
    assert "rank 0 has 64 tokens with a label, rank 1 has 64" in text
    assert "rank 0 has 103 tokens with a label, rank 1 has 35" in text
    equal, unequal = masked_tokens(text)
    for batch in (equal, unequal):
        assert max(batch["ndcompile"]) < bar
    assert max(equal["FSDP2"]) < 1e-6, "the comparison is fair where ranks have as many tokens"
    assert unequal["FSDP2"][0] > 1e-3 and unequal["FSDP2"][1] > 0.1, "a mean of means is another number"


def train(ranks: int, mesh: str, steps: int, folder: Path) -> dict[str, tuple[float, ...]]:
    text = output(
        *TORCHRUN, str(ranks), "examples/train.py", "--mesh", mesh, "--steps", str(steps), "--folder", str(folder)
    )
    found = re.findall(r"^(step +\d+|evaluation) +loss (\S+)(?: +gradient norm (\S+))?$", text, re.MULTILINE)
    return {name: tuple(float(number) for number in numbers if number) for name, *numbers in found}


def test_train_learns_on_two_ranks(tmp_path: Path) -> None:
    found = train(2, "dp_shard=2", 3, tmp_path)
    assert list(found) == ["step   0", "step   1", "step   2", "evaluation"]
    assert found["step   2"][0] < found["step   0"][0]


@pytest.mark.full
def test_train_goes_on_from_a_checkpoint_on_another_mesh_as_one_device_would(tmp_path: Path) -> None:
    whole = train(1, "dp_shard=-1", 4, tmp_path / "one device")
    assert list(whole) == ["step   0", "step   1", "step   2", "step   3", "evaluation"]
    first = train(2, "dp_shard=2", 2, tmp_path / "two ranks")
    then = train(2, "tp=2", 2, tmp_path / "two ranks")
    del first["evaluation"]
    assert list(first | then) == list(whole)
    for name, numbers in (first | then).items():
        assert numbers == pytest.approx(whole[name], rel=1e-4), name
    assert whole["step   3"][0] < whole["step   0"][0]


def test_inspect_program_needs_no_process_group() -> None:
    text = output("examples/inspect_program.py")
    assert "class LlamaDecoderLayer(Block):  # model.layers.0 … 1" in text
    before, after = re.findall(r"^collectives of model\.layers\.0 .*\n((?:\d+ × .*\n)+)", text, re.MULTILINE)
    assert "2 × forward  all_gather(tp)\n2 × forward  reduce_scatter(tp)\n" in before
    assert "1 × forward  reduce_scatter(tp)\n" in after, "attention's alone: the pinned MLP has none"
    assert re.search(r"^model\.layers\.0\.mlp\.down_proj\.weight   tp S\(1\)", text, re.MULTILINE)
    chosen, pinned = (float(number) for number in re.findall(r"holds ([\d.]+) MiB", text))
    assert chosen < pinned


def test_pins_and_rules() -> None:
    text = output("examples/pins_and_rules.py")
    assert "no rule for examples.scaled_tanh.default" in text
    assert "the rule '(* n)(n) -> * n' of examples.scaled_tanh.default is refused: row P, R → P on 2 ranks" in text
    weights = re.findall(r"^  up\.weight +(.*)$", text, re.MULTILINE)
    assert weights == ["tp S(0)", "tp I"]
    far = [float(number) for number in re.findall(r"gradients are off by (\S+)$", text, re.MULTILINE)]
    assert len(far) == 2 and max(far) < 1e-10


def test_every_example_is_tested() -> None:
    tested = Path(__file__).read_text()
    for path in (ROOT / "examples").glob("*.py"):
        assert f"examples/{path.name}" in tested, path.name


def test_verify_in_ci_by_the_commands_of_its_workflow(tmp_path: Path) -> None:
    workflow = yaml.safe_load((ROOT / "examples/ci/verify.yml").read_text())
    steps = workflow["jobs"]["equal-to-one-device"]["steps"]
    commands = [shlex.split(s["run"]) for s in steps if s.get("working-directory") == "examples"]
    assert [words[0] for words in commands] == ["pytest", "ndcompile"]
    shutil.copy(ROOT / "examples/verify_in_ci.py", tmp_path)
    tested = output("-m", *commands[0], "-q", "-p", "no:cacheprovider", folder=tmp_path)
    assert "2 passed" in tested
    told = output("-c", "from ndcompile.cli import main; main()", *commands[1][1:], folder=tmp_path)
    assert told.startswith("Tagger on dp_shard=2, tp=2: equal to one device")
    kept = steps[-1]["with"]["path"].split()
    assert [(tmp_path / path).exists() for path in (Path(p).relative_to("examples") for p in kept)] == [True, True]
    pages = sorted(page.stem for page in (tmp_path / "reports").iterdir())
    assert pages == ["dp_replicate=2_dp_shard=2", "dp_shard=16_tp=8"]
