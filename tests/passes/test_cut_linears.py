"""Fused projections are cut where tp can shard their pieces, and left where it cannot or need not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ndcompile as nd


class Gated(nn.Module):
    """A norm, gate and up in one matrix, down: as in Phi-3."""

    def __init__(self, how: str, hidden: int = 24) -> None:
        super().__init__()
        self.how, self.hidden = how, hidden
        self.norm = nn.LayerNorm(16)
        self.fused = nn.Linear(16, 2 * hidden)
        self.down = nn.Linear(hidden, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fused(self.norm(x))
        if self.how == "slice":
            gate, up = y[..., : self.hidden], y[..., self.hidden :]
        elif self.how == "sizes":
            gate, up = y.reshape(-1, 2 * self.hidden).reshape(y.shape).split([self.hidden, self.hidden], -1)
        else:
            gate, up = y.chunk(2, -1) if self.how == "chunk" else y.split(self.hidden, -1)
        h = self.down(F.silu(gate) * up)
        return x + h + y.mean() if self.how == "used whole" else x + h


def compiled(how: str, mesh: str = "tp=2", hidden: int = 24, **options: Any) -> nd.Program:
    return nd.compile(Gated(how, hidden), mesh, torch.zeros(4, 6, 16), **options)


def communication(program: nd.Program) -> list[str]:
    return [f"{c.side} {c.kind} {c.module}" for c in program.collectives() if c.axis == ("tp",)]


@pytest.mark.parametrize("how", ["split", "chunk", "slice", "sizes"])
def test_each_piece_is_sharded_by_an_exchange_of_weights(how: str) -> None:
    program = compiled(how, "dp_shard=2, tp=2")
    assert str(program.parameters["fused.weight"].layout) == "dp_shard S(0) · tp S(1)", "one plain parameter"
    assert communication(program) == [
        "backward all_reduce ",
        *["forward all_to_all fused", "backward all_to_all fused"] * 2,
        "forward all_reduce down",
    ]


def test_a_result_that_is_used_whole_is_not_cut() -> None:
    assert not cut(compiled("used whole"))


def test_pieces_that_do_not_divide_are_not_cut() -> None:
    assert cut(compiled("chunk", "tp=2", hidden=10)) and not cut(compiled("chunk", "tp=4", hidden=10))


def test_data_axes_cut_nothing() -> None:
    assert not cut(compiled("chunk", "dp_replicate=2, dp_shard=2"))


def test_a_matrix_that_is_pinned_on_its_results_is_not_cut() -> None:
    pinned = compiled("chunk", placements={"fused.weight": {"tp": nd.S(0)}})
    assert str(pinned.parameters["fused.weight"].layout) == "tp S(0)" and not cut(pinned)
    assert cut(compiled("chunk", placements={"fused.weight": {"tp": nd.S(1)}}))


def cut(program: nd.Program) -> bool:
    return any(n.meta.get("piece") for n in program.graph.graph.nodes)
