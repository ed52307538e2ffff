"""One layer of a recurrent net, in one direction: torch's own kernels, over `[sequence, batch, features]`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def lstm(x: Tensor, hidden: Tensor, cell: Tensor, weights: Sequence[Tensor], reverse: bool = False) -> Tensor:
    """The outputs `[s, b, n]` of `x` `[s, b, k]`, and after them the last cell state: `[s + 1, b, n]`.

    `weights` are those of nn.LSTM for one layer: `[4n, k]`, `[4n, n]`, and two biases `[4n]` or none.
    """
    y, cells = _run(torch.lstm, x, (hidden.unsqueeze(0), cell.unsqueeze(0)), weights, reverse)
    return torch.cat([y, cells[-1]])


def gru(x: Tensor, hidden: Tensor, weights: Sequence[Tensor], reverse: bool = False) -> Tensor:
    """The outputs `[s, b, n]` of `x` `[s, b, k]`; `weights` are those of nn.GRU for one layer."""
    return _run(torch.gru, x, hidden.unsqueeze(0), weights, reverse)[0]


def rnn_tanh(x: Tensor, hidden: Tensor, weights: Sequence[Tensor], reverse: bool = False) -> Tensor:
    """The outputs `[s, b, n]` of `x` `[s, b, k]`; `weights` are those of nn.RNN for one layer."""
    return _run(torch.rnn_tanh, x, hidden.unsqueeze(0), weights, reverse)[0]


def rnn_relu(x: Tensor, hidden: Tensor, weights: Sequence[Tensor], reverse: bool = False) -> Tensor:
    """As `rnn_tanh`, with ReLU."""
    return _run(torch.rnn_relu, x, hidden.unsqueeze(0), weights, reverse)[0]


def _run(
    kernel: Callable[..., Any], x: Tensor, states: Any, weights: Sequence[Tensor], reverse: bool
) -> tuple[Tensor, Any]:
    """Outputs and last states; `train` only makes kernels keep what their backward needs."""
    given = x.flip(0) if reverse else x
    y, *lasts = kernel(given, states, list(weights), len(weights) > 2, 1, 0.0, True, False, False)
    return (y.flip(0) if reverse else y), lasts
