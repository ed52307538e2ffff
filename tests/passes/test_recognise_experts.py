"""Rows that choose their matrix become one op, in each way that it is written; what only looks like it stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ndcompile as nd
from ndcompile import runtime
from ndcompile.capture import capture
from ndcompile.inputs import Inputs
from ndcompile.passes.drop_noops import drop_noops
from ndcompile.passes.recognise_experts import recognise_experts
from ndcompile.rules.registry import op_name

Product = Callable[[Tensor, Tensor, Tensor], Tensor]


class Experts(nn.Module):
    """Each row of x takes the expert of its largest element; the last expert's biases are the matrices' sums."""

    def __init__(self, product: Product, *shape: int) -> None:
        super().__init__()
        self.product = product
        self.weight = nn.Parameter(torch.randn(3, *shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, x.argmax(-1) % 3)


def column(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    return torch.bmm(weight[ids], x.unsqueeze(-1)).squeeze(-1)


def row(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    return torch.bmm(x.unsqueeze(1), weight[ids]).squeeze(1)


def kept(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    return (weight.index_select(0, ids) @ x[:, :, None]).tanh().squeeze(-1)


def reshaped(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    return torch.bmm(weight[ids], x.reshape(-1, 5, 1)).squeeze(2)


def lowered(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    looked_up = weight[ids].to(torch.bfloat16)
    return torch.bmm(looked_up, x.unsqueeze(-1).to(torch.bfloat16)).squeeze(-1).float()


def two_columns(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    return torch.bmm(weight[ids], torch.stack([x, x], -1)).sum(-1)


def by_output(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    return torch.bmm(weight[:, ids].transpose(0, 1), x.unsqueeze(-1)[:, :3]).squeeze(-1)


def ops(module: nn.Module, x: Tensor) -> list[str]:
    graph = recognise_experts(drop_noops(capture(module, Inputs((x,), {})).graph))
    return [op_name(n.target) for n in graph.graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize(
    ("product", "shape"),
    [(column, (4, 5)), (row, (5, 4)), (kept, (4, 5)), (reshaped, (4, 5)), (lowered, (4, 5))],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_row_times_its_matrix_is_one_op_of_the_same_value(product: Product, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    module, x = Experts(product, *shape), torch.randn(6, 5)
    found = ops(module, x)
    assert found.count("runtime.grouped_linear") == 1
    assert not {"aten.bmm.default", "aten.matmul.default", "aten.index.Tensor", "aten.index_select.default"} & set(
        found
    )
    reference = nd.compile(module, "", x).one_device(module)
    assert torch.equal(reference(x), module(x)) or torch.allclose(reference(x), module(x), rtol=1e-5, atol=1e-6)


def test_where_the_model_adds_the_dim_and_drops_it_neither_is_left() -> None:
    found = ops(Experts(column, 4, 5), torch.randn(6, 5))
    assert not {"aten.unsqueeze.default", "aten.squeeze.dim"} & set(found)


@pytest.mark.parametrize(("product", "shape"), [(two_columns, (4, 5)), (by_output, (4, 3))])
def test_other_products_stay(product: Product, shape: tuple[int, int]) -> None:
    assert "runtime.grouped_linear" not in ops(Experts(product, *shape), torch.randn(6, 5))


def mixtral(**more: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2, vocab_size=11)
    config = transformers.MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=3, use_cache=False, **more)
    made: nn.Module = transformers.MixtralForCausalLM(config)
    return made


TOKENS = {"input_ids": torch.zeros(2, 4, dtype=torch.int64)}


def test_tp_shards_the_hidden_dim_of_gate_up_and_down() -> None:
    program = nd.compile(mixtral(), "tp=2", TOKENS)
    found = [n for n in program.graph.graph.nodes if n.target is runtime.grouped_linear]
    takes = [tuple(str(wanted.on("tp")) for wanted in node.meta["wanted"]) for node in found]
    gives = [str(node.meta["layout"].on("tp")) for node in found]
    assert takes == [("R", "S(1)", "R"), ("R", "S(1)", "R"), ("S(1)", "S(2)", "R")]
    assert gives == ["S(1)", "S(1)", "P"]
    assert program.parameters["model.layers.0.mlp.experts.gate_up_proj"].shape == (3, 24, 8)


def test_the_users_model_keeps_its_experts_implementation() -> None:
    model: Any = mixtral()
    model.set_experts_implementation("grouped_mm")
    program = nd.compile(model, "dp_shard=2", TOKENS)
    assert str(program).count("= grouped_linear(") == 2
    assert model.get_experts_implementation() == {"": "grouped_mm"}


def test_the_reference_graph_is_the_model() -> None:
    """Its own implementation of experts, in float32, with the balancing loss."""
    torch.manual_seed(0)
    model = mixtral(output_router_logits=True, router_aux_loss_coef=0.1)
    ids = torch.randint(11, (4, 6))
    batch = {
        "input_ids": ids,
        "labels": ids,
        "attention_mask": (torch.arange(6) < torch.tensor([[6], [5], [3], [1]])).long(),
    }
    reference = nd.compile(model, "", batch).one_device(model)
    losses, gradients = [], []
    for callee in (model, reference):
        model.zero_grad()
        loss = callee(**batch).loss
        loss.backward()
        losses.append(loss.detach())
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(gradients[1], gradients[0])
