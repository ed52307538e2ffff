"""Section F of docs/bugs.md: classes and tables that are cut over ranks, masks, padding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ndcompile as nd
from tests.bugs.models import VOCABULARY, WIDTH, Padded, Results, Tied, batch, cross_entropy, padded
from tests.bugs.planted import Situation, situation


def by_rows() -> Situation:
    """One table, whose rows lie on tp, for the tokens and for the classes."""
    return situation(Tied, batch, "tp=2", pins=(("tokens.weight", nd.S(0)),))


def test_whole_logits_are_no_shard_of_the_classes() -> None:
    found = by_rows()
    found.assert_equal()
    right = "cross_entropy(head, labels, axis=tp, size=vocab)"
    gathered = "runtime.all_gather(head, tp, dim=1)"
    assert found.seen_by(right, f"cross_entropy({gathered}, labels, axis=tp, size=vocab * tp.size)") == "field"
    assert found.seen_by(right, right.replace("vocab", "vocab // tp.size")) != ""


@pytest.mark.parametrize("which", ["first_rank", "next_rank"])
def test_a_table_of_rows_looks_up_its_own_rows_alone(which: str) -> None:
    """In the forward, and in the backward, which adds to these rows."""
    found = by_rows()
    right = "embedding(ids, w.tokens, axis=tp, size=vocab)"
    assert found.seen_by(right, right.replace("axis=tp", f"axis=wrong.{which}(tp)")) == "field"


def on_sequence_shards() -> Situation:
    return situation(Padded, padded, "dp_shard=2, tp=2", pins=(("norm", nd.S(1)),))


def test_padding_is_not_counted_in_a_statistic() -> None:
    found = on_sequence_shards()
    found.assert_equal()
    assert found.seen_by("total_2 = real.sum()", "total_2 = real.numel() + 0 * real.sum()") == "field"
    assert found.seen_by("mul_2 = softmax * part", "mul_2 = softmax * (part * 0 + 1)") == "field"


def test_a_mask_is_cut_with_what_it_masks() -> None:
    found = on_sequence_shards()
    said = found.types_say("a conversion is dropped", "= runtime.shard")
    assert "as 'dp_shard S(0) · tp S(1)', but it is 'dp_shard S(0) · tp R'" in said
    assert found.seen_by("real = shard(real, tp, dim=1)", "real = real") == "does not run"


class Ahead(nn.Module):
    """Predicts the next token, and the one after it from labels that are rolled once more."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Results:
        x, following = self.norm(self.tokens(ids)), self.norm(self.tokens(ids.roll(-1, 1)))
        logits = self.head(x)
        later = self.head(self.mix(torch.cat([x, following], -1)))
        ahead = labels.roll(-1, 1)
        ahead = torch.cat([ahead[:, :-1], torch.full_like(ahead[:, :1], -100)], 1)
        return {"loss": cross_entropy(logits, labels) + 0.3 * cross_entropy(later, ahead), "logits": logits}


def test_labels_are_rolled_once() -> None:
    found = situation(Ahead, batch, "dp_shard=2")
    found.assert_equal()
    right = found.line("roll_2 = ")
    assert found.seen_by(right, right.replace("(-1,)", "(-2,)")) == "field"
    assert found.seen_by("full((b * dp_shard.size, 1), -100", "full((b * dp_shard.size, 1), 0") == "field"
