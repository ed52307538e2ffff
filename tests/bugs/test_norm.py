"""Section H of docs/bugs.md: norms, clipping and steps, by torch's own functions, on ranks; copies stay equal."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.bugs import saved
from tests.bugs.conftest import Found
from tests.bugs.models import VOCABULARY, WIDTH, Results, batch, cross_entropy
from tests.bugs.planted import situation
from tests.claims import assert_close, assert_same_gradients


def own_parts(parallel: nn.Module) -> list[Tensor]:
    return [p.grad.to_local() for p in parallel.parameters()]


def the_norm_counts_every_parameter_once(name: str) -> None:
    """Unlike the two norms of the reports: the parts of all ranks, copies with them, or those of one rank alone."""
    parallel, model = saved.load(name), saved.model()
    parallel(**saved.share(name))["loss"].backward()
    model(**batch())["loss"].backward()
    of_one = torch.stack([g.square().sum() for g in own_parts(parallel)]).sum()
    of_all = of_one.clone()
    dist.all_reduce(of_all)
    for kind in (1.0, 2.0, float("inf")):
        gradients = [[p.grad for p in m.parameters() if p.grad is not None] for m in (parallel, model)]
        norms = [nn.utils.get_total_norm(theirs, kind) for theirs in gradients]
        assert_close(norms[0], norms[1], what=f"norm {kind}")
    expected = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    found = nn.utils.clip_grad_norm_(parallel.parameters(), 0.1)
    assert_close(found, expected)
    for wrong in (of_one, of_all):
        assert abs(wrong.sqrt() / expected - 1) > 0.01, "the situation tells them apart"
    assert expected > 0.1, "and something is clipped"
    assert_same_gradients(parallel, model)


def the_norm_counts_parameters_once_on_tp() -> None:
    the_norm_counts_every_parameter_once("tp")


def the_norm_counts_parameters_once_on_hsdp() -> None:
    the_norm_counts_every_parameter_once("hsdp")


def copies_after_steps(name: str) -> dict[tuple[str, str], set[str]]:
    """The bits of each part of each parameter after three clipped steps of AdamW, on all ranks that hold it."""
    parallel = saved.load(name)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    for _ in range(3):
        parallel(**saved.share(name))["loss"].backward()
        nn.utils.clip_grad_norm_(parallel.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    held: dict[tuple[str, str], set[str]] = {}
    everywhere: list[list[tuple[str, str, str]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, [part(name, p) for name, p in parallel.named_parameters()])
    for name, place, bits in (each for theirs in everywhere for each in theirs):
        held.setdefault((name, place), set()).add(bits)
    assert len(held) < 4 * len(list(parallel.parameters())), "some parts are held by several ranks"
    return held


def part(name: str, parameter: nn.Parameter) -> tuple[str, str, str]:
    """A parameter's name, where this rank's part lies, and a hash of its bits."""
    assert isinstance(parameter, DTensor)
    place = parameter.device_mesh.get_coordinate()
    assert place is not None
    at = [str(i) for i, placement in zip(place, parameter.placements, strict=True) if not placement.is_replicate()]
    bits = hashlib.sha256(parameter.to_local().detach().numpy().tobytes()).hexdigest()
    return name, " ".join(at), bits


def copies_stay_equal_on_tp() -> None:
    assert all(len(bits) == 1 for bits in copies_after_steps("tp").values())


def copies_stay_equal_on_hsdp() -> None:
    assert all(len(bits) == 1 for bits in copies_after_steps("hsdp").values())


def copies_drift_where_replicas_are_not_summed() -> None:
    """The bug of the reports, planted."""
    assert all(len(bits) == 2 for bits in copies_after_steps("hsdp, not summed").values())


ON_FOUR = (
    the_norm_counts_parameters_once_on_tp,
    the_norm_counts_parameters_once_on_hsdp,
    copies_stay_equal_on_tp,
    copies_stay_equal_on_hsdp,
    copies_drift_where_replicas_are_not_summed,
)


@pytest.mark.parametrize("claim", ON_FOUR, ids=lambda claim: claim.__name__)
def test_on_four_ranks(claim: Callable[[], None], found: Found) -> None:
    assert [theirs[claim.__name__] for theirs in found] == [""] * 4


class Sinks(nn.Module):
    """Attention by hand, in which each head has a number that takes a share of every row."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.sinks = nn.Parameter(torch.randn(heads))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Results:
        b, s = ids.shape
        x = self.tokens(ids)
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        sinks = self.sinks.view(1, -1, 1, 1).expand(b, self.heads, s, 1)
        shares = torch.cat([q @ k.transpose(-1, -2), sinks], -1).softmax(-1)[..., :-1]
        logits = self.head(x + (shares @ v).transpose(1, 2).flatten(2))
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def test_the_norm_with_numbers_by_head_on_tp() -> None:
    found = situation(Sinks, batch, "tp=2")
    found.assert_equal()
    assert str(found.program.parameters["sinks"].layout) == "tp S(0)"
    right = found.line("sinks=weight(")
    assert found.seen_by(right, right.replace('"/sinks"', '"/sinks", reduce=("tp",)')) == "field"
