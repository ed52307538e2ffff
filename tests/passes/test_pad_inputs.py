"""Pads: what is lengthened with what, and what is refused; both judged by running the graph with and without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ndcompile as nd
from ndcompile.mesh import MeshSpec
from ndcompile.passes.pad_inputs import pad_inputs
from ndcompile.runtime import Ranks
from ndcompile.runtime.lengths import cut_back, grown
from ndcompile.verify import padded
from ndcompile.verify.domain import Float64
from ndcompile.verify.lockstep import mesh_of, run_ranks

IDS = torch.zeros(4, 8, dtype=torch.long)
BATCH = {"ids": IDS, "mask": IDS + 1, "labels": IDS}
T = TypeVar("T")
Body = Callable[["Model", Tensor, Tensor, Tensor], Any]


class Model(nn.Module):
    """An embedding, what a case does with it, and a loss over labels."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body
        self.tokens, self.at, self.head = nn.Embedding(19, 16), nn.Embedding(12, 16), nn.Linear(16, 19)
        self.mix = nn.Conv1d(16, 16, 3, padding=2, groups=16)
        self.register_buffer("places", torch.arange(12)[None])

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Any:
        return self.body(self, self.tokens(ids), mask, labels)

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def attended(x: Tensor, **given: Any) -> Tensor:
    q = x.unflatten(-1, (4, 4)).transpose(1, 2)
    return x + F.scaled_dot_product_attention(q, q, q, **given).transpose(1, 2).flatten(2)


def causal(model: Model, x: Tensor, mask: Tensor, labels: Tensor) -> Any:
    return {"loss": model.loss(attended(x, is_causal=True), labels), "x": x}


def masked(model: Model, x: Tensor, mask: Tensor, labels: Tensor) -> Any:
    return model.loss(attended(x, attn_mask=mask.bool()[:, None, None]), labels)


def written_out(model: Model, x: Tensor, mask: Tensor, labels: Tensor) -> Any:
    scores = (x @ x.transpose(1, 2)).masked_fill(mask[:, None] == 0, -torch.inf)
    return model.loss(x + scores.softmax(-1) @ x, labels)


def added(model: Model, x: Tensor, mask: Tensor, labels: Tensor) -> Any:
    bias = mask.to(x.dtype).masked_fill(mask == 0, -torch.inf)[:, None]
    return model.loss(x + (x @ x.transpose(1, 2) + bias).softmax(-1) @ x, labels)


