"""`nd.verify`: right programs are equal in exact arithmetic, and a planted bug is found and told where it is."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import ndcompile as nd
from ndcompile.verify.report import Report
from tests.equivalence.hf import MODELS
from tests.equivalence.zoo import ALL

RIGHT = [
    ("mlp", "tp=2"), ("mlp", "dp_shard=3"), ("gpt with dropout", "dp_shard=2, tp=2"), ("llama", "tp=2"),
    ("fused attention", "tp=3"), ("pooled", "dp_replicate=2, tp=2"), ("shared block", "dp_shard=2, tp=3"),
    ("gated", "dp_shard=2, tp=2"), ("towers", "dp_replicate=2, dp_shard=2"),
    ("Mixtral, balanced", "dp_shard=2"), ("BERT, padded", "tp=2"), ("remembers", "dp_shard=2, tp=2"),
    ("convolution in 1d", "dp_shard=2"), ("group norm", "dp_shard=2"), ("nn.GRU", "dp_shard=2"),
    ("MPNet", "tp=2"),
]  # fmt: skip


@cache
def compiled(model: str, mesh: str) -> tuple[nd.Program, torch.nn.Module]:
    torch.set_num_threads(1)
    made, batch = (ALL | MODELS)[model](8)
    return nd.compile(made, mesh, batch), made


def verified(model: str, mesh: str, old: str = "", new: str = "") -> Report:
    """The report on a program, or on its text with `old` replaced by `new`, where it stands first."""
    program, made = compiled(model, mesh)
    text = str(program)
    assert old in text, text
    return nd.verify(program, made, seeds=1, microbatches=1 + (not old), source=text.replace(old, new, 1))


@pytest.mark.parametrize("model, mesh", RIGHT)
def test_right_programs_are_equal_in_the_field_and_in_float64(model: str, mesh: str) -> None:
    report = verified(model, mesh)
    assert [claim.held for claim in report.claims] == [True] * 4, report
    assert report and not report.differences and not report.begins


BIAS = 'mlp_norm_bias=weight("mlp_norm.bias", gather={"dp_shard": 0}'
BUGS = {
    "a norm's gradient is not summed under sequence parallel": (
        f'{BIAS}, reduce=("tp",))', f"{BIAS})",
        "'blocks.0.mlp_norm.bias': its uses get the right gradients, which are then not added right over ranks",
    ),
    "a bias is added once a rank": (
        "partial_invariant(w.m2_bias, tp)", "w.m2_bias", "%partial_invariant_1 = runtime.partial_invariant",
    ),
    "ranks' losses are not added": (
        "loss = all_reduce_invariant(loss, dp_shard)", "loss = loss", "%all_reduce_invariant",
    ),
    "a local count of tokens": ("total_2 = all_reduce(total_2, dp_shard)", "total_2 = total_2", "%all_reduce"),
    "a gradient is lost": (
        "F.gelu(mlp_0)", "F.gelu(mlp_0.detach()) + mlp_0 * 0", "aten.linear.default   blocks.1.mlp.0",
    ),
    "a value is reduced twice": (
        "mlp_2 = reduce_scatter(mlp_2, tp, dim=1)", "mlp_2 = reduce_scatter(all_reduce(mlp_2, tp), tp, dim=1)",
        "%reduce_scatter_",
    ),
    "padding counts": ("cut_2 != -100", "cut_2 != -101", "%ne"),
    "a collective that one rank alone comes to": (
        "total_2 = all_reduce(total_2, dp_shard)", "total_2 = all_reduce(total_2, dp_shard) if tp.index else total_2",
        "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_found_in_the_text_and_told_where(bug: str) -> None:
    old, new, place = BUGS[bug]
    report = verified("gpt", "dp_shard=2, tp=2", old, new)
    assert [claim.held for claim in report.claims] == [True, False, False, True], report
    assert not report and report.differences
    assert place in report.begins, report


NORM_BUGS = {
    "a variance of the rank's own samples": ("total_2 = all_reduce(total_2, dp_shard)", "total_2 = total_2"),
    "another running mean, which no result shows": ("moving_average(running_mean, mean, 0.1)", "running_mean * 0.9"),
}


@pytest.mark.parametrize("bug", NORM_BUGS)
def test_statistics_that_are_wrong_are_found(bug: str) -> None:
    report = verified("convolution in 1d", "dp_shard=2", *NORM_BUGS[bug])
    assert [claim.held for claim in report.claims] == [True, False, False, True], report
    assert report.begins, report


class Positions(torch.nn.Module):
    """Places by a buffer, as BERT's."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = torch.nn.Embedding(16, 8), torch.nn.Linear(8, 8)
        self.register_buffer("places", torch.arange(16).flip(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x + self.table(self.places[: x.size(1)]))


def test_a_program_keeps_the_whole_numbers_that_buffers_hold() -> None:
    program = nd.compile(Positions(), "dp_shard=2", torch.zeros(4, 8, 8))
    assert nd.verify(program, seeds=1)


def test_whole_numbers_that_were_not_known_are_asked_for() -> None:
    program = nd.compile(Positions().to("meta"), "dp_shard=2", torch.zeros(4, 8, 8))
    with pytest.raises(nd.CompileError, match=r"the values of buffer 'places'(.|\n)*nd.verify\(program, model\)"):
        nd.verify(program, seeds=1)
    assert nd.verify(program, Positions(), seeds=1)
