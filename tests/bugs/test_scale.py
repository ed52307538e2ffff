"""Section D of docs/bugs.md: sums for means, wrong counts and factors, what is added once a rank."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ndcompile as nd
from tests.bugs.models import ROUTER, VOCABULARY, WIDTH, Experts, Results, Tied, batch
from tests.bugs.planted import situation

DATA = ("dp_shard=2", "dp_replicate=2, dp_shard=2")


@pytest.mark.parametrize("mesh", DATA)
def test_a_mean_over_tokens_that_ranks_have_unequally_many_of(mesh: str) -> None:
    """The mean of the ranks' means is another number; so is the sum over the count of one rank."""
    found = situation(Tied, batch, mesh)
    found.assert_equal()
    count = found.line("total_2 = all_reduce(total_2")
    data = count.rpartition(" ")[2].rstrip(")")
    assert found.seen_by(count, f"total_2 = total_2 * {data}.size") == "field"
    assert found.seen_by(count, "total_2 = total_2") == "field"
    assert found.seen_by("ne = labels != -100", "ne = labels != -101") == "field"


@pytest.mark.parametrize("mesh", DATA)
def test_gradients_are_sums_over_data_ranks_whatever_the_axes_are_called(mesh: str) -> None:
    """Of a loss inside: its own scale is in the forward, and nobody divides what is scattered or reduced."""
    found = situation(Tied, batch, mesh)
    found.assert_equal()
    data = found.line("loss = all_reduce_invariant(loss").rpartition(" ")[2].rstrip(")")
    right = found.line("loss = total / total_2")
    for factor in (f"* {data}.size", f"/ {data}.size"):
        assert found.seen_by(right, f"{right} {factor}") == "field"


WRONG_BALANCE = {
    "D14": ("tp=2", "total_2 = all_reduce_invariant(total_2", "* tp.size"),
    "D15": ("dp_shard=2", "ratio = all_reduce_invariant(ratio", "/ dp_shard.size"),
}


@pytest.mark.parametrize("row", WRONG_BALANCE)
def test_a_further_loss_keeps_its_weight_on_every_mesh(row: str) -> None:
    mesh, start, factor = WRONG_BALANCE[row]
    found = situation(Experts, batch, mesh)
    found.assert_equal()
    right = found.line(start)
    assert found.seen_by(right, f"{right} {factor}") == "field"


def test_gradients_of_experts_have_no_factor_of_their_own() -> None:
    """Whatever shards them: tp cuts the experts, and dp_shard gathers them."""
    found = situation(Experts, batch, "dp_shard=2, tp=2", pins=ROUTER)
    found.assert_equal()
    for factor in ("tp.size", "1 / dp_shard.size"):
        assert found.seen_by("(norm, w.up)", f"(norm, runtime.scale_gradient(w.up, {factor}))") == "field"


class Row(nn.Module):
    """A matrix that is cut along its contraction, a bias, a number that is added."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) + 1.0).relu()


def x() -> Results:
    return {"x": torch.randn(4, WIDTH)}


PARTIAL = (("layer.weight", nd.S(1)), ("layer", nd.P()))


def test_a_number_is_added_once() -> None:
    found = situation(Row, x, "tp=2", pins=PARTIAL)
    found.assert_equal()
    assert "but it is 'tp P'" in found.types_say("a conversion is dropped", "= runtime.all_reduce_invariant")
    right = "layer = all_reduce_invariant(layer, tp)"
    assert found.seen_by(right, right.replace("(layer", "(layer + 1.0") + " - 1.0") == "field"


def test_a_bias_is_added_once() -> None:
    found = situation(Row, x, "tp=2", pins=PARTIAL)
    assert "as 'tp P', but it is 'tp I'" in found.types_say("a conversion is dropped", "= runtime.partial_invariant")
    assert found.seen_by("partial_invariant(w.layer_bias, tp)", "w.layer_bias") == "field"


class Counted(nn.Module):
    """A sum over tokens, divided by a number that the loop gives: the tokens of several microbatches."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, labels: Tensor, items: Tensor) -> Results:
        logits = self.head(self.tokens(ids))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / items
        return {"loss": loss, "tokens": (labels != -100).sum()}


def counted() -> Results:
    return batch() | {"items": torch.tensor(20)}


def test_a_count_that_the_loop_gives_is_the_global_one() -> None:
    """And the tokens that a model counts are counted once, whatever the mesh."""
    found = situation(Counted, counted, "dp_shard=2, tp=2")
    found.assert_equal()
    assert found.seen_by("loss = total / items", "loss = total / (items // dp_shard.size)") == "field"
    right = "total_2 = all_reduce(total_2, dp_shard)"
    assert found.seen_by(right, "total_2 = runtime.all_reduce(total_2, MESH['dp_shard', 'tp'])") == "field"
