"""Real ranks: a right program passes every layer, and each layer sees a bug that is planted for it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ndcompile as nd
from ndcompile.placement import BY_NAME
from ndcompile.runtime import collectives, parts, private, transport
from ndcompile.verify.__main__ import main
from ndcompile.verify.payloads import payloads
from ndcompile.verify.real_ranks import Job, OnRanks, References, claims_of, report, verify_on_ranks
from ndcompile.verify.report import Claim
from tests import ranks
from tests.axes.test_cp import IDS, Attends
from tests.equivalence.zoo import ALL


@contextmanager
def patched(where: Any, name: str, value: Any) -> Iterator[None]:
    if isinstance(where, dict):
        before, where[name] = where[name], value
    else:
        before = getattr(where, name)
        setattr(where, name, value)
    try:
        yield
    finally:
        if isinstance(where, dict):
            where[name] = before
        else:
            setattr(where, name, before)


gathered = collectives.RECEIVED["all_gather"]
reduce, scatter = (collectives.SENT[n] for n in ("all_reduce", "reduce_scatter"))


def turned(y: Tensor, dtype: torch.dtype, along: Any) -> Tensor:
    """A gather in another order of ranks."""
    whole = gathered(y, dtype, along)
    return whole.roll(whole.shape[along.dim] // along.ranks, along.dim)


def turned_weights(got: Tensor, part: Any, axis: Any) -> Tensor:
    return whole_of_gathered(got.view(axis.size, -1).roll(1, 0).view(got.shape), part, axis)


whole_of_gathered = parts.whole_of_gathered


def unwaited(x: Tensor, along: Any) -> Tensor:
    """Read before it has come: what is waited for later is a copy."""
    return private.start_all_reduce(x.contiguous(), along.op, along.group).clone()


def in_half(sent: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Cast down before a reduction."""
    return lambda x, along: sent(x.bfloat16(), along)


def on_two_ranks() -> dict[str, list[tuple[str, bool | None, str]]]:
    """What each layer says of a right program, and of one with a bug: by bug, (kind, held, the first evidence)."""
    torch.set_num_threads(1)
    model, batch = ALL["gpt"](8)
    found: dict[str, list[Claim]] = {}
    job = Job.of(model, batch, "float32", 2, torch.device("cpu"))
    program = job.compiled("tp=2")
    here, right = OnRanks(job, program), References.of(job, program)
    found["right"] = [here.payloads(), here.in_the_field(), *claims_of(here, right, "eager", 1)]
    with patched(collectives.RECEIVED, "all_gather", turned):
        found["another order"] = [here.payloads(), here.in_the_field(), here.trained(right, "eager")]
    with patched(collectives.SENT, "all_reduce", unwaited):
        found["no wait"] = [here.delays(right, 6, "eager")]  # by luck one run is right
    with (
        patched(collectives.SENT, "all_reduce", in_half(reduce)),
        patched(collectives.SENT, "reduce_scatter", in_half(scatter)),
    ):
        found["cast down"] = [here.trained(right, "eager")]
    line = 'mlp_norm_bias=weight("mlp_norm.bias", reduce=("tp",))'
    assert line in str(program), program
    wrong = replace(program, source=str(program).replace(line, 'mlp_norm_bias=weight("mlp_norm.bias")'))
    found["not reduced"] = [OnRanks(job, wrong).trained(right, "eager")]
    sharded = OnRanks(job, job.compiled("dp_shard=2"))
    with patched(transport, "whole_of_gathered", turned_weights):
        found["weights in another order"] = [sharded.payloads()]
    found["weights"] = [sharded.payloads()]
    assert report(here, found["right"]) and not report(here, found["no wait"])
    return {bug: [(c.kind, c.held, c.evidence[0]) for c in claims] for bug, claims in found.items()}


def test_a_right_program_passes_and_each_layer_sees_its_bug() -> None:
    found, other = ranks.run(2, on_two_ranks, timeout=120)
    held = {bug: [h for _, h, _ in claims] for bug, claims in found.items()}
    assert held == {
        "right": [True] * 4, "another order": [False] * 3, "no wait": [False], "cast down": [False],
        "not reduced": [False], "weights in another order": [False], "weights": [True],
    }, found  # fmt: skip
    assert {bug: [h for _, h, _ in claims] for bug, claims in other.items()} == held, "all ranks say the same"
    kinds = [kind for kind, _, _ in found["right"]]
    assert kinds == [
        "tested (real ranks, integers)", "equal over F_p (real ranks)", "tested (real ranks, float32, eager)",
        "tested (real ranks, float32, eager, delays)",
    ]  # fmt: skip
    assert "mlp_norm.bias" in found["not reduced"][0][2]
    assert found["right"][3][2].endswith("the same bits as without")


