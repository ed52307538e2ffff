"""Models with runs of equal blocks, in the ways in which a run can go on: each takes `x` and `target`, gives a loss."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Results = dict[str, Tensor]
WIDTH = 12


class Layer(nn.Module):
    """Norm, up, down; with a number of its own and dropout."""

    def __init__(self, scale: float = 1.0, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.scale, self.dropout = scale, nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Inner(Layer):
    """The same without the residual, which its caller adds."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


class Mixer(nn.Module):
    """Takes two streams, gives both."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, y: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.one(y)) + x * shift, F.silu(self.two(x)) + y


class Stack(nn.Module):
    """Some layers, called one after the other in `run`, and a head."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.shift = nn.Parameter(torch.rand(WIDTH))
        self.head = nn.Linear(WIDTH, WIDTH)

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x: Tensor, target: Tensor) -> Results:
        y = self.head(self.run(x))
        return {"loss": F.mse_loss(y, target), "y": y}


class ResidualsOutside(Stack):
    """The root adds, and scales by a parameter of its own: what it does between blocks repeats with them."""

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x) * self.shift
        return x


class TwoStreams(Stack):
    """Both results of a block go on, exchanged, and the root reads an old one after there is a new one."""

    def run(self, x: Tensor) -> Tensor:
        y = x * 2
        for layer in self.layers:
            new, z = layer(x, y, self.shift)
            x, y = z, new + 0.1 * x
        return x + y


class Alternating(Stack):
    """Blocks of two kinds in turn, and one more at the end."""

    def __init__(self) -> None:
        super().__init__([Layer(1.0 if i % 2 else 0.5, 0.1) for i in range(7)])


class Again(Stack):
    """One block, called many times."""

    def run(self, x: Tensor) -> Tensor:
        for _ in range(5):
            x = self.layers[0](x)
        return x


class Cycles(Stack):
    """The stack refines what it gave: without gradients first, then with them, and one layer takes another shape."""

    def run(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = super().run(x)
        return super().run(x + y) + self.layers[0](x.unsqueeze(1)).squeeze(1)


class Skips(Stack):
    """A later block takes what an early one gave: no round is like the one before."""

    def run(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.layers[:3]:
            x = layer(x)
            kept.append(x)
        for layer in self.layers[3:]:
            x = layer(x + kept.pop())
        return x


class Abreast(Stack):
    """All layers take the same input, and their results are added."""

    def run(self, x: Tensor) -> Tensor:
        return x + sum(layer(x) for layer in self.layers)


class Collected(Stack):
    """All results are used at the end."""

    def run(self, x: Tensor) -> Tensor:
        every = [x]
        for layer in self.layers:
            every.append(layer(every[-1]))
        return sum(every[1:], every[0]) / len(every)


class Numbered(Stack):
    """Each layer has another number."""

    def __init__(self) -> None:
        super().__init__([Layer(1.0 + i) for i in range(4)])


class Counting(Layer):
    """Reads, and changes, what all layers share: no two calls do the same."""

    def __init__(self, shared: SimpleNamespace) -> None:
        super().__init__()
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        self.shared.calls += 1
        return super().forward(x) * self.shared.calls


class Counted(Stack):
    """A counter outside of all modules: reset at the start, counted up in each block."""

    def __init__(self) -> None:
        self.shared = SimpleNamespace(calls=0)
        super().__init__([Counting(self.shared) for _ in range(4)])

    def run(self, x: Tensor) -> Tensor:
        self.shared.calls = 0
        return super().run(x)


class Penalised(Stack):
    """The loss uses one layer's parameter outside of it."""

    def forward(self, x: Tensor, target: Tensor) -> Results:
        found = super().forward(x, target)
        layer = self.layers[2]
        assert isinstance(layer, Layer)
        return found | {"loss": found["loss"] + layer.up.weight.pow(2).mean()}


class TiedLayers(Stack):
    """Two neighbours of five share a matrix."""

    def __init__(self) -> None:
        super().__init__([Layer() for _ in range(5)])
        self.layers[3].up = self.layers[2].up


def layers(count: int, kind: Callable[[], nn.Module] = Layer) -> list[nn.Module]:
    return [kind() for _ in range(count)]


DEEP: dict[str, Callable[[], nn.Module]] = {
    "residuals outside": lambda: ResidualsOutside(layers(5, Inner)),
    "two streams": lambda: TwoStreams(layers(4, Mixer)),
    "alternating": Alternating,
    "called again": lambda: Again(layers(1)),
    "cycles": lambda: Cycles(layers(3)),
    "skips": lambda: Skips(layers(6)),
    "abreast": lambda: Abreast(layers(4, Inner)),
    "collected": lambda: Collected(layers(4)),
    "numbered": Numbered,
    "counted": Counted,
    "penalised": lambda: Penalised(layers(5)),
    "tied layers": TiedLayers,
}
