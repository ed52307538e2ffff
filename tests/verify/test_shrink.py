"""A large program is verified with the text that it has, at small sizes, on a small mesh, with few blocks."""

from __future__ import annotations

import difflib
import itertools
import re
import time
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ndcompile as nd
from ndcompile.codegen import made_sizes
from ndcompile.program import Program
from ndcompile.verify import cases
from ndcompile.verify.execute import round_trip
from ndcompile.verify.shrink import shrink
from tests.equivalence.registry import MODELS
from tests.test_large import llama, of_405b


def changed_lines(one: str, two: str) -> list[tuple[str, str]]:
    pairs = zip(one.splitlines(), two.splitlines(), strict=True)
    return [(a, b) for a, b in pairs if a != b]


def test_only_the_mesh_and_the_table_of_sizes_are_other_numbers() -> None:
    program, _ = of_405b()
    small = next(shrink(program))
    changed = changed_lines(program.source, small.source)
    (mesh, small_mesh), *table = changed
    assert mesh.startswith('MESH = current("dp_replicate=8, dp_shard=64, tp.0=8, tp.1=2"')
    assert small_mesh.startswith('MESH = current("dp_replicate=2, dp_shard=2, tp.0=2, tp.1=2"')
    assert [a.split(" = ")[0] for a, _ in table] == "heads head_dim vocab hidden ffn kv_heads n16".split()
    assert all(re.fullmatch(r"\w+ = \d+", line) for pair in table for line in pair)
    assert not list(difflib.context_diff([b for _, b in table], [f"{k} = {v}" for k, v in small.named.items()][:7]))


def test_sizes_keep_what_holds_between_them() -> None:
    program, _ = of_405b()
    for small in itertools.islice(shrink(program, {"tp.1": 3}), 5):
        at = small.named
        assert at["hidden"] == at["heads"] * at["head_dim"]
        assert at["heads"] == at["kv_heads"] * at["n16"]
        assert at["head_dim"] % 2 == 0 and at["kv_heads"] % 2 == 0 and at["heads"] % 6 == 0
        assert at["vocab"] % 6 == 0 and at["ffn"] % 6 == 0
        assert len({at[name] for name in ("heads", "head_dim", "vocab", "hidden", "ffn", "kv_heads")}) == 6
        kept = {name.split(".")[2] for name in small.parameters if ".layers." in name}
        assert kept == {"0", "1", "2"}


class Cut(nn.Module):
    """A width that is cut in pieces which are no parts of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(80, 67), nn.Linear(32, 80)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, gates = self.layer(x).split([32, 32, 3], -1)
        return self.head(a * b) * gates.sum(-1, keepdim=True)


def test_pieces_that_are_no_parts_of_a_width_make_it_up() -> None:
    model = Cut()
    program = nd.compile(model, "dp_shard=4", torch.ones(8, 80))
    for small in itertools.islice(shrink(program), 3):
        assert small.named["n67"] == 67 and small.named["n80"] < 80
        assert small.renumbered(program.source) == small.source


def test_405b_on_8192_ranks_is_equal_to_one_device_in_a_prime_field() -> None:
    """One seed here, on 16 ranks. CPU seconds of this process; the bar is 120 for all of it."""
    program, _ = of_405b()
    begin = time.process_time()
    report = nd.verify(program, seeds=1, microbatches=1)
    assert report.equal, str(report)
    claims = {claim.kind: claim for claim in report.claims}
    assert [*claims] == ["proved (types)", "same ops", "equal over F_p", "tested (float64)"]
    assert all(claim.held for claim in report.claims)
    assert "16 ranks" in claims["equal over F_p"].evidence[0] and "without 123 blocks" in report.sizes[0]
    assert time.process_time() - begin < 60


def test_heads_that_an_axis_fills_stay_so() -> None:
    """4 heads of keys on tp.0=4, their copies on tp.1=2: a rank has one head, and a part of its copies."""
    program = nd.compile(MODELS["llama"](8)[0], "dp_shard=32, tp=8")
    assert "tp.0=4, tp.1=2" in str(program.mesh)
    for ranks in ({}, {"tp.1": 3}):
        small = next(shrink(program, ranks))
        assert small.named["kv_heads"] == small.mesh.size("tp.0") and small.named["heads"] > 4
    assert nd.verify(program, seeds=1, microbatches=1).equal


def test_context_that_many_ranks_share_is_verified_on_two() -> None:
    program = nd.compile(MODELS["llama"](8)[0], "dp_shard=16, cp=16")
    report = nd.verify(program, seeds=1, microbatches=1)
    assert report.equal and "dp_shard=2, cp=2" in report.sizes[0]


BUGS = {
    "a norm's gradient is not summed over tp": ('reduce=("tp",)', ""),
    "the sequence is gathered along another dim": ("all_gather(mul_4, tp, dim=1)", "all_gather(mul_4, tp, dim=0)"),
    "a reduction is dropped": ("reduce_scatter(o_proj, tp, dim=1)", "o_proj.chunk(tp.size, 1)[tp.index]"),
    "a rank counts its own tokens": ("total_2 = all_reduce(total_2, dp_shard)", "total_2 = total_2 * dp_shard.size"),
}


@cache
def of_8b() -> Program:
    return nd.compile(llama(32, 4096, 14_336, 32), "dp_shard=32, tp=8")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] if number else []) for number, name in enumerate(BUGS)]
)
def test_a_bug_in_a_large_programs_text_is_found_at_small_sizes(name: str) -> None:
    program = of_8b()
    right, wrong = BUGS[name]
    assert right in program.source
    report = nd.verify(program, seeds=1, microbatches=1, source=program.source.replace(right, wrong))
    assert not report.equal and report.differences
    line = next(line.partition("  #")[0].strip() for line in program.source.splitlines() if right in line)
    assert line.replace(right, wrong).rstrip() in report.begins


class Literal(nn.Module):
    """Cut at a place that is no part of a size."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(40, 1750), nn.Linear(1000, 2000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(self.up(x)[:, 700:1700].relu())
        return y


