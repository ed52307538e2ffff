"""Take LSTMs, GRUs and plain RNNs apart into one op a layer and direction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx

from ndcompile import runtime
from ndcompile.build import Builder
from ndcompile.errors import CompileError
from ndcompile.rules.registry import arguments, describe

aten = torch.ops.aten


def lower_recurrent(graph: fx.GraphModule) -> fx.GraphModule:
    """Every layer and direction is one op over `[sequence, batch, features]`; dropout between layers is one of its own.

    So each result has a layout of its own: the batch of the last states is at another dim than that of the sequence.
    """
    for node in list(graph.graph.nodes):
        cell = CELLS.get(node.target)
        if cell is None:
            continue
        with graph.graph.inserting_before(node):
            results = _lowered(Builder(graph.graph, node), node, cell)
        for user in list(node.users):
            assert user.target is getitem, "an op of several results is taken apart"
            user.replace_all_uses_with(results[user.args[1]])
            graph.graph.erase_node(user)
        graph.graph.erase_node(node)
    graph.recompile()
    return graph


@dataclass(frozen=True)
class _Layer:
    """One layer in one direction: its input, its first states, its weights (with biases or without)."""

    x: fx.Node
    states: list[fx.Node]
    weights: list[fx.Node]
    reverse: bool


Cell = Callable[[Builder, _Layer], list[fx.Node]]
"""Makes the results of a layer: all its outputs, then its last states."""


def _lowered(build: Builder, node: fx.Node, cell: Cell) -> list[fx.Node]:
    given = arguments(node)
    hx, weights = given["hx"], list(given["params"])
    firsts = list(hx) if isinstance(hx, (list, tuple)) else [hx]
    directions, count = 1 + given["bidirectional"], 4 if given["has_biases"] else 2
    if len(weights) != given["num_layers"] * directions * count:
        raise CompileError(
            "an LSTM with proj_size is not compiled",
            node=describe(node),
            source=node.meta["source"],
            tries="a linear layer after an LSTM without proj_size",
        )
    x = _swapped(build, given["input"]) if given["batch_first"] else given["input"]
    lasts: list[list[fx.Node]] = []
    for layer in range(given["num_layers"]):
        made = []
        for direction in range(directions):
            number = layer * directions + direction
            states = [_at(build, state, number) for state in firsts]
            own = weights[number * count : (number + 1) * count]
            made.append(cell(build, _Layer(x, states, own, direction == 1)))
        x = _joined(build, [results[0] for results in made])
        lasts += [results[1:] for results in made]
        if given["dropout"] and given["train"] and layer < given["num_layers"] - 1:
            sizes, dtype = x.meta["sizes"], x.meta["dtype"]
            x = build(aten.dropout.default, x, given["dropout"], True, sizes=sizes, dtype=dtype)
    y = _swapped(build, x) if given["batch_first"] else x
    return [y, *(_stacked(build, list(states)) for states in zip(*lasts, strict=True))]


def _lstm(build: Builder, layer: _Layer) -> list[fx.Node]:
    """The op gives the last cell state as one more step after the outputs, which hold the last hidden state."""
    s, b, _ = layer.x.meta["sizes"]
    n, dtype = layer.states[0].meta["sizes"][-1], layer.x.meta["dtype"]
    args = (layer.x, *layer.states, layer.weights, layer.reverse)
    both = build(runtime.lstm, *args, sizes=(s + 1, b, n), dtype=dtype)
    y = build(aten.slice.Tensor, both, 0, 0, -1, sizes=(s, b, n), dtype=dtype)
    return [y, _at(build, y, 0 if layer.reverse else -1), _at(build, both, -1)]


def _with_one_state(target: Any) -> Cell:
    def cell(build: Builder, layer: _Layer) -> list[fx.Node]:
        s, b, _ = layer.x.meta["sizes"]
        n, dtype = layer.states[0].meta["sizes"][-1], layer.x.meta["dtype"]
        args = (layer.x, *layer.states, layer.weights, layer.reverse)
        y = build(target, *args, sizes=(s, b, n), dtype=dtype)
        return [y, _at(build, y, 0 if layer.reverse else -1)]

    return cell


def _at(build: Builder, x: fx.Node, index: int) -> fx.Node:
    return build(aten.select.int, x, 0, index, sizes=x.meta["sizes"][1:], dtype=x.meta["dtype"])


def _swapped(build: Builder, x: fx.Node) -> fx.Node:
    one, two, *rest = x.meta["sizes"]
    return build(aten.transpose.int, x, 0, 1, sizes=(two, one, *rest), dtype=x.meta["dtype"])


def _joined(build: Builder, parts: list[fx.Node]) -> fx.Node:
    if len(parts) == 1:
        return parts[0]
    *first, n = parts[0].meta["sizes"]
    return build(aten.cat.default, parts, 2, sizes=(*first, n * len(parts)), dtype=parts[0].meta["dtype"])


def _stacked(build: Builder, parts: list[fx.Node]) -> fx.Node:
    sizes = (len(parts), *parts[0].meta["sizes"])
    return build(aten.stack.default, parts, 0, sizes=sizes, dtype=parts[0].meta["dtype"])


CELLS: dict[Any, Cell] = {
    aten.lstm.input: _lstm,
    aten.gru.input: _with_one_state(runtime.gru),
    aten.rnn_tanh.input: _with_one_state(runtime.rnn_tanh),
    aten.rnn_relu.input: _with_one_state(runtime.rnn_relu),
}