def with_a_ring() -> Claim:
    torch.set_num_threads(1)
    job = Job.of(Attends(), IDS, "float32", 1, torch.device("cpu"))
    return OnRanks(job, nd.compile(job.model, "cp=2", IDS, cp_attention="ring")).in_the_field()


def test_a_program_with_a_ring_is_exact_over_the_wires_with_the_ring_as_one_attention() -> None:
    for claim in ranks.run(2, with_a_ring, timeout=120):
        assert claim.held, claim
        assert claim.evidence[1:] == ["each ring is taken as one attention: nd.verify has the lemma"]


def in_bfloat16_compiled() -> str:
    torch.set_num_threads(1)
    model, batch = ALL["gpt with dropout"](8)
    return str(verify_on_ranks(model, "dp_shard=2", batch, modes=["compiled"], delays=1, backend="aot_eager"))


@pytest.mark.full
def test_bfloat16_compiled_with_dropout() -> None:
    text, _ = ranks.run(2, in_bfloat16_compiled, timeout=120)
    first, *rows = text.splitlines()
    assert first == "ByteGPT on dp_shard=2: equal to one device"
    assert sum("tested (real ranks, bf16, compiled" in row for row in rows) == 2, text
    assert "proved" not in text, "that is another claim"


def test_every_kind_of_conversion_is_drawn_from_programs() -> None:
    """Of the conversions of some programs, with uneven dims among them."""
    found = []
    for name, mesh in (("gpt", "tp=4"), ("fused attention", "tp=3"), ("gated", "tp=5")):
        model, batch = ALL[name](12)
        found += payloads(nd.compile(model, mesh, batch), {"b": 12, "s": 12})
    assert len(set(found)) > 8
    kinds = {payload.name for payload in found}
    assert {"all_gather", "reduce_scatter", "replicate"} <= kinds <= set(BY_NAME)
    assert any(dict(payload.options).get("size") for payload in found), "an uneven one"


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])


def start(folder: Path, *arguments: str) -> tuple[list[int], str, str]:
    """Two processes of `python -m ndcompile.verify`, as torchrun starts them: how they end, and what they print."""
    shared = {
        "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path),
        "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "ndcompile.verify", *arguments], cwd=folder, text=True,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    told = [process.communicate(timeout=120) for process in processes]
    return [p.returncode for p in processes], "".join(out for out, _ in told), "".join(errors for _, errors in told)


MODELS = """
import os
import torch
from torch import nn

def mlp():
    return nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 12)), torch.ones(4, 12)

def broken():
    if os.environ["RANK"] == "1":
        raise RuntimeError("no memory left, say")
    return mlp()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my_models.py").write_text(MODELS)
    return tmp_path


def test_the_command_ends_with_0_and_writes_a_line(folder: Path) -> None:
    statuses, out, errors = start(
        folder, "my_models:mlp", "--mesh", "tp=2", "--precision", "float32", "--json", "r.jsonl"
    )
    assert statuses == [0, 0], errors
    assert out.splitlines()[0] == "Sequential on tp=2: equal to one device"
    (line,) = (folder / "r.jsonl").read_text().splitlines()
    assert json.loads(line)["equal"] is True and len(json.loads(line)["claims"]) == 4


def test_a_rank_that_fails_ends_all_and_is_told_once(folder: Path) -> None:
    statuses, _, errors = start(folder, "my_models:broken", "--mesh", "tp=2", "--precision", "float32")
    assert statuses == [3, 3]
    assert errors.count("no memory left, say\n") == 1 and errors.count("Traceback") == 1, errors
    assert "rank 1 failed" in errors


def test_a_users_error_ends_with_2(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, as the only rank."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    for name, value in {**alone, "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(sys, "argv", ["ndcompile.verify", "my_models:mlp", "--mesh", "tp=4"])
    monkeypatch.chdir(folder)
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        dist.destroy_process_group()
    assert ended.value.code == 2 and "mesh 'tp=4' has 4 ranks" in capsys.readouterr().err


def test_without_ranks_the_command_says_how_to_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "argv", ["ndcompile.verify", "my_models:mlp", "--mesh", "tp=2"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and "torchrun --nproc-per-node 2" in capsys.readouterr().err