def test_a_number_in_the_text_keeps_its_size() -> None:
    program = nd.compile(Literal(), "tp=2", torch.zeros(4, 40))
    small = next(shrink(program))
    assert small.parameters["down.weight"].shape[1] == 1000
    assert nd.verify(program, seeds=1, microbatches=1).equal


def test_the_text_for_one_device_does_the_ops_of_the_reference_graph() -> None:
    small = next(shrink(of_8b()))
    count, differs = round_trip(small, {"b": 4, "s": 6})
    assert count > 150 and not differs


@pytest.mark.parametrize(
    ("right", "wrong", "told"),
    [
        ("mean + 1e-06", "mean + 1e-05", "add.Tensor"),
        ("torch.cat((neg, cut), -1)", "torch.cat((cut, neg), -1)", "cat.default"),
        ("mul_2 = cos * 1.0", "mul_2 = cos * 1.0 * 1.0", "in the text alone"),
        ("k_proj = k_proj.transpose(1, 2)", "k_proj = k_proj.transpose(1, 2).transpose(0, 2).transpose(0, 2)", ""),
        ("x = x + down_proj", "x = x + down_proj + 0", "in the text alone"),
    ],
)
def test_a_text_that_does_other_ops_is_noticed(right: str, wrong: str, told: str) -> None:
    """But not one that comes by the same views in another way."""
    small = next(shrink(of_8b()))
    assert right in small.large_text
    small.large_text = small.large_text.replace(right, wrong)
    _, differs = round_trip(small, {"b": 4, "s": 6})
    assert (told in differs and differs) if told else not differs


