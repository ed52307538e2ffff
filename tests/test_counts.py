"""`bincount` of places along a dim is a histogram; where its length may depend on values it is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import ndcompile as nd

EXPERTS = 5


class Routed(nn.Module):
    """A gate over five experts, whose loads and probabilities are multiplied: the loss of a balanced router."""

    def __init__(self, load: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gate, self.load = nn.Linear(8, EXPERTS), load

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = self.gate(x).softmax(-1)
        load = torch.zeros(EXPERTS, device=x.device) + self.load(probabilities)[:EXPERTS].float()
        return (load * probabilities.mean((0, 1))).sum(), load


def of_two(p: Tensor) -> Tensor:
    _, chosen = torch.topk(p, 2, dim=-1)
    return torch.bincount(chosen.reshape(-1), minlength=EXPERTS)


KNOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "topk": of_two,
    "sort": lambda p: p.sort(-1).indices[..., 1:3].flatten().bincount(minlength=EXPERTS),
    "argmax": lambda p: torch.bincount(p.argmax(-1).flatten(), None, EXPERTS),
    "longer": lambda p: p.max(2)[1].view(-1).bincount(minlength=EXPERTS + 2),
}
UNKNOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "too short": lambda p: torch.bincount(p.topk(2).indices.flatten(), minlength=EXPERTS - 1).sum().expand(EXPERTS),
    "along a symbolic dim": lambda p: torch.bincount(p.argmax(1).flatten(), minlength=EXPERTS),
    "of all elements": lambda p: torch.bincount(p.argmax().reshape(1), minlength=EXPERTS),
    "moved by one": lambda p: torch.bincount(p.argmax(-1).flatten() + 1, minlength=EXPERTS),
    "values": lambda p: torch.bincount(p.topk(2).values.long().flatten(), minlength=EXPERTS),
}


@pytest.mark.parametrize("how", KNOWN)
def test_a_count_of_places_along_a_dim_is_what_torch_counts(how: str) -> None:
    torch.manual_seed(0)
    model, x = Routed(KNOWN[how]), torch.randn(4, 6, 8)
    program = nd.compile(model, "dp_shard=2", x)
    given = {"gate.weight": model.gate.weight, "gate.bias": model.gate.bias, "x": x}
    places = program.reference.graph.find_nodes(op="placeholder")
    loss, load = program.reference(*(given[node.meta["name"]] for node in places))
    right_loss, right_load = model(x)
    assert torch.equal(load, right_load) and torch.allclose(loss, right_loss)
    assert "histogram(" in str(program)


@pytest.mark.parametrize("mesh", ["dp_shard=2, tp=2", "tp=3"])
def test_ranks_count_together(mesh: str) -> None:
    program = nd.compile(Routed(of_two), mesh, torch.zeros(4, 6, 8))
    report = nd.verify(program, seeds=1)
    assert report.equal, report


@pytest.mark.parametrize("how", UNKNOWN)
def test_a_count_whose_length_is_not_known_is_refused(how: str) -> None:
    with pytest.raises(nd.CompileError, match=r"the shape of aten\.bincount\.default's result depends"):
        nd.compile(Routed(UNKNOWN[how]), "dp_shard=2", torch.zeros(4, 6, 8))
