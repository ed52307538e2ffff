"""Which blocks compute two halves of their batch, what is cut, and what is said of the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ndcompile as nd
from ndcompile.checks import halves_are_apart
from ndcompile.compiler import compiled
from ndcompile.errors import CheckError
from ndcompile.inputs import Inputs
from ndcompile.mesh import MeshSpec
from ndcompile.precision import Precision
from ndcompile.program import Program
from ndcompile.request import Asked, Request
from ndcompile.rules.registry import signature

X = torch.zeros(4, 6, 12)


class Block(nn.Module):
    """An MLP of which `change` does something to the hidden values [batch, sequence, 20]."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.change = nn.Linear(12, 20), nn.Linear(20, 12), change

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.change(self.up(x)))


class Model(nn.Module):
    """Two blocks, equal or not, on the batch at dim 0, or at dim 1."""

    def __init__(self, *changes: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Block, changes))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


ASKED = Asked(Precision(), False, False, None, None, pad_inputs=False, halves=True, remat=None, reshard=True)


def in_halves(*changes: Callable[[Tensor], Tensor], mesh: str = "tp=2", **options: Any) -> Program:
    return nd.compile(Model(*changes), mesh, X, halves=True, **options)


def over(program: Program) -> list[str]:
    """What stands over each `compute`, and each line that yields."""
    lines = (line.split("  # ")[0].strip() for line in str(program).splitlines())
    return [line for line in lines if "halves(" in line or "yield" in line]


def test_a_block_goes_on_where_it_sends_something():
    program = in_halves(F.gelu, F.gelu)
    sent = "down = yield start(all_reduce_invariant, down, tp)"
    assert over(program) == ["@in_halves((0,), x=0)", "yield", sent]
    assert program.manifest.halves


def test_a_batch_at_another_dim_is_cut_there():
    program = in_halves(F.gelu, mesh="dp_shard=2, tp=2", dynamic_dims={"x": {1: "b"}})
    assert over(program)[0] == "@in_halves((1,), x=1)"
    assert nd.verify(program, seeds=1)


def mean_of_samples(x: Tensor) -> Tensor:
    return x * x.mean(0, keepdim=True)


def of_all_samples(x: Tensor) -> Tensor:
    return torch.softmax(x, 0)


def counts(x: Tensor) -> Tensor:
    return x / x.shape[0]


def places(x: Tensor) -> Tensor:
    return x * torch.arange(x.shape[0])[:, None, None]


def turned(x: Tensor) -> Tensor:
    return x.flip(0)


def dropped(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5)


WHOLE = {
    mean_of_samples: "samples meet: an op adds over the batch",
    of_all_samples: "samples meet: an op cannot take its operands in halves",
    counts: "the size of the batch is used as a number",
    places: "places in the batch are counted",
    turned: "samples meet: an op cannot take its operands in halves",
    dropped: "random numbers are drawn by each element's place in the whole batch",
}


@pytest.mark.parametrize("change", WHOLE)
def test_a_block_in_which_samples_meet_stays_whole_and_says_why(change: Callable[[Tensor], Tensor]):
    program = in_halves(change, F.gelu)
    assert [line for line in over(program) if "@" in line] == ["@in_halves((0,), x=0)"]
    assert f"layers.0: not computed in halves, since {WHOLE[change]}" in " ".join(str(program).split('"""')[1].split())
    with pytest.raises(nd.CompileError) as error:
        in_halves(change)
    assert str(error.value).startswith("halves=True, and no block can be computed in halves\n")
    assert f"\n  why     {WHOLE[change]}\n  try     halves=False" in str(error.value)


def test_without_halves_nothing_changes():
    assert over(nd.compile(Model(F.gelu), "tp=2", X)) == []


def test_the_other_mode_may_have_none():
    """What cannot be cut in training is not asked for there when eval was compiled with halves."""
    model = Model(nn.Dropout(0.5))
    assert over(nd.compile(model.eval(), "tp=2", X, halves=True))[0] == "@in_halves((0,), x=0)"
    with pytest.raises(nd.CompileError, match="random numbers"):
        nd.compile(model.train(), "tp=2", X, halves=True)
    other = Request(model, MeshSpec.parse("tp=2"), Inputs.of(X), {}, ASKED, of_other_mode=True)
    assert over(compiled(other)) == [] and "layers.0: not computed in halves" in str(compiled(other))


def test_the_check_sees_what_takes_one_half_into_the_other():
    program = in_halves(F.gelu)
    made = next(n for n in program.folded.graph.nodes if n.meta.get("halved") and "linear" in n.name)
    made.meta["cut"] = 1
    with pytest.raises(CheckError, match="in halves, but its operands make it S"):
        halves_are_apart(program.folded, program.mesh, signature)
