"""The graph that ranks compute, as numbers: two runs have the same ones exactly if their results are computed alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ndcompile.mesh import MeshSpec
from ndcompile.runtime import private
from ndcompile.verify.domain import Domain, Float64
from ndcompile.verify.field import Field
from ndcompile.verify.lockstep import run_ranks
from ndcompile.verify.numbered import Graph, Known, Numbered
from ndcompile.verify.score import LATER
from tests.verify.test_mutants import all_mutants, judge

Text = Callable[[int, Tensor, Tensor], Any]


def run(text: Text, known: Known | None = None, domain: type[Domain] = Field) -> tuple[Graph, Any]:
    x, y = (Field(seed).draw((4, 2)) for seed in (1, 2))
    arithmetic = domain(0)
    numbered = Numbered(arithmetic, dict(x=x, y=y), known)
    found = run_ranks(MeshSpec.parse("tp=2"), arithmetic, lambda rank: text(rank, x, y), numbered)
    numbered.end(found)
    return numbered.graph, found


def total(x: Tensor) -> Tensor:
    return private.wait(private.start_all_reduce(x, "sum", "tp"))


def in_place(rank: int, x: Tensor, y: Tensor) -> Tensor:
    z = x.clone()
    z[1].add_(y[0])
    return total(z)


def in_another_place(rank: int, x: Tensor, y: Tensor) -> Tensor:
    z = x.clone()
    z[2].add_(y[0])
    return total(z)


def swapped(rank: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    second = total(y)
    return total(x), second


def read_early(rank: int, x: Tensor, y: Tensor) -> Tensor:
    started = private.start_all_reduce(x, "sum", "tp")
    read = started.clone()
    private.wait(started)
    return read


ALIKE: dict[str, tuple[Text, Text]] = {
    "in another order": (lambda r, x, y: (total(x), total(y)), swapped),
    "beside what leads to nothing": (lambda r, x, y: total(x) * 2, lambda r, x, y: (total(x) * 2, total(x * y))[0]),
    "as a tuple": (lambda r, x, y: x.split(2)[1] + 1, lambda r, x, y: x.split([2, 2])[1] + 1),
    "with a cast": (lambda r, x, y: total(x), lambda r, x, y: total(x.bfloat16())),
}  # fmt: skip

OTHER: dict[str, tuple[Text, Text]] = {
    "another number": (lambda r, x, y: x * 2, lambda r, x, y: x * 3),
    "another kind of number": (lambda r, x, y: x * 2, lambda r, x, y: x * 2.0),
    "another op of the same value": (lambda r, x, y: x * 2, lambda r, x, y: x + x),
    "another op of the same value, summed": (lambda r, x, y: total(x * 2), lambda r, x, y: total(x + x)),
    "another operand": (lambda r, x, y: total(x), lambda r, x, y: total(y)),
    "another part": (lambda r, x, y: x[:2] + 1, lambda r, x, y: x[2:] + 1),
    "another shape": (lambda r, x, y: x.sum(0), lambda r, x, y: x.view(4, 2, 1).sum(0).view(2)),
    "another place that is written": (in_place, in_another_place),
    "not summed": (lambda r, x, y: total(x), lambda r, x, y: x.clone()),
    "summed twice": (lambda r, x, y: total(x), lambda r, x, y: total(total(x))),
    "of another rank's": (lambda r, x, y: total(x), lambda r, x, y: total(x if r else y)),
    "read before it has come": (lambda r, x, y: total(x).clone(), read_early),
    "another constant": (lambda r, x, y: x * torch.tensor(2.0), lambda r, x, y: x * torch.tensor(3.0)),
}  # fmt: skip


@pytest.mark.parametrize("name", ALIKE)
def test_what_is_computed_alike_has_the_same_numbers(name: str) -> None:
    one, other = ALIKE[name]
    right, _ = run(one)
    assert run(one, right.known)[0].ends == run(other, right.known)[0].ends == right.ends


@pytest.mark.parametrize("name", OTHER)
def test_what_is_computed_otherwise_has_others(name: str) -> None:
    one, other = OTHER[name]
    right, _ = run(one)
    assert run(other, right.known)[0].ends != right.ends


@pytest.mark.parametrize("name", OTHER)
def test_what_is_known_is_given_again(name: str) -> None:
    """Every rank's results beside another text's numbers and values are what they are by themselves."""
    one, other = OTHER[name]
    (right, first), (_, found) = run(one), run(other)
    again = run(one, right.known)[1], run(other, right.known)[1]
    for x, y in zip(pytree.tree_leaves((first, found)), pytree.tree_leaves(again), strict=True):
        assert torch.equal(x, y)


DEPENDS: dict[str, tuple[Text, bool]] = {
    "a look of Python at a value": (lambda r, x, y: x * x.sum().item(), True),
    "a look at a constant": (lambda r, x, y: x * torch.ones(2).sum().item(), False),
    "a lookup by a mask": (lambda r, x, y: x[x > y], True),
    "a lookup by numbers": (lambda r, x, y: x[(x > y).long()], False),
    "a choice that keeps shapes": (lambda r, x, y: torch.where(x > y, x, y), False),
}


@pytest.mark.parametrize("name", DEPENDS)
def test_a_graph_that_depends_on_values_says_so(name: str) -> None:
    text, depends = DEPENDS[name]
    assert run(text, domain=Float64)[0].depends == depends


def test_a_cast_says_so() -> None:
    assert [run(text)[0].casts for text in ALIKE["with a cast"]] == [False, True]


def test_verdicts_are_those_of_all_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what the cheapest sample does not see: with the right graph's verdicts shared, and without."""
    own = judge("mlp", "dp_shard=2, tp=2")
    unseen = [m for m in all_mutants("mlp", "dp_shard=2, tp=2") if not own._seen(m.source, "quick")]
    where, asked = own._where_right, set[tuple[str, ...]]()

    def noted(*given: Any) -> tuple[str, ...]:
        asked.add(found := where(*given))
        return found

    monkeypatch.setattr(own, "_where_right", noted)
    verdicts = [own(m) for m in unseen]
    assert asked >= {LATER, LATER[:1]} and {*verdicts} == {"equivalent", "float64"}
    monkeypatch.setattr(own, "_where_right", lambda *given: ())
    assert verdicts == [own(m) for m in unseen]
