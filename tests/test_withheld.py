"""Parameters of later equal blocks are withheld from the tracer, and whoever needs them gets them all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ndcompile as nd
from ndcompile import capture
from ndcompile.program import Program
from tests.equivalence.deep import DEEP, WIDTH, Layer, Results, Stack, layers
from tests.test_fold import Shifted, batch, gradients

Given = list[set[str]]
"""For each trace the parameters that the tracer was given."""


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Given:
    found: Given = []
    export = torch.export.export

    def noting(model: nn.Module, *args: Any, **options: Any) -> Any:
        found.append({name for name, _ in model.named_parameters()})
        return export(model, *args, **options)

    monkeypatch.setattr(torch.export, "export", noting)
    return found


def compiled(model: nn.Module) -> Program:
    return nd.compile(model.double(), "dp_shard=2, tp=2", batch(), float64=True)


def test_the_tracer_is_given_two_of_equal_blocks(given: Given) -> None:
    compiled(Stack(layers(7)))
    assert [{name.split(".")[1] for name in names if name.startswith("layers")} for names in given] == [{"0", "1"}]


def test_it_is_given_two_of_each_kind(given: Given) -> None:
    """Blocks that differ in a number; one that is another in each block tells no kinds apart."""
    model = DEEP["alternating"]()
    for i, layer in enumerate(model.get_submodule("layers").children()):
        setattr(layer, "place", i)  # noqa: B010
    compiled(model)
    assert [{name.split(".")[1] for name in names if name.startswith("layers")} for names in given] == [set("0123")]


class Stacked(Stack):
    """Six equal layers."""

    layers: Any

    def __init__(self, kind: Callable[[], nn.Module] = Layer) -> None:
        super().__init__(layers(6, kind))

    def also(self, x: Tensor) -> Tensor:
        """What the loss has besides."""
        return torch.zeros((), dtype=x.dtype)

    def forward(self, x: Tensor, target: Tensor) -> Results:
        found = super().forward(x, target)
        return found | {"loss": found["loss"] + self.also(x)}


class Penalty(Stacked):
    def also(self, x: Tensor) -> Tensor:
        return sum((p.pow(2).mean() for p in self.parameters()), super().also(x))


class ReadsModule(Stacked):
    """Has a module of a layer also in a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = [self.layers[4].up]

    def also(self, x: Tensor) -> Tensor:
        return self.kept[0](x).pow(2).mean()


class ReadsMethod(Stacked):
    def __init__(self) -> None:
        super().__init__()
        self.kept = self.layers[4].up.forward

    def also(self, x: Tensor) -> Tensor:
        return self.kept(x).pow(2).mean()


class ReadsDict(Stacked):
    def also(self, x: Tensor) -> Tensor:
        return vars(self.layers[5].norm)["_parameters"]["weight"].pow(2).mean()


class AsksWhether(Stacked):
    """Looks for a module that is there, and for one that is not."""

    def also(self, x: Tensor) -> Tensor:
        found = [hasattr(self.layers[5], name) for name in ("up", "gate")]
        return x.mean() * (found.index(False) + 1)


class Catches(Stacked):
    """Takes what goes wrong for the answer."""

    def also(self, x: Tensor) -> Tensor:
        try:
            return self.layers[5].up.weight.pow(2).mean()
        except Exception:
            return super().also(x)


class Counts(Stacked):
    def also(self, x: Tensor) -> Tensor:
        return x.mean() * len(list(self.modules()))


class Sets(Stacked):
    """Gives a layer another layer's module, before it is called."""

    def run(self, x: Tensor) -> Tensor:
        self.layers[5].up = self.layers[0].up
        return super().run(x)


class Around(Stacked):
    """Has code around its forward, which makes a tensor and reads a layer."""

    def __call__(self, x: Tensor, target: Tensor) -> Results:
        found = super().__call__(x, target)
        return found | {"loss": found["loss"] + (torch.ones(WIDTH).to(x) * self.layers[5].up.weight[0]).sum()}