def shifted(model: Model, x: Tensor, mask: Tensor, labels: Tensor) -> Any:
    logits = model.head(attended(x, is_causal=True))[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def shifted_by_padding(model: Model, x: Tensor, mask: Tensor, labels: Tensor) -> Any:
    return model.loss(attended(x, is_causal=True), F.pad(labels, (0, 1), value=-100)[:, 1:])


def pooled_under_a_mask(model: Model, x: Tensor, mask: Tensor, labels: Tensor) -> Any:
    weights = mask[..., None].to(x.dtype)
    return {"pooled": (x * weights).sum(1) / weights.sum(1), "loss": model.loss(x, labels)}


def first_token(model: Model, x: Tensor, mask: Tensor, labels: Tensor) -> Any:
    return {"first": model.head(attended(x, is_causal=True)[:, 0]), "loss": model.loss(x, labels)}


def positions(model: Model, x: Tensor, mask: Tensor, labels: Tensor) -> Any:
    return model.loss(attended(x + model.at(torch.arange(x.shape[1])), is_causal=True), labels)


def positions_of_a_buffer(model: Model, x: Tensor, mask: Tensor, labels: Tensor) -> Any:
    return model.loss(attended(x + model.at(model.places[:, : x.shape[1]]), is_causal=True), labels)


def positions_of_the_mask(model: Model, x: Tensor, mask: Tensor, labels: Tensor) -> Any:
    at = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    return model.loss(attended(x + model.at(at), is_causal=True), labels)


def own_loss(model: Model, x: Tensor, mask: Tensor, labels: Tensor) -> Any:
    each = F.cross_entropy(model.head(x).flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    return (each * mask).sum() / mask.sum()


def running(model: Model, x: Tensor, mask: Tensor, labels: Tensor) -> Any:
    return model.loss((x * mask[..., None]).cumsum(1), labels)


def windows(model: Model, x: Tensor, mask: Tensor, labels: Tensor) -> Any:
    mixed = model.mix((x * mask[..., None]).transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
    return {"loss": model.loss(mixed, labels), "mixed": mixed}


HARMLESS: dict[str, tuple[Body, dict[str, float]]] = {
    body.__name__: (body, {"ids": 0, "mask": 0, "labels": -100})
    for body in (causal, masked, written_out, added, shifted, shifted_by_padding, pooled_under_a_mask, first_token,
                 positions, positions_of_a_buffer, positions_of_the_mask, own_loss, running, windows)
}  # fmt: skip


def bidirectional(model: Model, x: Tensor, mask: Tensor, labels: Tensor) -> Any:
    return model.loss(attended(x), labels)


def mean(model: Model, x: Tensor, mask: Tensor, labels: Tensor) -> Any:
    return model.head(x.mean(1)).square().sum()


def mean_of_losses(model: Model, x: Tensor, mask: Tensor, labels: Tensor) -> Any:
    return F.mse_loss(x, torch.zeros_like(x))


def largest(model: Model, x: Tensor, mask: Tensor, labels: Tensor) -> Any:
    return model.head(x.amax(1)).square().sum()


def last_token(model: Model, x: Tensor, mask: Tensor, labels: Tensor) -> Any:
    return model.head(attended(x, is_causal=True)[:, -1]).square().sum()


def last_tokens(model: Model, x: Tensor, mask: Tensor, labels: Tensor) -> Any:
    return model.head(attended(x, is_causal=True)[:, -2:]).square().sum()


def turned(model: Model, x: Tensor, mask: Tensor, labels: Tensor) -> Any:
    return model.loss(attended(x.flip(1), is_causal=True), labels)


def scaled_by_the_length(model: Model, x: Tensor, mask: Tensor, labels: Tensor) -> Any:
    return model.loss(attended(x, is_causal=True) * x.shape[1], labels)


def ends_with_another(model: Model, x: Tensor, mask: Tensor, labels: Tensor) -> Any:
    return model.loss(attended(F.pad(x, (0, 0, 0, 1), value=1.0), is_causal=True)[:, 1:], labels)


def wrong_mask(model: Model, x: Tensor, mask: Tensor, labels: Tensor) -> Any:
    return model.loss(attended(x, attn_mask=(mask == 0)[:, None, None]), labels)


def shares_of_all(model: Model, x: Tensor, mask: Tensor, labels: Tensor) -> Any:
    return model.loss(x * x.softmax(1), labels)


def counted(model: Model, x: Tensor, mask: Tensor, labels: Tensor) -> Any:
    return model.loss(x, labels) * (mask + 1).sum()


HARMFUL: dict[str, tuple[Body, str]] = {
    "bidirectional": (bidirectional, "tokens would attend to pads"),
    "mean": (mean, "it adds up the places of the sequence, and pads are not 0 there"),
    "mean_of_losses": (mean_of_losses, "it adds up the places of the sequence"),
    "largest": (largest, "amax looks at all places of the sequence"),
    "last_token": (last_token, "select looks at all places of the sequence"),
    "last_tokens": (last_tokens, "slice looks at all places of the sequence"),
    "turned": (turned, "flip acts along the sequence"),
    "scaled_by_the_length": (scaled_by_the_length, "it computes with the length (s)"),
    "ends_with_another": (ends_with_another, "it puts 1 behind the last token"),
    "wrong_mask": (wrong_mask, "tokens would attend to pads"),
    "shares_of_all": (shares_of_all, "shares are of all places"),
    "counted": (counted, "it adds up the places of the sequence"),
}


@pytest.mark.parametrize("case", HARMLESS)
def test_harmless_pads_are_taken_and_change_nothing(case: str) -> None:
    body, pads = HARMLESS[case]
    program = nd.compile(Model(body), "cp=2", BATCH, pad_inputs=True)
    assert program.manifest.pads == pads
    assert padded.claim(program, Model(body), 1, "cpu").held


@pytest.mark.parametrize("case", HARMFUL)
def test_harmful_pads_are_refused_and_would_change_something(case: str) -> None:
    body, why = HARMFUL[case]
    program = nd.compile(Model(body), "", BATCH)
    with pytest.raises(nd.CompileError) as error:
        pad_inputs(program.folded, frozenset("s"))
    assert str(error.value).startswith("pad_inputs=True would change what the model computes")
    assert error.value.why is not None and error.value.why.startswith(why)
    program.manifest.pads, program.manifest.multiples = {"ids": 0, "mask": 0, "labels": -100}, {"s": {"cp": 4}}
    assert padded.claim(program, Model(body), 1, "cpu").held is False


def test_a_window_that_reaches_over_the_end_is_refused() -> None:
    """Zeros stand behind the end; pads are something else."""

    def body(model: Model, x: Tensor, mask: Tensor, labels: Tensor) -> Any:
        return model.loss(model.mix(x.transpose(1, 2))[..., 1:-1].transpose(1, 2), labels)

    with pytest.raises(nd.CompileError, match="a window reaches over the last token"):
        nd.compile(Model(body), "cp=2", BATCH, pad_inputs=True)


def test_an_input_that_is_looked_up_and_a_target_is_refused() -> None:
    def body(model: Model, x: Tensor, mask: Tensor, labels: Tensor) -> Any:
        return model.loss(x + model.tokens(labels), labels)

    with pytest.raises(nd.CompileError, match="-100 would be looked up in a table of 19"):
        nd.compile(Model(body), "cp=2", BATCH, pad_inputs=True)


def test_a_number_that_the_model_compares_with_is_tried() -> None:
    """What a mask is made of: RoBERTa's ids of padding are 1."""

    def body(model: Model, x: Tensor, mask: Tensor, labels: Tensor) -> Any:
        return model.loss(attended(x, attn_mask=mask.ne(1)[:, None, None]), labels)

    program = nd.compile(Model(body), "cp=2", BATCH, pad_inputs=True)
    assert program.manifest.pads == {"ids": 0, "mask": 1, "labels": -100}
    assert padded.claim(program, Model(body), 1, "cpu").held


def test_a_sequence_may_not_become_longer_than_a_table() -> None:
    program = nd.compile(Model(positions), "cp=4", BATCH, pad_inputs=True)
    assert program.manifest.limits == {"s": [12, "at.weight"]}
    with pytest.raises(ValueError) as error:
        grown(program.manifest, [torch.zeros(2, 9)] * 3)
    assert str(error.value) == (
        "a sequence of 9 becomes 16 with pads, and 'at.weight' ends at 12\n"
        "  why  the mesh needs a length that divides by 8\n"
        "  try  size 8, or a mesh with fewer ranks on the sequence"
    )


def test_a_result_that_joins_sequences_is_refused() -> None:
    def body(model: Model, x: Tensor, mask: Tensor, labels: Tensor) -> Any:
        return model.head(x).flatten(0, 1)

    with pytest.raises(nd.CompileError, match="dim 0 of a result is b\\*s long, of which pads are no end"):
        nd.compile(Model(body), "cp=2", BATCH, pad_inputs=True)


def test_wrong_pads_are_seen_by_verify() -> None:
    program = nd.compile(Model(causal), "cp=2", BATCH, pad_inputs=True)
    assert nd.verify(program, Model(causal), seeds=1).equal
    program.manifest.pads["labels"] = 0
    assert not nd.verify(program, Model(causal), seeds=1).equal


@pytest.mark.parametrize(
    ("draw", "along"),
    [(lambda x: F.dropout(x, 0.3), True), (torch.rand_like, True), (lambda x: torch.rand(x.shape[0], 1, 1), False)],
)
def test_what_is_drawn_along_a_sequence_is_that_of_the_padded_length(draw: Callable[[Tensor], Tensor], along: bool):
    """So nothing is said of it; of a number for each sample pads change nothing."""

    def body(model: Model, x: Tensor, mask: Tensor, labels: Tensor) -> Any:
        return model.loss(x * draw(x), labels)

    program = nd.compile(Model(body), "cp=2", BATCH, pad_inputs=True)
    claims = {claim.kind: claim.held for claim in nd.verify(program, Model(body), seeds=1).claims}
    assert claims.pop(padded.KIND) is (None if along else True)
    assert set(claims.values()) == {True}


def on_ranks(ranks: int, function: Callable[[Ranks], T]) -> list[T]:
    spec = MeshSpec.parse(f"cp={ranks}")
    return run_ranks(spec, Float64(0), lambda rank: function(mesh_of(spec, rank)["cp"]))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("size", range(1, 25))
def test_a_result_is_cut_back_to_the_parts_of_torch_chunk(ranks: int, size: int) -> None:
    """Forward, and the gradient: at the pads it is zero."""
    unit = 2 * ranks
    longer = -(-size // unit) * unit
    whole, seed = torch.randn(2, longer, 3, dtype=torch.float64), torch.randn(2, size, 3, dtype=torch.float64)

    def cut(axis: Ranks) -> tuple[Tensor, Tensor]:
        x = whole.chunk(ranks, 1)[axis.index].clone().requires_grad_()
        y = cut_back(x, axis, 1, size)
        (gradient,) = torch.autograd.grad(y, x, seed[:, axis.start(size) :][:, : axis.part(size)])
        return y.detach(), gradient

    found = on_ranks(ranks, cut)
    assert torch.equal(torch.cat([y for y, _ in found], 1), whole[:, :size])
    wanted = torch.cat([seed, seed.new_zeros(2, longer - size, 3)], 1)
    assert torch.equal(torch.cat([g for _, g in found], 1), wanted)
