"""What backward recomputes and which gathered weights stay is in the text; another wish is refused."""

from __future__ import annotations

from typing import Any

import pytest

import ndcompile as nd
from ndcompile.errors import CompileError
from ndcompile.passes.mark_recomputed import MADE_BY, made_in
from ndcompile.program import Program
from ndcompile.runtime import private
from ndcompile.runtime.remat import SAVABLE
from tests.models import Mlp, Stack, llama, seeded, tokens


def stack(depth: int = 3, mesh: str = "dp_shard=2, tp=2", **options: Any) -> Program:
    return nd.compile(seeded(Stack, depth), mesh, tokens(), **options)


def lines(program: Program, *words: str) -> list[str]:
    return [line.strip() for line in str(program).splitlines() if any(word in line for word in words)]


def test_without_a_wish_nothing_is_recomputed_and_weights_are_gathered_again() -> None:
    assert lines(stack(), "recomputed", "reshard") == []
    assert str(stack()) == str(stack(remat="none", reshard_after_forward=True))


def test_a_recomputed_block_says_so_over_its_compute() -> None:
    assert lines(stack(remat="block"), "@", "def ")[:4] == [
        "def forward(self, x):", "@staticmethod", "@recomputed", "def compute(w, x):",
    ]  # fmt: skip
    (saving,) = lines(stack(remat=("reduce_scatter", "linear")), "@recomputed")
    assert saving == '@recomputed(save=("linear", "reduce_scatter"))'
    assert lines(stack(remat="linear"), "@recomputed") == ['@recomputed(save=("linear",))']


def test_the_rest_of_the_text_is_as_without() -> None:
    kept = str(stack(remat="block")).replace("    @recomputed\n", "").replace(" recomputed,", "")
    assert kept.splitlines()[12:] == str(stack()).splitlines()[12:]


def test_weights_that_stay_are_where_they_are_gathered() -> None:
    assert lines(stack(reshard_after_forward=False), "self.gathered") == [
        "with self.gathered(reshard=False) as w:",
        'with self.gathered("begin", reshard=False) as w:',
        'with self.gathered("end", reshard=False) as w:',
    ]
    assert lines(stack(reshard_after_forward={"layers.*": True, "": False}), "self.gathered") == [
        "with self.gathered() as w:",
        'with self.gathered("begin", reshard=False) as w:',
        'with self.gathered("end", reshard=False) as w:',
    ]


def test_a_choice_for_some_blocks_makes_kinds_of_their_own() -> None:
    program = stack(4, remat={"layers.[02]": "block"})
    assert lines(program, "class ", "@recomputed") == [
        "class Residual(Block):  # layers.0 … 2", "@recomputed", "class Residual2(Block):  # layers.1 … 3",
        "class Stack(Root):",
    ]  # fmt: skip
    later = stack(3, remat={"*": "block", "layers.2": "none"})
    assert lines(later, "class ", "@recomputed")[:3] == [
        "class Residual(Block):  # layers.0 … 1", "@recomputed", "class Residual2(Block):  # layers.2",
    ]  # fmt: skip


def test_names_of_results_are_those_of_ops_and_collectives() -> None:
    assert {*MADE_BY, *private.COLLECTIVES} == {*SAVABLE}
    assert made_in(stack().folded) == {"linear", "all_gather", "reduce_scatter"}
    assert made_in(nd.compile(llama(), "cp=2").folded) == {"linear", "attention", "all_gather"}


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        dict(remat="blok"),
        "remat='blok' is no option\n"
        "  why     'blok' is not what a result is saved under: linear, matmul, convolution, attention, all_gather, "
        "reduce_scatter, all_reduce, all_to_all\n"
        "  try     'none', 'block', or names such as ('linear', 'attention')",
    ),
    (
        dict(remat=("linaer",)),
        "remat=('linaer',) is no option\n"
        "  why     'linaer' is not what a result is saved under: linear, matmul, convolution, attention, all_gather, "
        "reduce_scatter, all_reduce, all_to_all\n"
        "  try     'linear' for 'linaer'\n"
        "  try     'none', 'block', or names such as ('linear', 'attention')",
    ),
    (
        dict(remat=("linear", "attention")),
        "remat saves 'attention', but no recomputed block has such a result\n"
        "  why     saved results are told by the ops that make them\n"
        "  try     remat without 'attention'",
    ),
    (
        dict(remat={"layer.*": "block"}),
        "remat names 'layer.*', which is no block\n"
        "  why     a block is a child of an nn.ModuleList\n"
        "  try     'layers.2'\n"
        "  try     'layers.1'",
    ),
    (
        dict(reshard_after_forward="no"),
        "reshard_after_forward='no' is no option\n"
        "  why     gathered weights are given back after forward, or kept until backward\n"
        "  try     True\n"
        "  try     False",
    ),
]


@pytest.mark.parametrize("options, text", REFUSED, ids=lambda value: str(value) if isinstance(value, dict) else "")
def test_another_wish_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(CompileError) as caught:
        stack(**options)
    assert str(caught.value) == text


def test_a_model_without_blocks_has_nothing_to_recompute() -> None:
    with pytest.raises(CompileError) as caught:
        nd.compile(Mlp(), "tp=2", {"x": tokens()["ids"].float().expand(12, 4, 8).reshape(-1, 12)}, remat="block")
    assert str(caught.value) == (
        "remat: the model has no blocks\n"
        "  why     a block is a child of an nn.ModuleList\n"
        "  try     an nn.ModuleList of the modules that are to be recomputed"
    )