class TiedOutside(Stacked):
    """A matrix of a layer is another module's too."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, 16, bias=False)
        self.last.weight = self.layers[4].up.weight

    def also(self, x: Tensor) -> Tensor:
        return self.last(x).pow(2).mean()


class SkipsSome(Stacked):
    """Never calls two of its layers."""

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers[:4]:
            x = layer(x)
        return x


class Numbered(Stacked):
    """Each layer has another number, which it reads."""

    def __init__(self) -> None:
        super().__init__()
        for i, layer in enumerate(self.layers):
            layer.scale = 1.0 + i


class Spare(Layer):
    """Has a parameter that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.rand(16, WIDTH))


class SomeSpare(Stack):
    """Two layers without the parameter that all later ones have and do not use: of another build, and called alike."""

    def __init__(self) -> None:
        super().__init__([layer if i < 3 else _as_layer(Spare()) for i, layer in enumerate(layers(7))])


def _as_layer(layer: nn.Module) -> nn.Module:
    layer.__class__ = Layer
    return layer


class Collects(Stacked):
    """All results are used at the end, so that every block stays in the graph."""

    def __init__(self) -> None:
        super().__init__(Shifted)

    def run(self, x: Tensor) -> Tensor:
        every = [x * self.shift]
        for layer in self.layers:
            every.append(layer(every[-1]))
        return sum(every[1:], every[0])


class ChangesBetween(Stack):
    """The same tensor for all layers, to which the root adds between two calls."""

    def __init__(self) -> None:
        super().__init__(layers(5, TakesTwo))

    def run(self, x: Tensor) -> Tensor:
        y = x * 2
        for layer in self.layers:
            x = layer(x, y)
            y += 1
        return x


class TakesTwo(Layer):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x + y)


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{name: make for name, make in DEEP.items() if name != "alternating"},  # it has dropout
    **{kind.__name__: kind for kind in (
        Stacked, Penalty, ReadsModule, ReadsMethod, ReadsDict, AsksWhether, Catches, Counts, Sets, Around, TiedOutside,
        SkipsSome, Numbered, SomeSpare, Collects, ChangesBetween,
    )},
}  # fmt: skip


IN_CI = ("Stacked", "AsksWhether", "Catches", "TiedOutside", "Collects", "ChangesBetween", "two streams")
"""Each has another reason for what is withheld or asked for."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in IN_CI else [pytest.mark.full]) for n in MODELS])
def test_a_program_is_the_same_as_if_nothing_were_withheld(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text, layouts of all parameters, and the order of the graph's inputs; and it computes what the model does."""
    torch.manual_seed(0)
    model = MODELS[name]().double()
    loss, wanted = gradients(model, model, batch())
    found = compiled(model)
    value, computed = gradients(found.one_device(model), model, batch())
    torch.testing.assert_close(value, loss, rtol=1e-12, atol=1e-14)
    assert computed.keys() == wanted.keys()
    for key in wanted:
        torch.testing.assert_close(computed[key], wanted[key], rtol=1e-12, atol=1e-14)
    monkeypatch.setattr(capture, "WAYS", capture.WAYS[1:])
    due = compiled(model)
    assert str(found) == str(due)
    assert {n: p.layout for n, p in found.parameters.items()} == {n: p.layout for n, p in due.parameters.items()}
    assert _inputs(found) == _inputs(due)


def _inputs(program: Program) -> list[str]:
    return [node.name for node in program.graph.graph.find_nodes(op="placeholder")]


@pytest.mark.parametrize("name", ["Stacked", "Collects", "two streams", "residuals outside"])
def test_what_nobody_needs_is_never_given(name: str, given: Given) -> None:
    compiled(MODELS[name]())
    assert len(given) == 1


ASKS = (
    "Penalty",
    "ReadsModule",
    "ReadsDict",
    "AsksWhether",
    "Catches",
    "Counts",
    "Sets",
    "SkipsSome",
    "Numbered",
    "SomeSpare",
)


@pytest.mark.parametrize("name", ASKS)
def test_who_asks_gets_all(name: str, given: Given) -> None:
    model = MODELS[name]()
    compiled(model)
    assert given[0] < given[1] == {name for name, _ in model.named_parameters()}


def test_the_blocks_hold_what_they_held() -> None:
    model = Stack(layers(6)).double()
    before = {name: id(p) for name, p in model.named_parameters()}
    compiled(model)
    assert {name: id(p) for name, p in model.named_parameters()} == before
