"""Section J of docs/bugs.md: random numbers that depend on the rank."""

from __future__ import annotations

import pytest
from torch import Tensor, nn
from torch.nn import functional as F

import ndcompile as nd
from tests.bugs.models import WIDTH, Results, Tied, batch, cross_entropy
from tests.bugs.planted import Situation, situation


class Dropped(Tied):
    """Dropout of what tp cuts along the hidden dim, and of what every rank holds."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.dropout = nn.Dropout(0.4)

    def forward(self, ids: Tensor, labels: Tensor) -> Results:
        x = self.tokens(ids)
        h = self.dropout(F.gelu(self.up(self.norm(x))))
        logits = self.head(x + self.dropout(self.down(h)))
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def hidden() -> Situation:
    return situation(Dropped, batch, "tp=2", pins=(("up.weight", nd.S(0)), ("down", nd.R)))


def sequence() -> Situation:
    return situation(Dropped, batch, "tp=2", pins=(("tokens.weight", nd.S(0)), ("dropout", nd.S(1))))


def test_ranks_that_hold_one_value_drop_the_same() -> None:
    found = hidden()
    found.assert_equal()
    right = found.line("down = dropout(")
    assert right.endswith("shards={})")
    assert found.seen_by(right, right.replace("{}", "{2: tp}")) == "field"


@pytest.mark.parametrize("of", [hidden, sequence])
def test_ranks_that_hold_parts_drop_as_one_device_does(of: object) -> None:
    """The mask is a function of the place in the whole: as if drawn at once, however it is cut."""
    found = hidden() if of is hidden else sequence()
    found.assert_equal()
    right = found.line("gelu = dropout(")
    assert ": tp}" in right
    assert found.seen_by(right, right.partition("shards=")[0] + "shards={})") == "field"
