"""What a model asks of the sizes of its inputs is a condition of the program; what torch asks for itself is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import ndcompile as nd
from ndcompile.program import Program
from ndcompile.rules.registry import op_name
from ndcompile.runtime.manifest import holds
from ndcompile.runtime.module import ParallelModule
from ndcompile.verify.sample import symbol_sizes
from tests.models import Chunked, seeded


class Asks(nn.Module):
    def __init__(self, way: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.way, self.linear = way, nn.Linear(6, 6)
        self.register_buffer("table", torch.randn(32, 6))

    table: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self.linear(x), self.table)


ASKED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], list[str]]] = {
    "nothing": (lambda y, table: y.flatten(1).sum(-1), []),
    "at most": (lambda y, table: y * 2 if y.shape[1] <= 16 else y * 3, ["s <= 16"]),
    "whole chunks": (lambda y, table: y * 2 if y.shape[1] % 4 == 0 else y * 3, ["s % 4 == 0"]),
    "another length": (lambda y, table: y * 2 if y.shape[1] != 20 else y * 3, ["s != 20"]),
    "two at once": (lambda y, table: y * 2 if y.shape[1] < 20 and y.shape[0] < 9 else y, ["s <= 19", "b <= 8"]),
    "both together": (lambda y, table: y * 2 if y.numel() < 600 else y * 3, ["6*b*s < 600"]),
    "a table that ends": (lambda y, table: y + table[: y.shape[1]], ["s <= 32"]),
    "what is cut off": (lambda y, table: y[:, 1:].flatten(0, 1), []),
}


@pytest.mark.parametrize("name", ASKED)
def test_answers_are_conditions(name: str) -> None:
    way, wanted = ASKED[name]
    program = nd.compile(Asks(way), "dp_shard=2", torch.zeros(4, 12, 6), dynamic_dims={"x": {0: "b", 1: "s"}})
    assert program.manifest.conditions == wanted


def test_what_a_library_asks_whose_name_begins_as_torchs_is_a_condition() -> None:
    """torchvision's files stand in a folder beside torch's."""
    held: dict[str, Any] = {}
    text = "def way(y, table):\n    return y * 2 if y.shape[1] != 20 else y * 3\n"
    exec(compile(text, f"{Path(torch.__file__).parent}vision/models.py", "exec"), held)
    program = nd.compile(Asks(held["way"]), "dp_shard=2", torch.zeros(4, 12, 6), dynamic_dims=LENGTHS)
    assert program.manifest.conditions == ["s != 20"]


def test_a_condition_is_looked_at_with_global_sizes() -> None:
    way, _ = ASKED["two at once"]
    program = nd.compile(Asks(way), "", torch.zeros(4, 12, 6), dynamic_dims={"x": {0: "b", 1: "s"}})
    program.manifest.check_ways({"b": 8, "s": 19})
    for sizes, named in (({"b": 9, "s": 19}, "b = 9"), ({"b": 8, "s": 20}, "s = 20")):
        with pytest.raises(ValueError, match=f"takes another way: {named}\n"):
            program.manifest.check_ways(sizes)


def test_a_condition_is_kept_with_a_saved_program() -> None:
    way, wanted = ASKED["at most"]
    program = nd.compile(Asks(way), "dp_shard=2", torch.zeros(4, 12, 6), dynamic_dims={"x": {0: "b", 1: "s"}})
    again = type(program.manifest).from_json(program.manifest.to_json())
    assert again.conditions == wanted


# ---- what a program is, where they hold ------------------------------------------------------------------------------

LENGTHS = {"x": {0: "b", 1: "s"}}


def test_the_head_of_a_text_says_where_it_holds() -> None:
    program = nd.compile(Asks(ASKED["two at once"][0]), "dp_shard=2", torch.zeros(4, 12, 6), dynamic_dims=LENGTHS)
    head = '"""Asks on dp_shard=2: emitted by ndcompile.\n\nIt holds while s <= 19, b <= 8."""\n'
    assert str(program).startswith(head)
    program = nd.compile(Asks(ASKED["nothing"][0]), "dp_shard=2", torch.zeros(4, 12, 6), dynamic_dims=LENGTHS)
    assert str(program).startswith('"""Asks on dp_shard=2: emitted by ndcompile."""\n')


def of_chunks(program: Program) -> list[fx.Node]:
    return [n for n in program.graph.graph.nodes if n.meta.get("layout") and len(n.meta["sizes"]) == 5]


@pytest.mark.parametrize("mesh", ["dp_shard=2", "tp=2", "dp_shard=2, tp=2", "cp=2", "dp_shard=2, cp=2", "cp=2, tp=8"])
def test_what_is_padded_by_nothing_is_as_long_as_it_was(mesh: str) -> None:
    """Whatever the example's length, of whole chunks: the program is for all of them."""
    for length in (16, 24):
        model = seeded(Chunked)
        program = nd.compile(model, mesh, torch.zeros(4, length, 12), dynamic_dims=LENGTHS)
        assert program.manifest.conditions == ["s % 8 == 0"]
        report = nd.verify(program, model, seeds=1)
        assert report.equal and all(claim.held for claim in report.claims), str(report)


