"""The page of models: what is on it, that its figures are below their bars; and some of its meshes again."""

from __future__ import annotations

from pathlib import Path

import pytest

import ndcompile as nd
from tests.equivalence import models
from tests.equivalence.captures import captured_once
from tests.equivalence.compare import BAR, Case, make
from tests.equivalence.models import Row
from tests.equivalence.registry import MODELS, meshes_of
from tests.equivalence.test_matrix import check

ROWS = models.read()


def test_the_page_is_written_from_the_figures() -> None:
    assert models.PAGE.read_text() == models.page(ROWS)


def test_every_model_has_a_row() -> None:
    assert list(ROWS) == list(MODELS)


@pytest.mark.parametrize("name", ROWS)
def test_every_mesh_that_fits_is_below_the_bar(name: str) -> None:
    row = ROWS[name]
    assert not row.failed
    assert sorted([*row.distances, *row.refused]) == sorted(meshes_of(name))
    assert all(far < BAR[True] for distances in row.distances.values() for far in distances.values())
    assert row.itself is None or row.itself < 1e-5


def test_only_heads_that_do_not_divide_and_whole_sequences_are_refused() -> None:
    for name, row in ROWS.items():
        for mesh, why in row.refused.items():
            heads = "tp=" in mesh and "attention heads" in why and "do not divide over" in why
            sequences = "cp=" in mesh and ("has nothing to shard" in why or "needs the whole sequence" in why)
            assert heads or sequences, f"{name} on {mesh}: {why}"


def test_one_capture_serves_all_meshes() -> None:
    """The text of a program is the same with a capture of its own."""
    model, batch = make(Case("llama", ""))
    alone = [str(nd.compile(model, mesh, batch, float64=True)) for mesh in ("tp=2", "dp_shard=2, tp=2")]
    with captured_once():
        assert [str(nd.compile(model, mesh, batch, float64=True)) for mesh in ("tp=2", "dp_shard=2, tp=2")] == alone


def test_a_page() -> None:
    """A model that does not fit on all meshes, and one that fails."""
    far = {"loss": 1e-16, "gradients": 2e-14}
    heads = {"tp=4": "two heads", "tp=8": "two heads"}
    rows = {
        "mlp": Row({"tp=2": far}, heads, {}, 0.0, {"it costs more": ["a", "b"]}, 0.5),
        "OPT": Row({}, {}, {"tp=2": "an error"}, masks=["causal", "dense"], on="2.13.0, 5.24.0"),
    }
    page = models.page(rows)
    assert [line for line in page.splitlines() if line.startswith(("| mlp", "| OPT"))] == [
        "| mlp | 1 of 31 | 1e-16 | – | – | 2e-14 | – | – | 0 | – |  |",
        "| OPT | 0 of 9 | – | – | – | – | – | – | – | causal, dense | 2.13.0, 5.24.0 |",
        "| mlp | 50.0% | `a`, `b` | it costs more |",
        "| mlp | tp=4; tp=8 | two heads |",
    ]
    assert "Not measured yet: gpt, gpt with dropout, llama, " in page


@pytest.mark.full
@pytest.mark.equivalence
def test_a_product_of_axes_again(tmp_path: Path) -> None:
    """One mesh of each model of other libraries: torch.nn's, and some of transformers'."""
    chosen = (
        "nn.Transformer with dropout",
        "Llama, one KV head",
        "ViT",
    )
    check(4, [Case(name, "dp_shard=2, tp=2") for name in chosen], tmp_path)
