"""torch.nn's recurrent nets between an embedding and a head, over `[batch, sequence]` tokens."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, WIDTH = 19, 12


class Reads(nn.Module):
    """A recurrent net over tokens; its last states are results, and stand in the loss."""

    def __init__(self, net: nn.Module, width: int, batch_first: bool = True) -> None:
        super().__init__()
        self.tokens, self.net, self.head = nn.Embedding(VOCABULARY, WIDTH), net, nn.Linear(width, VOCABULARY)
        self.batch_first = batch_first

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.tokens(ids)
        y, last = self.net(x if self.batch_first else x.transpose(0, 1))
        logits = self.head(y if self.batch_first else y.transpose(0, 1))
        hidden, *cell = last if isinstance(last, tuple) else (last,)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + hidden.pow(2).mean()
        for state in cell:
            loss = loss + state.abs().mean()
        return {"loss": loss, "logits": logits}


RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "nn.LSTM": lambda: Reads(nn.LSTM(WIDTH, 8, num_layers=2, batch_first=True), 8),
    "nn.LSTM, both ways, with dropout": lambda: Reads(
        nn.LSTM(WIDTH, 8, num_layers=2, bidirectional=True, dropout=0.2), 16, batch_first=False
    ),
    "nn.GRU": lambda: Reads(nn.GRU(WIDTH, 8, bias=False, bidirectional=True, batch_first=True), 16),
    "nn.RNN": lambda: Reads(nn.RNN(WIDTH, 8, num_layers=2, nonlinearity="relu", batch_first=True), 8),
}
"""The models of this file; each takes `ids` and `labels`, and returns a loss."""
