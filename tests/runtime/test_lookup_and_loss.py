"""Vocabulary-parallel lookup and loss equal torch's own on the whole table and the whole logits."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ndcompile.mesh import MeshSpec
from ndcompile.runtime import Mesh, Ranks, cross_entropy, embedding, loss, private
from tests.ranks import run

VOCABULARIES = [8, 11, 5]
"""Even; uneven; on 4 ranks 5 rows are 2, 2, 1 and none."""

IGNORED = -100


class Case(NamedTuple):
    size: int
    smoothing: float
    scale: float
    dtype: torch.dtype = torch.float64


LOSSES = [
    Case(size, smoothing, scale) for size in VOCABULARIES for smoothing in (0.0, 0.1) for scale in (1.0, 300.0)
] + [Case(11, 0.0, 1.0, torch.bfloat16), Case(11, 0.0, 1.0, torch.float32)]


def problem(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [6, size], targets [6] (one ignored, one the last class), and a cotangent [6]."""
    generator = torch.Generator().manual_seed(case.size)
    logits = case.scale * torch.randn(6, case.size, generator=generator, dtype=torch.float64)
    target = torch.randint(case.size, (6,), generator=generator)
    target[2], target[3] = IGNORED, case.size - 1
    return logits.to(case.dtype), target, torch.rand(6, generator=generator, dtype=torch.float64).to(case.dtype)


def assert_near(got: Tensor, want: Tensor, case: Case) -> None:
    bound = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}[case.dtype]
    torch.testing.assert_close(got, want, rtol=bound, atol=bound * case.scale)


def gradient_of(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


def by_torch(case: Case) -> tuple[Tensor, Tensor]:
    logits, target, cotangent = problem(case)
    logits.requires_grad_()
    found = F.cross_entropy(logits, target, reduction="none", label_smoothing=case.smoothing)
    found.backward(cotangent)
    return found.detach(), gradient_of(logits)


def ours(case: Case, axis: Ranks | None) -> tuple[Tensor, Tensor]:
    logits, target, cotangent = problem(case)
    size = None
    if axis is not None:
        logits = logits.narrow(1, axis.start(case.size), axis.part(case.size))
        size = case.size
    logits = logits.clone().requires_grad_()
    found = cross_entropy(logits, target, axis, size, IGNORED, case.smoothing)
    found.backward(cotangent)
    return found.detach(), gradient_of(logits)


@pytest.mark.parametrize("case", LOSSES)
def test_cross_entropy_on_one_rank(case):
    for got, want in zip(ours(case, None), by_torch(case), strict=True):
        assert_near(got, want, case)


def on_ranks(ranks: int) -> dict[str, Any]:
    axis = Mesh.bound(MeshSpec.parse(f"tp={ranks}"))["tp"]
    sent: list[tuple[str, str, int]] = []
    original = private.start_all_reduce

    def noted(x: Tensor, op: str, group: str) -> Tensor:
        sent.append(("all_reduce", op, x.numel() // 6))
        return original(x, op, group)

    private.start_all_reduce = noted
    losses = [ours(case, axis) for case in LOSSES]
    private.start_all_reduce = original
    return {
        "losses": losses,
        "sent": sent,
        "compiled": compiled(axis),
        "lookups": [lookup(size, padding, axis) for size in VOCABULARIES for padding in (-1, 0, 4)],
        "errors": [out_of_range(ids, axis) for ids in (-1, 5)],
    }


def compiled(axis: Ranks) -> tuple[Tensor, Tensor]:
    case = Case(11, 0.1, 1.0)
    logits, target, cotangent = problem(case)
    logits = logits.narrow(1, axis.start(11), axis.part(11)).clone().requires_grad_()
    function = torch.compile(
        lambda logits, target: cross_entropy(logits * 1, target, axis, 11, IGNORED, 0.1),
        backend="aot_eager",
        fullgraph=True,
    )
    found = function(logits, target)
    found.backward(cotangent)
    return found.detach(), gradient_of(logits)


IDS = torch.tensor([[0, 4, 3], [1, 4, 2]])


def table(size: int) -> Tensor:
    return torch.randn(size, 3, generator=torch.Generator().manual_seed(size), dtype=torch.float64)


def lookup(size: int, padding: int, axis: Ranks) -> tuple[Tensor, Tensor]:
    weight = table(size).narrow(0, axis.start(size), axis.part(size)).clone().requires_grad_()
    found = embedding(IDS, weight, padding, axis, size)
    (found * torch.arange(18).view(2, 3, 3)).sum().backward()
    return found.detach(), gradient_of(weight)


def out_of_range(id: int, axis: Ranks) -> str:
    weight = table(5).narrow(0, axis.start(5), axis.part(5))
    try:
        embedding(torch.tensor([id]), weight, -1, axis, 5)
    except IndexError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("ranks", [2, 4])
def test_sharded_classes_and_rows(ranks):
    answers = run(ranks, on_ranks, ranks)
    for i, case in enumerate(LOSSES):
        losses, gradient = by_torch(case)
        for answer in answers:
            assert_near(answer["losses"][i][0], losses, case)
        joined = torch.cat([answer["losses"][i][1] for answer in answers], 1)
        assert_near(joined, gradient, case)
    for answer in answers:
        torch.testing.assert_close(answer["compiled"][0], by_torch(Case(11, 0.1, 1.0))[0])
    joined = torch.cat([answer["compiled"][1] for answer in answers], 1)
    torch.testing.assert_close(joined, by_torch(Case(11, 0.1, 1.0))[1])
    check_collectives([answer["sent"] for answer in answers])
    check_lookups([answer["lookups"] for answer in answers])
    for answer in answers:
        assert all("out of range" in error for error in answer["errors"]), answer["errors"]


def check_collectives(sent: list[list[tuple[str, str, int]]]) -> None:
    """The loss sends what its constants say, and nothing backward."""
    told = {0.0: loss.CROSS_ENTROPY_COLLECTIVES, 0.1: loss.SMOOTHED_CROSS_ENTROPY_COLLECTIVES}
    expected = [each for case in LOSSES for each in told[case.smoothing]]
    assert all(each == expected for each in sent)


def check_lookups(lookups: list[list[tuple[Tensor, Tensor]]]) -> None:
    for i, (size, padding) in enumerate((size, padding) for size in VOCABULARIES for padding in (-1, 0, 4)):
        weight = table(size).requires_grad_()
        found = F.embedding(IDS, weight, None if padding < 0 else padding)
        (found * torch.arange(18).view(2, 3, 3)).sum().backward()
        assert torch.equal(torch.stack([each[i][0] for each in lookups]).sum(0), found), (size, padding)
        assert torch.equal(torch.cat([each[i][1] for each in lookups]), gradient_of(weight)), (size, padding)


def test_embedding_on_one_rank_is_torchs():
    weight = table(5).requires_grad_()
    assert torch.equal(embedding(IDS, weight), F.embedding(IDS, weight))
    embedding(IDS, weight, padding_idx=4).sum().backward()
    assert weight.grad[4].tolist() == [0, 0, 0] and weight.grad[0].tolist() == [1, 1, 1]


def test_a_target_that_is_no_class_is_an_error():
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        cross_entropy(torch.zeros(1, 4), torch.tensor([4]))
