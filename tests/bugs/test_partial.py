"""Section E of docs/bugs.md: what is read of a value before its parts are added, and parts of unequal size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import ndcompile as nd
from tests.bugs.models import WIDTH, Results
from tests.bugs.planted import situation


class Of(nn.Module):
    """A function of what a layer gives."""

    def __init__(self, function: Callable[[Tensor], Tensor], out: int = 10) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, out)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


def norm() -> nn.Module:
    return Of(lambda y: torch.linalg.vector_norm(y, dim=-1))


def largest() -> nn.Module:
    return Of(lambda y: y.amax(-1))


def index_of_largest() -> nn.Module:
    return Of(lambda y: y.max(-1).indices)


def largest_of_negative() -> nn.Module:
    return Of(lambda y: (-y.abs() - 1).amax(-1))


def x() -> Results:
    return {"x": torch.randn(4, WIDTH)}


PARTIAL = (("layer.weight", nd.S(1)), ("layer", nd.P()))


@pytest.mark.parametrize("model", [norm, largest, index_of_largest], ids=["E1", "E2", "E3"])
def test_a_function_of_a_partial_value(model: Callable[[], nn.Module]) -> None:
    found = situation(model, x, "tp=2", pins=PARTIAL)
    found.assert_equal()
    right = found.line("layer = all_reduce")
    assert "but it is 'tp P'" in found.types_say("a conversion is dropped", "= runtime.all_reduce")
    assert found.seen_by(right, "layer = layer") == "field"


def test_a_maximum_of_negative_numbers_over_ranks() -> None:
    """The largest of what the ranks have, and not of that and zero."""
    found = situation(largest_of_negative, x, "tp=2", pins=(("layer.weight", nd.S(0)), ("layer", nd.S(1))))
    found.assert_equal()
    assert found.seen_by("sub.amax((-1,))", "sub.amax((-1,)).clamp(min=0)") != ""


class Uneven(nn.Module):
    """A mean over a dim of 7 that two ranks hold 4 and 3 of, in a layer of 5 rows of which they hold 3 and 2."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Results:
        h = self.up(x).relu()
        y = self.down(h)
        return {"loss": (y - h.mean(-1, keepdim=True)).square().mean(), "y": y}


UNEVEN = (("up.weight", nd.S(0)), ("up", nd.S(1)), ("down.weight", nd.S(0)))


def test_a_mean_over_parts_of_unequal_size() -> None:
    """The mean of the ranks' means counts 3 numbers as much as 2."""
    found = situation(Uneven, x, "tp=2", pins=UNEVEN)
    found.assert_equal()
    right = found.line("loss = total /")
    assert found.seen_by(right, "loss = total / (b * down.shape[1]) / tp.size") == "field"


def test_parts_of_unequal_size_on_two_axes() -> None:
    """Ranks of tp hold 3, 3 and 1 of 7 rows, and 2, 2 and 1 of 5; both axes lie on the matrices."""
    found = situation(Uneven, x, "dp_shard=2, tp=3", pins=UNEVEN)
    found.assert_equal()
    right = "all_gather(relu, tp, dim=1, size=n7)"
    assert found.seen_by(right, right.replace(", size=n7", "")) != ""
    assert found.seen_by(right, f"wrong.turned({right}, tp, 1)") == "field"
