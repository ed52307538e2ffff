"""The equivalence matrix: every model of the zoo on every mesh of 2, 4 and 8 ranks of up to three axes.

pytest -m equivalence                the covering subset that CI runs
pytest -m "equivalence or full"      all of it
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.equivalence.compare import Case, measure_all, prepare
from tests.equivalence.deep import DEEP
from tests.equivalence.diffusion import DIFFUSION
from tests.equivalence.images import IMAGES
from tests.equivalence.odd import ODD
from tests.equivalence.recurrent import RECURRENT
from tests.equivalence.registry import WITHOUT_CP, WORLDS, has_sequence, meshes
from tests.equivalence.zoo import ZOO
from tests.ranks import run


def cases(world_size: int) -> list[Case]:
    return [Case(model, mesh, float64) for model, mesh in fitting(world_size) for float64 in (True, False)]


def fitting(world_size: int) -> list[tuple[str, str]]:
    """The zoo on all meshes; what has no sequence on those without `cp`."""
    return [(model, mesh) for mesh in meshes(world_size) for model in ZOO if has_sequence(model) or "cp" not in mesh]


COVER = {
    2: [Case(model, mesh) for model, mesh in fitting(2)] + [Case(model, "tp=2", False) for model in ("mlp", "llama")],
    4: [Case("gpt with dropout", mesh) for mesh in meshes(4)] + [Case("llama", "dp_shard=2, tp=2")],
    8: [Case("llama", "dp_shard=4, tp=2"), Case("gpt with dropout", "dp_replicate=2, tp=4"), Case("gpt", "tp=8")],
}
"""Each model on each mesh of 2 ranks; each mesh of 4 once; products whose axes differ in size on 8."""


def check(world_size: int, chosen: list[Case], folder: Path) -> None:
    """Every distance of every rank is below the bar."""
    folders = []
    for number, case in enumerate(chosen):
        (folder / str(number)).mkdir()
        folders.append(prepare(case, folder / str(number)))
    outcomes = run(world_size, measure_all, folders, timeout=60.0 + 20.0 * len(chosen))
    failures = [text for measured in outcomes for outcome in measured for text in outcome.failures]
    assert not failures, "\n".join(failures)


@pytest.mark.equivalence
@pytest.mark.parametrize("world_size", COVER)
def test_the_covering_subset_equals_one_device(world_size: int, tmp_path: Path) -> None:
    check(world_size, COVER[world_size], tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("mesh", [mesh for world_size in WORLDS for mesh in meshes(world_size)])
def test_the_whole_matrix_equals_one_device(mesh: str, tmp_path: Path) -> None:
    world_size = next(n for n in WORLDS if mesh in meshes(n))
    check(world_size, [case for case in cases(world_size) if case.mesh == mesh], tmp_path)


def test_the_cover_is_part_of_the_matrix() -> None:
    for world_size, chosen in COVER.items():
        assert set(chosen) <= set(cases(world_size))
        assert {case.mesh for case in chosen} <= set(meshes(world_size))


ODD_COVER = {
    2: [Case(model, "tp=2") for model in (*ODD, *DEEP)],
    4: [Case("fused attention", "dp_shard=2, tp=2"), Case("pooled", "tp=4"), Case("shared block", "dp_shard=2, tp=2"),
        Case("gated", "dp_replicate=2, tp=2"), Case("towers", "dp_replicate=2, dp_shard=2")],
}  # fmt: skip
"""Models with fused matrices, shared blocks, uneven widths, several losses: on `tp`, and on products."""

MORE_ODD = [Case(model, mesh) for mesh in meshes(2, WITHOUT_CP) if mesh != "tp=2" for model in ODD]
"""And on the other axes alone."""


@pytest.mark.equivalence
@pytest.mark.parametrize("world_size", ODD_COVER)
def test_odd_models_equal_one_device(world_size: int, tmp_path: Path) -> None:
    check(world_size, ODD_COVER[world_size], tmp_path)


@pytest.mark.full
@pytest.mark.equivalence
def test_more_odd_models_equal_one_device(tmp_path: Path) -> None:
    check(2, MORE_ODD, tmp_path)


NETS = {
    2: [Case(model, mesh) for mesh in meshes(2, WITHOUT_CP) for model in (*IMAGES, *DIFFUSION, *RECURRENT)],
    4: [Case("batch norm with dropout", "dp_shard=2, tp=2"), Case("remembers", "dp_replicate=2, tp=2"),
        Case("U-Net", "dp_shard=2, tp=2"), Case("diffusion transformer", "dp_shard=2, tp=2"),
        Case("nn.LSTM, both ways, with dropout", "dp_shard=2, tp=2")],
}  # fmt: skip
"""Convolution nets with batch norm, diffusion models, recurrent nets, buffers: on each axis, and on products."""


@pytest.mark.equivalence
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.full), 4])
def test_convolution_and_recurrent_nets_equal_one_device(world_size: int, tmp_path: Path) -> None:
    check(world_size, NETS[world_size], tmp_path)


WIDER = {
    4: [Case("gpt", "tp.0=2, tp.1=2"), Case("fused attention", "tp.0=2, tp.1=2")],
    8: [Case("gpt with dropout", "dp_replicate=2, dp_shard=2, tp=2"), Case("llama", "tp.0=4, tp.1=2")],
}
"""Three axes at once, and an axis in two parts: 4 heads of keys and values lie on a part of 4."""

MORE_WIDER = [
    Case("llama", "dp_replicate=2, dp_shard=2, tp=2"),
    Case("Mixtral, balanced, padded", "dp_replicate=2, dp_shard=2, tp=2"),
    Case("gpt", "dp_shard=2, tp.0=2, tp.1=2"),
]


SEQUENCES = {
    2: [Case(model, "cp=2") for model in ("GPT-2", "T5", "Mistral, packed", "windows, both ways")],
    4: [Case("Qwen3", "cp=2, tp=2"), Case("windows, causal", "dp_shard=2, cp=2"), Case("windows, padded", "cp=4"),
        Case("Mixtral, balanced, padded", "dp_shard=2, cp=2")],
}  # fmt: skip
"""A sharded sequence: flat matrices, dense masks and keys of another length, named masks, windows, experts.

All of them on all meshes are in the table of `models`.
"""


@pytest.mark.equivalence
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.full), 4])
def test_sharded_sequences_equal_one_device(world_size: int, tmp_path: Path) -> None:
    check(world_size, SEQUENCES[world_size], tmp_path)


PADDED = {
    2: [Case(model, "cp=2", length=5) for model in ("Llama, packed", "BERT, padded")]
    + [Case("llama", "tp=2", length=7)],
    4: [Case("GPT-2", "cp=4", length=5), Case("windows, causal", "cp=4", length=5),
        Case("llama", "cp=2, tp=2", length=5), Case("BERT, padded", "dp_shard=2, cp=2", length=6)],
}  # fmt: skip
"""Lengths that the mesh does not divide, with `pad_inputs`; one device has the sequences as they are."""


@pytest.mark.equivalence
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.full), 4])
def test_lengths_that_do_not_divide_equal_one_device(world_size: int, tmp_path: Path) -> None:
    check(world_size, PADDED[world_size], tmp_path)


@pytest.mark.equivalence
@pytest.mark.parametrize("world_size", WIDER)
def test_three_axes_and_sub_axes_equal_one_device(world_size: int, tmp_path: Path) -> None:
    check(world_size, WIDER[world_size], tmp_path)


@pytest.mark.full
@pytest.mark.equivalence
def test_more_products_of_eight_ranks_equal_one_device(tmp_path: Path) -> None:
    check(8, MORE_WIDER, tmp_path)
