"""Planted bugs: every operator applies somewhere, and verify sees all mutants that are not equivalent."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import ndcompile as nd
from ndcompile.errors import CheckError
from ndcompile.runtime import private
from ndcompile.verify import execute
from ndcompile.verify.field import Field
from ndcompile.verify.graph_mutants import graph_mutants
from ndcompile.verify.lockstep import RanksDisagree
from ndcompile.verify.mutants import CALLS, OPERATORS, ORDERS, REPLACED, Mutant, mutants
from ndcompile.verify.reorder import HERE
from ndcompile.verify.rule_mutants import RuleMutant
from ndcompile.verify.sample import draw, numbers_of
from ndcompile.verify.score import Judge, score
from tests.equivalence.compare import Case, make

ALL = {
    "mlp": "dp_shard=2, tp=2", "fused attention": "tp=3", "shared block": "tp=2",
    "gpt with dropout": "dp_replicate=2, dp_shard=2, tp=2", "llama": "dp_shard=2, cp=2",
    "windows, causal": "cp=2", "gpt": "tp=2", "cycles": "dp_shard=2",
}  # fmt: skip


RECOMPUTED: dict[str, tuple[str, ...]] = {"gpt with dropout": ("linear",)}
"""What is saved of the blocks of these models, of which backward recomputes the rest."""


HALVED = ("gpt",)
"""Models of which blocks compute two halves of their batch in turn."""


@cache
def judge(model: str, mesh: str) -> Judge:
    torch.set_num_threads(1)
    made, batch = make(Case(model, mesh))
    remat, halves = RECOMPUTED.get(model), model in HALVED
    return Judge(nd.compile(made, mesh, batch, float64=True, remat=remat, halves=halves), made)


def all_mutants(model: str, mesh: str) -> list[Mutant]:
    program = judge(model, mesh).program
    return list(mutants(str(program), program.mesh))


def test_every_operator_applies_somewhere() -> None:
    applied = {mutant.operator for model, mesh in ALL.items() for mutant in all_mutants(model, mesh)}
    assert applied == {*OPERATORS, *REPLACED, *ORDERS, *CALLS}


def test_every_operator_is_on_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "verification.md").read_text()
    assert [operator for operator in (*OPERATORS, *REPLACED, *ORDERS, *CALLS) if operator not in page] == []


@pytest.mark.parametrize("model, mesh, first, every", [
    ("mlp", "dp_shard=2, tp=2", 0, 1), ("fused attention", "tp=3", 0, 4), ("shared block", "tp=2", 0, 4),
    pytest.param("llama", "dp_shard=2, cp=2", 1, 7, marks=pytest.mark.full), ("windows, causal", "cp=2", 0, 3),
])  # fmt: skip
def test_all_mutants_that_are_not_equivalent_are_seen(model: str, mesh: str, first: int, every: int) -> None:
    found = score(judge(model, mesh), all_mutants(model, mesh)[first::every])
    assert found.score == 1.0, [str(m) for m, verdict in found.unseen if verdict == "alive"]
    assert found.total["field"] > found.total["equivalent"]


def test_bugs_in_what_backward_recomputes_are_seen() -> None:
    planted = all_mutants("gpt with dropout", "dp_shard=2, tp=2")
    wrong = [m for m in planted if m.operator == "backward recomputes from other values"]
    found = score(judge("gpt with dropout", "dp_shard=2, tp=2"), [*wrong, *planted[7::40]])
    assert found.score == 1.0, [str(m) for m, verdict in found.unseen if verdict == "alive"]
    assert len(wrong) == 1 and not [m for m, _ in found.unseen if m in wrong]


def test_bugs_in_halves_are_seen() -> None:
    planted = all_mutants("gpt", "tp=2")
    own = [m for m in planted if m.operator == "one half of a batch used twice" or "unwaited_half" in m.after]
    found = score(judge("gpt", "tp=2"), [*own, *planted[5::30]])
    assert found.score == 1.0, [str(m) for m, verdict in found.unseen if verdict == "alive"]
    assert len(own) > 3 and not [str(m) for m, _ in found.unseen if m in own]


@pytest.mark.parametrize("model, mesh", [*list(ALL.items())[:3], ("gated", "dp_replicate=2, dp_shard=2")])
def test_every_wrong_conversion_in_a_graph_is_seen_by_the_types(model: str, mesh: str) -> None:
    found = score(judge(model, mesh), graph_mutants(judge(model, mesh).program))
    assert found.total["types"] == sum(found.total.values()) > 5, list(map(str, found.unseen))


class SameRows(nn.Module):
    """Adds a number to each sample, the same one to all."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.up(x) + torch.arange(x.shape[0], device=x.device).clamp(max=0).unsqueeze(1)
        return y


@pytest.mark.parametrize("mesh", ["dp_replicate=2, dp_shard=2", "dp_shard=2", "dp_replicate=2, dp_shard=3"])
def test_a_count_without_the_ranks_of_an_axis_leaves_no_single_sample(mesh: str) -> None:
    """One sample would broadcast to the others, so that nothing would be wrong."""
    program = nd.compile(SameRows(), mesh, torch.zeros(12, 6), float64=True)
    counts = [m for m in mutants(str(program), program.mesh) if m.operator == "a local count for a global one"]
    assert counts and {Judge(program)(mutant) for mutant in counts} == {"does not run"}


