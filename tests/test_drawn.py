"""Branches on drawn numbers: those that every number decides alike are known, the others are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ndcompile as nd
from ndcompile.drawn import Draws
from ndcompile.errors import NotOneGraph

LAST = 1 - 2**-24
"""The largest number that `torch.rand` gives in float32."""

Branch = Callable[[], object]

KNOWN: dict[str, tuple[Branch, bool]] = {
    "< 0": (lambda: torch.rand([]) < 0, False),
    "0 >": (lambda: 0.0 > torch.rand([]), False),  # noqa: SIM300
    ">= 0": (lambda: torch.rand([]) >= 0.0, True),
    "< 1": (lambda: torch.rand(1) < 1.0, True),
    "1 >": (lambda: 1 > torch.rand([]), True),  # noqa: SIM300
    ">= 1": (lambda: torch.rand([]) >= 1, False),
    "<= 1": (lambda: torch.rand([]) <= 1.0, True),
    "<= the last": (lambda: torch.rand([]) <= LAST, True),
    "> the last": (lambda: torch.rand([]) > LAST, False),
    "<= -1": (lambda: torch.rand([]) <= -1.0, False),
    "> -1": (lambda: torch.rand([]).gt(-1), True),
    "== -1": (lambda: torch.rand([]) == -1.0, False),
    "!= 1": (lambda: torch.rand([]) != 1.0, True),
    "torch.lt": (lambda: torch.lt(torch.rand([]), 0.0), False),
    "torch.greater_equal, by name": (lambda: torch.greater_equal(input=torch.rand([]), other=0.0), True),
    "rand_like": (lambda: torch.rand_like(torch.ones(1)) < 0.0, False),
    "in half": (lambda: torch.rand([], dtype=torch.bfloat16) < 1.0, True),
    "item": (lambda: (torch.rand([]) < 0.0).item(), False),
    "not": (lambda: not torch.rand([]) < 0.0, True),
}

UNKNOWN: dict[str, Branch] = {
    "< 0.1": lambda: torch.rand([]) < 0.1,
    "<= 0": lambda: torch.rand([]) <= 0.0,
    "> 0": lambda: torch.rand([]) > 0.0,
    "< the last": lambda: torch.rand([]) < LAST,
    "<= what is rounded to 0": lambda: torch.rand([]) <= -1e-50,
    "< what is rounded to 0": lambda: torch.rand([]) < 1e-50,
    "== 0.5": lambda: torch.rand([]) == 0.5,
    "!= 0": lambda: torch.rand([]) != 0.0,
    "!= the last": lambda: torch.rand([]) != LAST,
}


@pytest.mark.parametrize("name", KNOWN)
def test_an_answer_that_all_numbers_give(name: str) -> None:
    branch, answer = KNOWN[name]
    for seed in range(3):
        torch.manual_seed(seed)
        assert bool(branch()) is answer, "torch says so too"
        with Draws():
            assert bool(branch()) is answer


@pytest.mark.parametrize("name", [n for n in KNOWN if n not in ("item", "not")])
def test_it_is_not_looked_up(name: str) -> None:
    """A tensor on meta has no value that could be read."""
    with Draws(), torch.device("meta"):
        assert bool(KNOWN[name][0]()) is KNOWN[name][1]


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_answer_that_differs(name: str) -> None:
    with Draws(), pytest.raises(NotOneGraph, match="depends on a drawn number"):
        bool(UNKNOWN[name]())


def changed() -> Tensor:
    x = torch.rand([])
    x += 1
    return x < 1.0


def changed_in_a_list() -> Tensor:
    x = torch.rand([])
    torch._foreach_add_([x], 1.0)
    return x < 1.0


def changed_by_a_view() -> Tensor:
    x = torch.rand([1])
    x.view(1).add_(1)
    return x < 1.0


def negated() -> Tensor:
    x = torch.rand([]) < 0.0
    return x.logical_not_()


@pytest.mark.parametrize("branch", [changed, changed_in_a_list, changed_by_a_view, negated])
def test_a_draw_that_is_changed_is_not_known(branch: Callable[[], Tensor]) -> None:
    with Draws():
        found = bool(branch())
    torch.manual_seed(0)
    assert found is bool(branch()), "a number was read, of the tensor as it is"


class Skips(nn.Module):
    """Leaves out layers at random, as transformers' BART does."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.training:
                drawn = torch.rand([])
                if drawn < self.p:
                    continue
            x = layer(x).tanh()
        return x.square().mean()


X = torch.ones(4, 12)


def test_layers_that_are_never_left_out_are_a_plain_stack() -> None:
    model = Skips(0.0)
    program = nd.compile(model, "dp_shard=2", X)
    assert not program.manifest.random
    assert not [n for n in program.reference.graph.nodes if "rand" in str(n.target)]
    assert str(program) == str(nd.compile(Skips(0.5).eval(), "dp_shard=2", X)), "where no number is drawn"
    torch.testing.assert_close(program.one_device(model)(X), model(X))
    assert nd.verify(program, model, seeds=1).equal


def test_layers_that_are_always_left_out_are_not_in_the_program() -> None:
    model = Skips(1.0)
    program = nd.compile(model, "dp_shard=2", X)
    assert "F.linear" not in str(program)


def test_layers_that_are_left_out_at_random() -> None:
    with pytest.raises(nd.CompileError) as error:
        nd.compile(Skips(0.1), "dp_shard=2", X)
    number = next(i for i, line in enumerate(Path(__file__).read_text().splitlines(), 1) if "if drawn <" in line)
    assert str(error.value).splitlines() == [
        "Skips cannot be captured as one graph",
        f"  source  test_drawn.py:{number}   if drawn < self.p:",
        "  why     which way it goes depends on a drawn number (torch.rand < 0.1), which is another one at each call",
        "  try     0 as the probability: config.layerdrop = 0.0, where layers are skipped at random",
        "  try     drop path: what a layer adds, times (torch.rand(()) >= p) / (1 - p)",
    ]


class Generates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + torch.rand(x.shape, generator=torch.Generator())


def test_a_generator_of_the_models_own() -> None:
    with pytest.raises(nd.CompileError) as error:
        nd.compile(Generates(), "dp_shard=2", X)
    assert str(error.value).splitlines()[2:] == [
        "  why     it draws from a generator of its own, whose state is one device's",
        "  try     the same without generator=: the numbers are a function of torch's seed then",
    ]