class Separable(nn.Module):
    """A convolution within each channel, whose groups are a number in the text, and a norm that remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 40, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(40)
        self.within, self.across = nn.Conv2d(40, 40, 3, padding=1, groups=40), nn.Conv2d(40, 48, 1)
        self.head = nn.Linear(48 * 16, 3000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.across(self.within(self.norm(self.first(x)))).relu().flatten(1))
        return y


def test_convolutions_in_groups_and_what_a_forward_writes_at_small_sizes() -> None:
    program = nd.compile(Separable(), "dp_shard=2", torch.zeros(4, 3, 8, 8))
    report = nd.verify(program, seeds=1, microbatches=1)
    assert report.equal, report
    assert [claim.kind for claim in report.claims][1] == "same ops" and "n40 = 40" in report.sizes[0]
    assert "n3000 = 3000" not in report.sizes[0]
    forgets = program.source.replace("1e-05)", "1e-05).detach()", 1)
    assert forgets != program.source and not nd.verify(program, seeds=1, microbatches=1, source=forgets).equal


class Placed(nn.Module):
    """Two tables, of ids and of places."""

    places: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.rows, self.mix = nn.Embedding(61, 12), nn.Embedding(40, 12), nn.Linear(12, 12)
        self.register_buffer("places", torch.arange(40)[None])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.mix(self.tokens(ids) + self.rows(self.places[:, : ids.shape[1]]))
        return y


@pytest.mark.parametrize("mesh", ["dp_shard=2", "cp=2"])
def test_a_table_of_ids_is_called_so_though_ids_are_converted_before(mesh: str) -> None:
    program = nd.compile(Placed(), mesh, torch.zeros(4, 8, dtype=torch.long))
    small = next(shrink(program))
    assert list(small.named) == list(program.made.emitted.sizes.table)
    assert {"vocab": 61, "positions": 40}.items() <= program.made.emitted.sizes.table.items()


class Resized(nn.Module):
    """Planes that are padded, pooled, resized, cut in windows and put together; places that are numbers in the text."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 36, 3, padding="same"), nn.GroupNorm(6, 36)
        self.up = nn.ConvTranspose2d(36, 36, 3, stride=2, padding=1, output_padding=1, groups=2)
        self.places, self.head = nn.Embedding(40, 36), nn.Linear(36 * 20, 3000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = self.places(torch.arange(3, 35, device=x.device)).mean(0)
        x = self.norm(self.first(x)) + places[:, None, None]
        x = F.max_pool2d(F.pad(x, (0, 1, 1, 0)), 3, stride=2)
        x = F.interpolate(self.up(x), scale_factor=1.5, mode="bilinear")
        x = F.fold(F.unfold(x, 3, stride=3), (12, 12), 3, stride=3)
        x = F.adaptive_avg_pool2d(x.unfold(3, 3, 2).mean(-1), (4, 5))
        y: torch.Tensor = self.head(x.flatten(1))
        return y


def test_sizes_that_follow_from_numbers_in_the_text_stay_what_these_make() -> None:
    """Without what is known of any of these ops, none of the first sizes fits."""
    program = nd.compile(Resized(), "dp_shard=2", torch.zeros(4, 3, 8, 8))
    report = nd.verify(program, seeds=1, microbatches=1)
    assert [claim.held for claim in report.claims] == [True] * 4, report
    assert "n3000 = 3000" not in report.sizes[0]


def test_where_no_sizes_fit_the_error_says_which_programs_need_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made_sizes, "MADE", {})
    program = nd.compile(Resized(), "dp_shard=2", torch.zeros(4, 3, 8, 8))
    with pytest.raises(nd.CompileError, match="at most 2,000,000 parameters on at most 16 ranks"):
        nd.verify(program, seeds=1, microbatches=1)


class Rows(nn.Module):
    """Parts of each sample as rows, whose number is one of the batch and of a number: `100*b`."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(2000, 1200), nn.Linear(12, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(self.up(x).reshape(-1, 12))
        return y


def test_a_number_beside_a_symbol_keeps_its_size() -> None:
    program = nd.compile(Rows(), "dp_shard=2", torch.zeros(4, 2000))
    assert "reshape(100*b, n12)" in str(program)
    report = nd.verify(program, seeds=1, microbatches=1)
    assert report.equal and "n2000 = 2000" not in report.sizes[0], report


@pytest.mark.parametrize("name", [
    "remembers", "residuals outside", "nn.LSTM, both ways, with dropout", "U-Net", "group norm", "GPT-NeoX", "Falcon",
    "Mamba", "ModernBERT", "DeBERTa-v2", "T5 with dropout", "GPT-OSS",
])  # fmt: skip
def test_what_models_of_other_kinds_have_is_the_same_at_small_sizes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers that are written, what the root does between blocks, gates, places that are numbers, images."""
    monkeypatch.setattr(cases, "ELEMENTS", 0)
    model, batch = MODELS[name](4)
    report = nd.verify(nd.compile(model, "dp_shard=2, tp=2", batch), model, seeds=1)
    assert report.equal and "same ops" in {claim.kind for claim in report.claims}, report


class Twice(nn.Module):
    """All of its layers, then those from the third on: the first run needs other blocks than the second."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 12)) for _ in range(9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        x = x * 2
        for layer in self.layers[4:]:
            x = x + layer(x)
        return x


def test_blocks_that_another_run_needs_stay_in_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "ELEMENTS", 0)
    program = nd.compile(Twice(), "dp_shard=2", torch.zeros(4, 12))
    report = nd.verify(program, seeds=1)
    assert report.equal and "without" in report.sizes[0], report
