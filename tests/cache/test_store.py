"""Entries on disk: whole or not there, equal whoever writes, and never too many."""

from __future__ import annotations

import multiprocessing
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

import ndcompile as nd
from ndcompile.cache import form
from ndcompile.cache.kept import program_of
from ndcompile.cache.store import Store, store_of
from tests.cache.counting import counted
from tests.models import Mlp, Stack, llama, tokens

X = torch.zeros(6, 12)


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.json"))


def test_an_entry_is_read_as_it_was_written(tmp_path: Path) -> None:
    store = Store(tmp_path / "new" / "folder")
    assert store.read("key") is None
    store.write("key", "text\nof\n\nlines × 2")
    assert store.read("key") == "text\nof\n\nlines × 2"
    assert store.read("other") is None
    assert store.folder.stat().st_mode & 0o077 == 0, "nobody else may write what is run"


@pytest.mark.parametrize("damage", ["cut", "changed", "head", "empty", "other bytes", "another's name"])
def test_what_is_not_as_it_was_written_is_removed_and_compiled_anew(damage: str, tmp_path: Path) -> None:
    first = nd.compile(Mlp(), "tp=2", X, cache=tmp_path)
    (path,) = entries(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(
        {
            "cut": whole[:-20],
            "changed": whole.replace(b"all_reduce", b"all_gather", 1),
            "head": whole.replace(b"program 1", b"program 0", 1),
            "empty": b"",
            "other bytes": b"\xff\xfe\xff",
            "another's name": whole.replace(path.stem.encode(), b"0" * 64, 1),
        }[damage]
    )
    with counted() as found:
        again = nd.compile(Mlp(), "tp=2", X, cache=tmp_path)
    assert found.captures == 1 and len(found.log) == 1, found.log
    assert str(again) == str(first) and path.read_bytes() == whole


def test_an_entry_under_another_key_is_not_read(tmp_path: Path) -> None:
    nd.compile(Mlp(), "tp=2", X, cache=tmp_path)
    (path,) = entries(tmp_path)
    (tmp_path / f"{'0' * 64}.json").write_bytes(path.read_bytes())
    with counted() as found:
        assert Store(tmp_path).read("0" * 64) is None
    assert "is not what was written" in found.log[0]


def test_another_users_entry_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    store.write("key", "text")
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with counted() as found:
        assert store.read("key") is None
    assert "another user's" in found.log[0]


def test_a_folder_that_cannot_be_written_is_told_and_does_not_stop_a_compilation(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with counted() as found:
        program = nd.compile(Mlp(), "tp=2", X, cache=tmp_path / "file")
    assert str(program) == str(nd.compile(Mlp(), "tp=2", X)) and "is not kept in" in found.log[-1]


def test_the_oldest_are_removed_where_there_are_too_many(tmp_path: Path) -> None:
    store = Store(tmp_path, largest=3000)
    for number in range(4):
        store.write(f"key{number}", "x" * 800)
        os.utime(tmp_path / f"key{number}.json", (number, number))
    assert store.read("key1") is not None, "it is used, and so the newest"
    store.write("key4", "x" * 800)
    assert [path.stem for path in entries(tmp_path)] == ["key1", "key3", "key4"]
    store.write("key5", "x" * 9000)
    assert [path.stem for path in entries(tmp_path)] == ["key5"], "what was just written stays"


def test_files_that_were_never_finished_are_removed(tmp_path: Path) -> None:
    old, new = tmp_path / "a.unfinished", tmp_path / "b.unfinished"
    for path in (old, new):
        path.write_text("half")
    os.utime(old, (0, 0))
    Store(tmp_path).write("key", "text")
    assert not old.exists() and new.exists()


def write_many(folder: str) -> None:
    for number in range(100):
        Store(Path(folder)).write("key", f"text {number % 3}" * 20000)


def test_readers_see_whole_entries_while_others_write(tmp_path: Path) -> None:
    writers = [multiprocessing.get_context("fork").Process(target=write_many, args=(str(tmp_path),)) for _ in range(2)]
    for writer in writers:
        writer.start()
    seen = set()
    with counted() as found:
        while any(writer.is_alive() for writer in writers):
            seen.add(Store(tmp_path).read("key"))
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert not found.log and seen <= {None, *(f"text {number}" * 20000 for number in range(3))} and len(seen) > 1
    assert [path.name for path in tmp_path.iterdir()] == ["key.json"]


def test_of_those_that_miss_at_once_one_compiles(tmp_path: Path) -> None:
    store, inside, most = Store(tmp_path), [0], [0]

    def enter(_: int) -> None:
        with store.alone("key"):
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            time.sleep(0.02)
            inside[0] -= 1

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(enter, range(8)))
    assert most == [1]


@pytest.mark.parametrize("asked", ["off", "", None])
def test_nothing_is_kept_unless_asked(asked: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NDCOMPILE_CACHE", raising=False)
    assert store_of(asked) is None


def test_the_folder_is_what_the_argument_says_and_else_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NDCOMPILE_CACHE", "from_environment")
    monkeypatch.setenv("XDG_CACHE_HOME", "of_the_user")
    assert store_of(None) == Store(Path("from_environment")) and store_of("off") is None
    assert store_of("on") == Store(Path("of_the_user/ndcompile")) and store_of(Path("here")) == Store(Path("here"))
    monkeypatch.setenv("NDCOMPILE_CACHE", "off")
    assert store_of(None) is None


def test_a_dump_is_of_a_compilation(tmp_path: Path) -> None:
    nd.compile(Mlp(), "tp=2", X, cache=tmp_path / "kept")
    with counted() as found:
        nd.compile(Mlp(), "tp=2", X, cache=tmp_path / "kept", dump=tmp_path / "dump")
    assert found.captures == 1 and len(list((tmp_path / "dump").iterdir())) > 5


PROGRAMS = {
    "stack": (lambda: Stack(3), tokens(), "dp_shard=2, tp=2"),
    "llama": (llama, None, "dp_replicate=2, dp_shard=2, cp=2, tp=2"),
    "llama on a cut axis": (llama, None, "tp=4"),
    "one device": (Mlp, X, ""),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_read_as_it_was_written(name: str) -> None:
    make, example, mesh = PROGRAMS[name]
    program = nd.compile(make(), mesh, example)  # type: ignore[operator]
    text = form.written(program)
    assert text is not None
    kept = form.read(text)
    assert (kept.source, kept.mesh, kept.parameters) == (program.source, program.mesh, program.parameters)
    assert kept.manifest.to_json() == program.manifest.to_json()
    assert kept.manifest.output_spec == program.manifest.output_spec


class Pair:
    """Results of a class that torch cannot name."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self.a, self.b = a, b


torch.utils._pytree.register_pytree_node(Pair, lambda pair: ([pair.a, pair.b], None), lambda leaves, _: Pair(*leaves))


class GivesPair(nn.Module):
    def forward(self, x: torch.Tensor) -> Pair:
        return Pair(x * 2, x + 1)


class HasDefault(nn.Module):
    def forward(self, x: torch.Tensor, sizes: tuple[int, ...] = (1, 2)) -> torch.Tensor:
        return x * sizes[1]


@pytest.mark.parametrize("model", [GivesPair(), HasDefault()], ids=lambda model: type(model).__name__)
def test_what_json_cannot_hold_is_not_kept_and_told(model: nn.Module, tmp_path: Path) -> None:
    for _ in range(2):
        with counted() as found:
            nd.compile(model, "dp_shard=2", X, cache=tmp_path)
        assert found.captures == 1 and form.WHY_NOT in found.log[0]
    assert entries(tmp_path) == []


def test_graphs_of_a_model_that_was_changed_since_are_refused(tmp_path: Path) -> None:
    nd.compile(Mlp(), "tp=2", X, cache=tmp_path)
    model = Mlp()
    program = nd.compile(model, "tp=2", X, cache=tmp_path)
    model.up = nn.Linear(12, 20, bias=False)
    with pytest.raises(nd.CompileError) as caught:
        program.collectives()
    assert str(caught.value) == (
        "the program of Mlp cannot be made again\n"
        "  why     its graphs are not kept with its text, and the model was changed since\n"
        "  try     ask for graphs before the model is changed\n"
        "  try     nd.compile again, with cache='off'"
    )


def test_graphs_are_those_of_the_mode_that_was_compiled(tmp_path: Path) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(12, 12), nn.Dropout(0.5))

    nd.compile(model(), "tp=2", X, cache=tmp_path)
    held = model()
    program = nd.compile(held, "tp=2", X, cache=tmp_path)
    held.eval()
    assert "dropout" in str(program.graph.graph) and not held.training


def test_the_key_is_not_asked_for_where_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.cache.test_key import asked

    monkeypatch.setattr("ndcompile.cache.kept.key_or_why", None)
    assert "Mlp on tp=2" in str(program_of(asked(Mlp(), example=X)))
