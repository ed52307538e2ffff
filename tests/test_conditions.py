"""What a model asks of the sizes of its inputs is a condition of the program; what torch asks for itself is none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import ndcompile as nd


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
    "whole chunks": (lambda y, table: y * 2 if y.shape[1] % 4 == 0 else y * 3, ["(s % 4) == 0"]),
    "another length": (lambda y, table: y * 2 if y.shape[1] != 20 else y * 3, ["s != 20"]),
    "two at once": (lambda y, table: y * 2 if y.shape[1] < 20 and y.shape[0] < 9 else y, ["s < 20", "b < 9"]),
    "both together": (lambda y, table: y * 2 if y.numel() < 600 else y * 3, ["6*b*s < 600"]),
    "a table that ends": (lambda y, table: y + table[: y.shape[1]], ["s <= 32"]),
    "what is cut off": (lambda y, table: y[:, 1:].flatten(0, 1), []),
}


@pytest.mark.parametrize("name", ASKED)
def test_answers_are_conditions(name: str) -> None:
    way, wanted = ASKED[name]
    program = nd.compile(Asks(way), "dp_shard=2", torch.zeros(4, 12, 6), dynamic_dims={"x": {0: "b", 1: "s"}})
    assert program.manifest.conditions == wanted


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
