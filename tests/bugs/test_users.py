"""Section U of docs/bugs.md: what users of other libraries report, where no other file of this folder has it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ndcompile as nd
from ndcompile.placement import Placement
from tests.bugs.models import SEQUENCE, VOCABULARY, WIDTH, Documents, Results, Tied, batch, cross_entropy, documents
from tests.bugs.planted import situation


class Viewed(nn.Module):
    """A table of 12 rows, each of which a layer makes longer; all of it is then looked at in other rows."""

    def __init__(self, columns: int, *shape: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(12, 6))
        self.up = nn.Linear(6, columns)
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        rows = self.up(self.table).view(self.shape)
        return x.sum() * rows.cumsum(-1).square().sum()


def to_16_rows() -> nn.Module:
    return Viewed(8, 16, 6)


def flat() -> nn.Module:
    return Viewed(7, -1)


def x() -> Results:
    return {"x": torch.randn(4, WIDTH)}


COLUMNS = (("up.weight", nd.S(0)), ("up", nd.S(1)))


def test_a_view_of_columns_is_a_view_of_the_whole() -> None:
    """They are exchanged for rows first: to look at each rank's columns in other rows gives other rows."""
    found = situation(to_16_rows, x, "tp=4", pins=COLUMNS)
    found.assert_equal()
    assert found.seen_by(found.line("up = all_to_all(up, tp"), "up = up") == "field"


def test_uneven_columns_can_be_flattened() -> None:
    """7 on 2 ranks."""
    found = situation(flat, x, "tp=2", pins=COLUMNS)
    found.assert_equal()
    right = found.line("up = all_gather_invariant(").removeprefix("up = ")
    assert found.seen_by(right, f"wrong.turned({right}, tp, 1)") == "field"


def test_a_sequence_shard_meets_a_matrix_that_every_rank_holds() -> None:
    """The layer takes [b, s, hidden] with s on tp."""
    found = situation(Documents, documents, "tp=2", pins=SEQUENCE)
    found.assert_equal()
    assert found.line("router = F.linear(norm, w.router)")


@pytest.mark.parametrize("pins", [(), (("tokens.weight", nd.S(0)),)], ids=["whole", "by rows"])
def test_tied_tables_on_tp(pins: tuple[tuple[str, Placement], ...]) -> None:
    """Both uses are one parameter: in one placement, or each with its own way back to it."""
    found = situation(Tied, batch, "tp=2", pins=pins)
    found.assert_equal()
    assert list(found.program.parameters) == ["tokens.weight", "norm.weight", "norm.bias"]


class AdaptedLayer(nn.Module):
    """A frozen layer with small trained matrices beside its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.requires_grad_(False)
        self.up_a, self.up_b = nn.Linear(WIDTH, 3, bias=False), nn.Linear(3, 16, bias=False)
        self.down_a, self.down_b = nn.Linear(16, 3, bias=False), nn.Linear(3, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        h = F.gelu(self.up(y) + self.up_b(self.up_a(y)))
        return x + self.down(h) + self.down_b(self.down_a(h))


class Adapted(nn.Module):
    """A frozen model whose layers have adapters, and are computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.layers = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(AdaptedLayer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for module in (self.tokens, self.head):
            module.requires_grad_(False)

    def forward(self, ids: Tensor, labels: Tensor) -> Results:
        x = self.tokens(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        logits = self.head(x)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def test_frozen_layers_with_adapters_and_checkpointing() -> None:
    found = situation(Adapted, batch, "dp_shard=2, cp=2")
    found.assert_equal()
    trained = {name for name, plan in found.program.manifest.parameters.items() if plan.requires_grad}
    assert trained == {f"layers.{i}.{way}_{m}.weight" for i in (0, 1) for way in ("up", "down") for m in "ab"}
    assert "    @recomputed\n" in str(found.program)


def test_meshes_whose_axes_have_no_common_size() -> None:
    """6 and 4: the mesh of 24 ranks that a wrapper of two libraries cannot make."""
    program = nd.compile(Tied(), "dp_shard=6, tp=4", batch())
    assert program.mesh.world_size == 24
    assert nd.verify(program, seeds=1, microbatches=1).equal


class Labelled(nn.Module):
    """transformers' own loss, which is given labels, the same shifted, and how many there are on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, labels: Tensor, shift_labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
        from transformers.loss.loss_utils import ForCausalLMLoss

        logits = self.head(self.tokens(ids))
        return ForCausalLMLoss(
            logits, labels, VOCABULARY, num_items_in_batch=num_items_in_batch, shift_labels=shift_labels
        )


def labelled() -> Results:
    given = batch()
    return given | {"shift_labels": given["labels"].roll(-1, 1), "num_items_in_batch": torch.tensor(20)}


def test_labels_and_shifted_labels_at_once() -> None:
    found = situation(Labelled, labelled, "dp_shard=2")
    found.assert_equal()
    assert "shift_labels" in found.line("losses = cross_entropy(")
