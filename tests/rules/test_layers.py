"""Layers: rows that are to be there, and calls that have no rule."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import ndcompile as nd
from ndcompile.errors import CompileError
from ndcompile.placement import I, P, R, S
from ndcompile.rules.registry import signature
from ndcompile.rules.rows import rows
from ndcompile.size import Size
from tests.rules.case import bools, case, f, ints

Q, K, V = (f(2, 4, 6, 3) for _ in range(3))
GROUPED = (f(2, 2, 6, 3), f(2, 2, 6, 3))


def test_a_table_of_sharded_rows_makes_a_partial_lookup() -> None:
    found = rows(case("aten.embedding.default", f(12, 4), ints(6, high=12)).trial().signature, 2, grads=[True, False])
    assert [(row.operands, row.output) for row in found if row.factor == "v"] == [((S(0), R), P())]


def test_a_loss_of_sharded_classes_is_invariant() -> None:
    found = rows(case("runtime.cross_entropy", f(6, 8), ints(6, high=8)).trial().signature, 2, grads=[True, False])
    assert [(row.operands, row.output) for row in found if row.factor == "v"] == [((S(1), R), I)]


def test_normalised_dims_are_whole() -> None:
    found = rows(case("aten.layer_norm.default", f(6, 6, 6), [6, 6], f(6, 6)).trial().signature, 2)
    assert {row.operands for row in found if row.factor} == {(S(0), R)}


@pytest.mark.parametrize("position", [3, 4], ids=["scale_grad_by_freq", "sparse"])
def test_a_lookup_whose_gradient_counts_ids_is_refused(position: int) -> None:
    options = [-1, False, False]
    options[position - 2] = True
    with pytest.raises(CompileError, match="depends on the ids of all ranks"):
        case("aten.embedding.default", f(12, 4), ints(6, high=12), *options).trial()


def test_masks_of_attention_may_broadcast() -> None:
    found = rows(
        case("aten.scaled_dot_product_attention.default", Q, K, V, bools(2, 1, 6, 6)).trial().signature,
        2,
        grads=[True, True, True, False],
    )
    assert (S(1), S(1), S(1), R) in {row.operands for row in found}


def test_groups_of_queries_are_sharded_once_their_keys_are() -> None:
    bound = case("aten.scaled_dot_product_attention.default", Q, *GROUPED, enable_gqa=True).trial().signature
    heads, groups = bound.output[1]
    assert [row.operands for row in rows(bound, 2) if row.factor in (heads, groups)] == [(S(1), S(1), S(1))]
    assert [row.operands for row in rows(bound, 2, taken={heads: 2}) if row.factor == groups] == [(S(1), R, R)]


def test_a_convolution_in_groups_shards_its_batch_alone() -> None:
    given = case("aten.conv2d.default", f(4, 12, 5, 5), f(12, 3, 3, 3), groups=4).trial().signature
    assert {row.operands for row in rows(given, 2) if row.factor} == {(S(0), R)}


def test_a_mask_that_says_where_values_go_has_no_rule() -> None:
    with pytest.raises(CompileError, match="index_put with a mask has no rule"):
        signature(node_of_index_put(torch.bool))
    assert signature(node_of_index_put(torch.int64))


def node_of_index_put(dtype: torch.dtype) -> fx.Node:
    graph = fx.Graph()
    x, index, value = (graph.placeholder(name) for name in ("x", "index", "value"))
    for node, shape in ((x, (Size(6), Size(4))), (index, (Size(6),)), (value, ())):
        node.meta |= dict(shape=shape, dtype=dtype)
    put = graph.call_function(torch.ops.aten.index_put.default, (x, [index], value))
    put.meta |= dict(shape=x.meta["shape"], module="", source=None)
    return put


def test_a_dense_mask_of_each_sample_is_sharded_with_the_batch_beside_documents_too() -> None:
    """It was whole there, and each rank's samples met those of all."""
    tensors, key = [f(4, 2, 3, 1)] * 3, ints(high=9)
    call = case("runtime.attention_with_dropout", *tensors, f(4, 1, 3, 3), 0.4, key, 3, documents=ints(4, 3, high=2))
    found = {row.operands[:4] for rows in call.trial().check(2) for row in rows if row.output == S(0)}
    assert found == {(S(0), S(0), S(0), S(0))}


class Attends(nn.Module):
    """Each token to all others."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.one(x).unflatten(-1, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads)


def test_an_axis_that_does_not_communicate_for_attention_shards_none_of_its_sequences() -> None:
    """Queries alone were sharded on tp, which the checks refuse."""
    graph = nd.compile(Attends(), "", torch.zeros(3, 5, 8), dynamic_dims={"x": {0: "b", 1: "s"}}).folded.graph
    [node] = [n for n in graph.nodes if "attention" in str(n.target)]
    bound = signature(node)
    assert bound.together and not {row.factor for row in rows(bound, 1)} & bound.together
