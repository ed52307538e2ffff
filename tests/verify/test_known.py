"""In the field, what is made of sizes and constants alone can be looked at, as buckets of distances are; no other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ndcompile.verify import known
from ndcompile.verify.domain import NotInDomain
from ndcompile.verify.field import Field
from ndcompile.verify.lockstep import run_one


def buckets(places: Tensor) -> Tensor:
    """As T5 counts them: of a logarithm."""
    far = (places.float() / 3 + torch.tensor(1.5)).log() * 4
    return torch.where(places < 3, places, far.view(2, -1).transpose(0, 1).reshape(-1).to(torch.long))


def test_buckets_of_places_are_what_they_are() -> None:
    found = run_one(Field(0), lambda: buckets(torch.arange(12)))
    assert torch.equal(found, buckets(torch.arange(12)))


def firsts(places: Tensor) -> Tensor:
    """As TAPAS finds the first place of each cell."""
    kept = torch.zeros(8).scatter_reduce(0, places % 2, places.float(), "amin", include_self=False)
    return kept.view(2, 4).to(torch.long)


def test_the_smallest_of_places_is_what_it_is() -> None:
    found = run_one(Field(0), lambda: firsts(torch.arange(3, 9)))
    assert torch.equal(found, firsts(torch.arange(3, 9)))


def test_a_known_tensor_that_takes_other_values_is_not_known_any_more() -> None:
    domain = Field(0)

    def run(values: Tensor) -> Tensor:
        x = torch.zeros(3)
        x[1:] = torch.ones(2)
        assert x.to(torch.long).tolist() == [0, 1, 1]
        x[:2] = values
        return (x * 1.5).exp().to(torch.long)

    with pytest.raises(NotInDomain):
        run_one(domain, lambda: run(domain.draw((2,))))


def test_only_the_latest_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "MOST", 5)
    domain = Field(0)
    run_one(domain, lambda: [torch.arange(3).double() * n for n in range(20)])
    assert len(domain.known._held) == 5 and sum(domain.known._memory.values()) == 5
