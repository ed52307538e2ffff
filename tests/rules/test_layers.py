"""Layers: norms, lookups, attention, losses, random numbers and what is made from nothing, split against whole."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from ndcompile.errors import CompileError
from ndcompile.placement import I, P, R, S
from ndcompile.rules.registry import signature
from ndcompile.rules.rows import rows
from ndcompile.size import Size
from tests.rules.case import Case, Spec, bools, case, each, every_row_holds, f, ints, positive

B = Size(12, ("b",))


def key() -> Spec:
    return Spec((), lambda shape: torch.tensor(1234567), False)


def kept(size: int) -> tuple[Spec, Spec]:
    """A running mean and variance."""
    return f(size, grad=False), Spec((size,), positive(size).make, False)


Q, K, V = (f(2, 4, 6, 3) for _ in range(3))
GROUPED = (f(2, 2, 6, 3), f(2, 2, 6, 3))

CASES: list[Case] = [
    case("aten.layer_norm.default", f(4, 6, 5), [5], f(5), f(5)),
    case("aten.layer_norm.default", f(12, 4, 3), [4, 3], f(4, 3)),
    case("aten.layer_norm.default", f(7, 5), [5]),
    case("aten.rms_norm.default", f(4, 6, 5), [5], f(5)),
    case("aten.rms_norm.default", f(B, 5), [5]),
    case("aten.softmax.int", f(4, 6, 5), -1),
    case("aten.softmax.int", f(4, 6, 5), 1),
    case("aten._softmax.default", f(6, 5), -2, False),
    case("aten.log_softmax.int", f(6, 5), -1),
    case("aten.embedding.default", f(12, 5), ints(4, 6, high=12)),
    case("aten.embedding.default", f(7, 4), ints(6, high=7), 3),
    case("aten.embedding.default", f(7, 4), ints(high=7)),
    case("aten.embedding.default", f(12, 4), ints(B, high=12)),
    case("aten.index.Tensor", f(6, 4, 5), [ints(12, low=-6, high=6)]),
    case("aten.index.Tensor", f(6, 4, 5), [ints(3, 1, high=6), ints(12, high=4)]),
    case("aten.index.Tensor", f(6, 4, 5), [None, ints(12, 2, low=-4, high=4)]),
    case("aten.index.Tensor", f(6, 4, 5), [ints(7, high=6), None, ints(7, high=5)]),
    case("aten.index.Tensor", f(6, 4, 5, 8), [None, ints(9, high=4), ints(9, high=5)]),
    case("aten.index.Tensor", ints(12, 5, high=9), [ints(1, 6, high=12), ints(4, 1, high=5)]),
    case("aten.index_put.default", f(6, 4, 5), [ints(3, high=6)], f(3, 4, 5), True),
    case("aten.index_put.default", f(6, 12), [None, ints(3, high=12)], f(6, 1), True),
    case("aten.index_put.default", f(6, 4, 12), [ints(2, 1, high=6), ints(3, high=4)], f(12), True),
    case("aten.index_put.default", f(4, 6, 5), [ints(4, high=4), None, ints(4, high=5)], f(), True),
    case("aten.gather.default", f(4, 6, 5), 1, ints(4, 3, 5, high=6)),
    case("aten.gather.default", f(12, 7), -1, ints(12, 4, high=7)),
    case("aten.gather.default", f(6, 5), 0, ints(4, 5, high=6)),
    case("aten.gather.default", f(6, 5), 0, ints(4, 3, high=6)),
    case("aten.conv2d.default", f(4, 6, 5, 5), f(12, 6, 3, 3), f(12), padding=[1, 1]),
    case("aten.conv2d.default", f(B, 3, 4, 6), f(4, 3, 2, 2), None, [2, 2]),
    case("aten.conv2d.default", f(3, 4, 3, 3), f(7, 4, 3, 3), f(7)),
    case("aten.conv2d.default", f(4, 6, 5, 5), f(12, 3, 3, 3), f(12), groups=2),
    case("aten.conv1d.default", f(4, 6, 8), f(12, 6, 3), f(12), padding=[2]),
    case("aten.conv1d.default", f(3, 12, 8), f(12, 1, 4), None, padding=[3], groups=12),
    case("aten.conv3d.default", f(2, 4, 3, 4, 4), f(6, 4, 2, 2, 2)),
    case("aten.conv2d.default", f(6, 5, 5), f(12, 6, 3, 3)),
    case("aten.conv2d.padding", f(4, 6, 5, 5), f(12, 6, 3, 3), f(12), [1, 1], "same"),
    case("aten.conv1d.padding", f(4, 6, 8), f(12, 6, 3), None, [1], "same"),
    case("aten.conv3d.padding", f(2, 3, 3, 4, 3), f(4, 3, 2, 2, 2), None, [1, 1, 1], "valid"),
    case("aten.max_pool1d.default", f(4, 6, 8), [2]),
    case("aten.max_pool2d.default", f(4, 6, 8, 8), [3, 3], [2, 2], [1, 1]),
    case("aten.max_pool3d.default", f(12, 2, 4, 4), [2, 2, 2]),
    case("aten.avg_pool1d.default", f(4, 6, 8), [2]),
    case("aten.avg_pool2d.default", f(4, 6, 8, 8), [2, 2], [2, 2], [1, 1]),
    case("aten.avg_pool3d.default", f(4, 6, 2, 4, 4), [2, 2, 2]),
    case("aten.adaptive_avg_pool1d.default", f(4, 6, 8), [2]),
    case("aten.adaptive_avg_pool2d.default", f(4, 6, 8, 8), [1, 1]),
    case("aten.adaptive_avg_pool3d.default", f(4, 6, 2, 4, 4), [1, 2, 2]),
    case("aten.batch_norm.default", f(4, 6, 3, 3), f(6), f(6), *kept(6), False, 0.1, 1e-5, False),
    case("aten.batch_norm.default", f(12, 7), None, None, *kept(7), False, 0.1, 1e-5, False),
    case("aten.group_norm.default", f(4, 6, 3, 3), 3, f(6), f(6)),
    case("runtime.batch_norm", f(4, 6, 3, 3), positive(1, 6, 1, 1), f(6), f(6), 1e-5),
    case("runtime.batch_norm", f(12, 7), positive(1, 7), None, None, 1e-5),
    case("runtime.moving_average", f(6), f(1, 6, 1, 1), 0.1),
    case("runtime.lstm", f(5, 6, 3), f(6, 2), f(6, 2), [f(8, 3), f(8, 2), f(8), f(8)]),
    case("runtime.lstm", f(3, 12, 4), f(12, 2), f(12, 2), [f(8, 4), f(8, 2)], True),
    case("runtime.gru", f(5, 6, 3), f(6, 2), [f(6, 3), f(6, 2), f(6), f(6)], True),
    case("runtime.rnn_tanh", f(5, 6, 3), f(6, 4), [f(4, 3), f(4, 4)]),
    case("runtime.rnn_relu", f(5, 6, 3), f(6, 4), [f(4, 3), f(4, 4), f(4), f(4)]),
    case("aten.scaled_dot_product_attention.default", Q, K, V),
    case("aten.scaled_dot_product_attention.default", Q, K, V, None, 0.0, True),
    case("aten.scaled_dot_product_attention.default", f(2, 5, 6, 3), f(2, 5, 7, 3), f(2, 5, 7, 4), f(6, 7)),
    case("aten.scaled_dot_product_attention.default", Q, K, V, f(2, 1, 6, 6)),
    case("aten.scaled_dot_product_attention.default", Q, K, V, f(1, 4, 1, 6)),
    case("aten.scaled_dot_product_attention.default", Q, *GROUPED, enable_gqa=True),
    case("aten.scaled_dot_product_attention.default", f(2, 12, 6, 3), *GROUPED, f(2, 12, 6, 6), enable_gqa=True),
    case("aten.scaled_dot_product_attention.default", f(2, 6, 6, 3), f(2, 1, 6, 3), f(2, 1, 6, 3), enable_gqa=True),
    case("runtime.attention", Q, K, V, causal=True, window=2),
    case("runtime.attention", Q, K, V, causal=True, chunk=3, padding=bools(2, 6)),
    case("runtime.attention", Q, *GROUPED, causal=True, prefix=ints(2, 6, high=2), documents=ints(2, 6, high=3)),
    case("runtime.attention", f(2, 5, 6, 3), f(2, 5, 4, 3), f(2, 5, 4, 7), padding=ints(2, 4, high=2), scale=0.3),
    case("runtime.attention", f(B, 2, 4, 3), f(B, 2, 4, 3), f(B, 2, 4, 3), prefix=2, documents=ints(B, 4, high=2)),
    case("runtime.attention_with_dropout", Q, K, V, None, 0.4, key(), 3, True, window=3, padding=bools(2, 6)),
    case("runtime.attention_with_dropout", Q, *GROUPED, None, 0.4, key(), 3, documents=ints(2, 6, high=3)),
    case("runtime.attention_with_dropout", Q, *GROUPED, None, 0.4, key(), 3),
    case("runtime.attention_with_dropout", Q, K, V, None, 0.4, key(), 3),
    case("runtime.attention_with_dropout", f(3, 5, 6, 2), f(3, 5, 4, 2), f(3, 5, 4, 7), f(6, 4), 0.4, key(), 3),
    case("runtime.attention_with_dropout", Q, K, V, f(2, 1, 6, 6), 0.4, key(), 3, False, 0.7),
    case("runtime.cross_entropy", f(12, 8), ints(12, high=8)),
    case("runtime.cross_entropy", f(6, 7), ints(6, high=7), ignore_index=2),
    case("runtime.cross_entropy", f(5, 12), ints(5, high=12), ignore_index=3, label_smoothing=0.1),
    case("runtime.dropout", f(4, 6, 5), 0.4, key(), 1),
    case("runtime.dropout", f(B, 7), 0.4, key(), 1),
    case("runtime.fold", key(), 3),
    case("aten.arange.default", 12),
    case("aten.arange.start", -3, 4),
    case("aten.arange.start_step", 1, 24, 2),
    case("aten.arange.start_step", 5, 0, -1),
    case("aten.arange.start", 0.5, 7.5, dtype=torch.float64),
    case("aten.full.default", [6, 5], 2.5),
    case("runtime.literal", [[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64, device=torch.device("cpu")),
    case("aten.zeros.default", [7, 4]),
    case("aten.ones.default", [12]),
]


@each(CASES)
def test_rows_hold(given: Case) -> None:
    every_row_holds(given)


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
