"""Rows of docs/bugs.md on sequences that ranks share (`cp`): attention over ranks, positions, masks, losses."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.bugs.models import VOCABULARY, WIDTH, Results, batch, cross_entropy, documents
from tests.bugs.planted import Situation, situation


class Attends(nn.Module):
    """One layer of attention, whose queries and keys are turned by an angle that a table has for each position."""

    angles: Tensor

    def __init__(self, heads: int = 2, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.dropout = nn.Dropout(0.0)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("angles", torch.randn(64, WIDTH // heads))

    def mask(self, ids: Tensor) -> Tensor | None:
        return None

    def forward(self, ids: Tensor, labels: Tensor, which: Tensor | None = None) -> Results:
        b, s = ids.shape
        x = self.dropout(self.tokens(ids))
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        angles = self.angles[torch.arange(s)]
        mask = self.mask(ids if which is None else which)
        causal = self.causal and mask is None
        y = F.scaled_dot_product_attention(q * angles, k * angles, v, attn_mask=mask, is_causal=causal)
        logits = self.head(x + y.transpose(1, 2).flatten(2))
        return {"loss": cross_entropy(logits, labels), "logits": logits}


class Windowed(Attends):
    """Each token looks at itself and at the two before it."""

    def mask(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.size(1))
        back = places[:, None] - places[None, :]
        return (back >= 0) & (back < 3)


class Packed(Attends):
    """Each token looks back within its own document."""

    def mask(self, which: Tensor) -> Tensor:
        places = torch.arange(which.size(1))
        return ((places[:, None] >= places[None, :]) & (which[:, :, None] == which[:, None, :])).unsqueeze(1)


def all_round() -> nn.Module:
    model = Attends(causal=False)
    model.dropout.p = 0.4
    return model


def small_heads() -> nn.Module:
    return Windowed(heads=6)


def in_evaluation() -> nn.Module:
    model = Packed()
    model.dropout.p = 0.4
    return model.eval()


def causal() -> Situation:
    return situation(Attends, batch, "cp=2")


def test_gradients_of_attention_over_ranks() -> None:
    """A program whose loss is right, and that gives the keys no gradient."""
    found = causal()
    found.assert_equal()
    right = found.line("attended = context_attention(")
    assert found.seen_by(right, right.replace(" mul_2,", " mul_2.detach(),")) == "field"


def test_angles_are_those_of_global_positions() -> None:
    """A rank has an early and a late part of the sequence: neither its own count nor one part in a piece will do."""
    found = causal()
    right = found.line("numbers = shard(numbers")
    assert found.seen_by(right, "numbers = numbers[: s // cp.size]") == "field"
    assert found.seen_by(right, right.replace(", balanced=True", "")) == "field"


def test_logits_come_back_in_the_order_of_the_sequence() -> None:
    found = causal()
    assert "lies head–tail" in found.types_say("is dropped", "in_order")
    assert found.seen_by("head = in_order(head, cp, dim=1)", "head = head") == "field"


def test_a_loss_over_sequence_shards_has_no_factor() -> None:
    """It is a sum over all tokens that are not masked, divided by their number, and ranks have unequally many."""
    found = causal()
    right = found.line("loss = total / total_2")
    assert found.seen_by(right, f"{right} * cp.size") == "field"
    count = found.line("total_2 = all_reduce(total_2")
    for wrong in ("total_2 = total_2", "total_2 = total_2 * cp.size"):
        assert found.seen_by(count, wrong) == "field"


def test_gradients_are_summed_over_ranks_that_hold_parts_of_a_sequence() -> None:
    found = causal()
    assert "but it is" in found.types_say("a parameter's way is dropped", "= runtime.all_gather   head")
    right = found.line("head=weight(")
    assert found.seen_by(right, right.replace('gather={"cp": 0}', "")) != ""


def test_a_window_stays_a_window() -> None:
    """With heads of two numbers each."""
    found = situation(small_heads, batch, "cp=2")
    found.assert_equal()
    right = found.line("attended = context_attention(")
    assert ", window=3" in right
    assert found.seen_by(right, right.replace(", window=3", "")) == "field"


def test_documents_do_not_see_each_other() -> None:
    """In evaluation, which is a program of its own."""
    found = situation(in_evaluation, documents, "cp=2")
    found.assert_equal()
    right = found.line("attended = context_attention(")
    assert ", documents=which" in right and "dropout" not in str(found.program)
    assert found.seen_by(right, right.replace(", documents=which", "")) == "field"


def test_attention_all_round_with_dropout() -> None:
    """Each rank has an early and a late part here too; what is dropped is dropped by global position."""
    found = situation(all_round, batch, "cp=2")
    found.assert_equal()
    right = found.line("attended = context_attention(")
    assert found.seen_by(right, right.replace(", cp,", ", cp, causal=True,")) == "field"
    right = found.line("tokens = dropout(")
    assert found.seen_by(right, right.replace(", balanced=(1,)", "")) == "field"