def test_lengths_with_pads_are_another_program() -> None:
    model = seeded(Chunked)
    program = nd.compile(model, "dp_shard=2", torch.zeros(4, 13, 12), dynamic_dims=LENGTHS)
    assert [n for n in range(4, 26) if all(holds(text, {"s": n}) for text in program.manifest.conditions)] == [
        n for n in range(4, 26) if n % 8
    ]
    assert nd.verify(program, model, seeds=1).equal


def test_the_last_dim_of_chunks_is_sharded_beside_them() -> None:
    """A length is a multiple of its chunks, so a reshape into them keeps the factors behind it."""
    program = nd.compile(seeded(Chunked), "dp_shard=2, tp=2", torch.zeros(4, 16, 12), dynamic_dims=LENGTHS)
    layouts = [
        n.meta["layout"] for n in program.graph.graph.nodes if n.meta.get("layout") and len(n.meta["sizes"]) == 5
    ]
    assert layouts and any("tp" in axes for layout in layouts for axes in layout.dims)


def test_a_dim_of_chunks_that_an_axis_cuts_is_one_that_divides() -> None:
    """2 ranks share 4 parts of a sequence, of whole chunks."""
    program = nd.compile(seeded(Chunked), "cp=2", torch.zeros(4, 16, 12), dynamic_dims=LENGTHS)
    cut = [node for node in of_chunks(program) if "cp" in node.meta["layout"].dims[1]]
    assert cut and program.manifest.multiples["s"]["cp"] == 32


def test_a_minimum_of_lengths_is_computed_from_them() -> None:
    """Nothing is asked, so all lengths do."""

    def best(y: Tensor, table: Tensor) -> Tensor:
        count = torch.sym_min(7, y.shape[1] // 2)
        kept = y.topk(count, 1).values.clone()
        kept[:, :, 0] = 2.0
        return kept.mean(1)

    model = Asks(best)
    program = nd.compile(model, "dp_shard=2, tp=2", torch.zeros(4, 12, 6), dynamic_dims=LENGTHS)
    assert program.manifest.conditions == [] and "min(7, (s//2))" in str(program)
    assert nd.verify(program, model, seeds=1).equal


def test_an_identity_is_made_of_a_length() -> None:
    model = Asks(lambda y, table: torch.eye(y.shape[1]) @ y + torch.eye(y.shape[1], 6).sum(-1, keepdim=True))
    for mesh in ("dp_shard=2", "tp=2"):
        program = nd.compile(model, mesh, torch.zeros(4, 12, 6), dynamic_dims=LENGTHS)
        assert "eye.default" in " ".join(op_name(n.target) for n in program.graph.graph.nodes)
        assert nd.verify(program, model, seeds=1).equal


def test_a_call_without_conditions_looks_at_no_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []

    def sizes(*of: object) -> dict[str, int]:
        looked.append("sizes")
        return {"b": 1, "s": 1}

    monkeypatch.setattr(ParallelModule, "_sizes", sizes)
    for way, times in (("nothing", 0), ("at most", 1)):
        looked.clear()
        program = nd.compile(Asks(ASKED[way][0]), "", torch.zeros(4, 12, 6), dynamic_dims=LENGTHS)
        module = ParallelModule.__new__(ParallelModule)
        for check in ("_refuse_changes", "_refuse_gradients"):
            monkeypatch.setattr(ParallelModule, check, lambda *_: None)
        module._accept(program.manifest, (torch.zeros(4, 12, 6),), {})
        assert len(looked) == times


def test_verify_takes_lengths_for_which_a_program_holds() -> None:
    """The shortest from 6 on that all axes divide, or else a shorter one."""

    def lengths(mesh: str, *asked: str) -> dict[str, int]:
        ids = {"x": torch.zeros(4, 8, dtype=torch.long), "y": torch.zeros(4, 6, dtype=torch.long)}
        program = nd.compile(Two(), mesh, ids)
        program.manifest.conditions = list(asked)
        return symbol_sizes(program)

    assert lengths("dp_shard=2") == {"b": 6, "s": 6, "t": 7}
    assert lengths("dp_shard=2", "s % 8 == 0", "b > 100") == {"b": 6, "s": 8, "t": 7}
    assert lengths("cp=2", "s % 3 == 0", "t >= 20") == {"b": 3, "s": 12, "t": 20}
    assert lengths("dp_shard=2", "s == 3", "s + t == 7") == {"b": 6, "s": 3, "t": 4}
    with pytest.raises(nd.CompileError, match=r"no lengths up to 8192 were found for which the program holds\n.*s < 0"):
        lengths("dp_shard=2", "s < 0")


class Two(nn.Module):
    """Two sequences of lengths of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.tokens(x).sum(1) + self.tokens(y).sum(1)


def test_a_division_of_sizes_is_a_size() -> None:
    """As Longformer cuts its chunks; by itself it is a tensor, which would be read."""

    def halves(x: Tensor, table: Tensor) -> Tensor:
        count: Any = torch.div(x.size(1), 2, rounding_mode="trunc")
        return x.view(x.size(0), count, 2, x.size(2)).sum(2).mean()

    model = Asks(halves)
    program = nd.compile(model, "dp_shard=2", torch.zeros(4, 16, 6), dynamic_dims={"x": {0: "b", 1: "s"}})
    assert "It holds while s % 2 == 0." in str(program)
    assert nd.verify(program, model, seeds=1).equal