def test_tokens_are_masked_where_a_model_looks() -> None:
    """Of the first sample's labels a causal model drops the first: another must be masked too."""
    padding = [m for m in all_mutants("gpt", "tp=2") if m.operator == "padding counted"]
    assert [judge("gpt", "tp=2")(mutant) for mutant in padding] == ["field"]


def test_a_cast_before_a_reduction_shows_in_float64_alone() -> None:
    low = [m for m in all_mutants("mlp", "dp_shard=2, tp=2") if m.operator == "cast down before a reduction"]
    assert [judge("mlp", "dp_shard=2, tp=2")(mutant) for mutant in low] == ["float64"] * len(low) and low


def test_a_norm_that_counts_replicas_or_one_rank_only_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    own = judge("mlp", "dp_shard=2, tp=2")

    def of_one_rank(gradients, program, rank):
        return execute._norm(gradients)

    def of_replicas(gradients, program, rank):
        total = execute._norm(gradients).square()
        for axis in program.mesh.names:
            total = private.wait(private.start_all_reduce(total, "sum", axis))
        return total.sqrt()

    for wrong in (of_one_rank, of_replicas):
        monkeypatch.setattr(execute, "_sharded_norm", wrong)
        report = nd.verify(own.program, own.model, seeds=1, microbatches=1)
        assert report.differences[0].startswith("step 0: gradient norm")


def test_a_rank_whose_collectives_come_in_another_order_is_named() -> None:
    """On real ranks it would wait for the others for ever."""
    own = judge("fused attention", "tp=3")
    (wrong,) = [m for m in all_mutants("fused attention", "tp=3") if m.operator == HERE]
    (right,) = [line for line in str(own.program).splitlines() if wrong.after in line]
    assert "all_gather" in right
    with pytest.raises(RanksDisagree, match=r"rank \d is in all_gather_into_tensor\(tp\) of .* but rank \d is in "):
        trial = own._of("quick")[0]
        execute.on_ranks(own.program, trial.sample, trial.domain, wrong.source)


class RowWise:
    """An optimizer that divides each row of a gradient by the row's norm."""

    def __init__(self, parameters, eps):
        self.parameters = parameters

    def step(self, scale):
        for p in self.parameters.values():
            if p.grad is not None:
                p -= 0.01 * scale * p.grad / (p.grad * p.grad).sum(-1, keepdim=True).add(1).sqrt()
                p.grad = None


def test_an_optimizer_that_looks_at_rows_is_seen_where_rows_are_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    own = judge("mlp", "dp_shard=2, tp=2")
    monkeypatch.setattr(execute, "_FlatAdamW", RowWise)
    report = nd.verify(own.program, own.model, seeds=1, microbatches=1)
    assert [claim.held for claim in report.claims] == [True, False, False, True]
    assert "weight after it: another value on rank" in report.differences[0]


RULE_BUGS = {
    "the bias of a layer sharded on its own": (
        RuleMutant("a factor not tied to another tensor's", "aten.linear.default", "operand 2, n"), "does not run",
    ),
    "a product taken as a sum": (RuleMutant("a product taken as a sum", "aten.mul.Tensor", "term 0"), "another value"),
    "an output that is said to be sharded elsewhere": (
        RuleMutant("a wrong dim", "aten.gelu.default", "output, dims 0 and 1"), "does not run",
    ),
    "a sum over a shard called whole": (RuleMutant("a contraction's result called whole"), "types"),
}  # fmt: skip


@pytest.mark.parametrize("bug", RULE_BUGS)
def test_a_bug_in_a_rule_is_seen_in_a_program_that_uses_it(bug: str) -> None:
    """The types believe the wrong rule, as the compiler does; the text shows what it makes of it."""
    mutant, how = RULE_BUGS[bug]
    made, batch = make(Case("mlp", "dp_shard=2, tp=2"))
    with mutant.planted():
        try:
            program = nd.compile(made, "dp_shard=2, tp=2", batch, float64=True)
        except CheckError:
            assert how == "types"
        else:
            report = nd.verify(program, made, seeds=1, microbatches=1)
            assert report.claims[0].held and not report.equal, report
            assert how in report.differences[0]


def test_bugs_in_calls_of_blocks_are_seen() -> None:
    """A list that ends behind its last block, and two ways of a block that are one, are no bugs."""
    planted = [m for m in all_mutants("cycles", "dp_shard=2") if m.operator in CALLS]
    found = score(judge("cycles", "dp_shard=2"), planted)
    same = {(m.before, m.after) for m, verdict in found.unseen if verdict == "equivalent"}
    assert found.score == 1.0 and len(planted) > 20
    assert same == {("3", "4"), ("Layer2", "Layer3"), ("Layer3", "Layer2")}


def test_every_sample_has_the_least_and_the_largest_of_the_numbers_that_an_input_may_hold() -> None:
    """A mask that is told from labels is a right one wherever no label is 0."""
    program = judge("gpt", "tp=2").program
    nodes = program.reference.graph.find_nodes(op="placeholder")
    highest = [numbers_of(program.reference, n).high for n in nodes if n.meta.get("name") in program.manifest.inputs]
    for seed in range(5):
        for drawn, high in zip(draw(program, Field(seed)).batches[0], highest, strict=True):
            assert high > 20 and {0, high - 1} <= {*drawn.flatten().tolist()}
