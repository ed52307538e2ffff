"""LSTMs, GRUs and RNNs, one op a layer and direction: what torch computes, and the batch sharded at its dim."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import ndcompile as nd
from ndcompile.rules.registry import results

NETS: dict[str, nn.Module] = {
    "two layers": nn.LSTM(3, 4, num_layers=2),
    "both ways, the batch first": nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True),
    "without biases": nn.GRU(3, 4, bias=False, bidirectional=True),
    "plain": nn.RNN(3, 4, num_layers=2, batch_first=True),
    "plain, ReLU": nn.RNN(3, 4, nonlinearity="relu"),
}
X = torch.randn(5, 6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def compiled(net: nn.Module, mesh: str, inputs: Any = X) -> nd.Program:
    first = getattr(net, "batch_first", False)
    name = "input" if isinstance(net, nn.RNNBase) else "x"
    dims = {name: {0: "b"} if first else {1: "b"}}
    return nd.compile(net.double(), mesh, inputs, float64=True, dynamic_dims=dims)


@pytest.mark.parametrize("name", NETS)
def test_the_layers_compute_what_the_net_does(name: str) -> None:
    net = NETS[name].double()
    found, expected = compiled(net, "").one_device(net)(X), net(X)
    for mine, its in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
        torch.testing.assert_close(mine, its)
    ours, theirs = gradients(net, found), gradients(net, expected)
    for mine, its in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, its)


def gradients(net: nn.Module, results: Any) -> tuple[Tensor, ...]:
    total = torch.stack([y.pow(2).sum() for y in pytree.tree_leaves(results)]).sum()
    return torch.autograd.grad(total, list(net.parameters()))


@pytest.mark.parametrize(("name", "dim"), [("two layers", 1), ("both ways, the batch first", 0)])
def test_the_batch_is_sharded_at_its_dim_and_the_states_at_theirs(name: str, dim: int) -> None:
    program = compiled(NETS[name], "dp_shard=2")
    assert [str(v.meta["layout"]) for v in results(program.graph)] == [
        f"dp_shard S({dim})",
        "dp_shard S(1)",
        "dp_shard S(1)",
    ]
    moved = [f"{c.side} {c}" for c in program.collectives()]
    assert moved == ["forward all_gather(dp_shard)", "backward reduce_scatter(dp_shard)"], "nothing but weights"


def test_dropout_between_layers_is_the_one_of_every_mesh() -> None:
    assert str(compiled(nn.LSTM(3, 4, num_layers=2, dropout=0.5), "dp_shard=2")).count("dropout(") == 1


def test_a_projection_is_refused() -> None:
    with pytest.raises(nd.CompileError, match="an LSTM with proj_size is not compiled"):
        compiled(nn.LSTM(3, 4, proj_size=2), "")
