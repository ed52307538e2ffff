"""Named masks on meshes against one device, and against the dense masks that they were captured as."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import ndcompile as nd
from ndcompile.capture import capture
from ndcompile.errors import CompileError
from ndcompile.inputs import Inputs
from ndcompile.passes.drop_noops import drop_noops
from ndcompile.passes.follow_device import follow_device
from ndcompile.passes.recognise_masks import ATTENTION, recognise_masks
from ndcompile.placement import S
from ndcompile.reference import run as run_graph
from ndcompile.runtime import attention
from tests.equivalence.compare import BAR, Case, distance, make
from tests.equivalence.masks import MASKED
from tests.equivalence.registry import MODELS
from tests.equivalence.test_matrix import check
from tests.equivalence.zoo import Batch
from tests.ranks import run

WHOLE = [name for name in MASKED if name.startswith(("Llama", "Mistral", "GPT-2"))]
"""transformers' models; the others are one or two small layers."""

COVER = {
    2: [Case(model, mesh) for mesh in ("dp_shard=2", "tp=2") for model in MASKED if model not in WHOLE],
    4: [Case(model, "dp_shard=2, tp=2") for model in ("Mistral", "Llama, packed")],
}


@pytest.mark.equivalence
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_named_masks_equal_one_device(world_size: int, tmp_path: Path) -> None:
    check(world_size, COVER[world_size], tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["dp_shard=2", "tp=2"])
def test_whole_models_under_named_masks_equal_one_device(mesh: str, tmp_path: Path) -> None:
    check(2, [Case(model, mesh) for model in WHOLE], tmp_path)


def some(names: list[str]) -> list[Any]:
    """Of transformers' models under masks two by default."""
    later = ("Llama, padded left", "Llama, padded right", "Mistral, packed")
    return [pytest.param(name, marks=pytest.mark.full) if name in later else name for name in names]


DENSE = [name for name in MASKED if "dropout" not in name and name not in ("unnamed mask", "attention written out")]


@pytest.mark.parametrize("name", some([*DENSE, "Mistral", "BERT, padded"]))
def test_a_named_mask_computes_what_the_dense_one_does(name: str) -> None:
    """Results and gradients of the captured graph, on samples that are longer than those it was captured with."""
    model, batch = make(Case(name, ""))
    longer = {k: torch.cat([v, v.flip(0), v[:, :3]], 1) for k, v in batch.items()}
    graph = follow_device(drop_noops(capture(model, Inputs.of(batch), float64=True).graph))
    theirs = measured(graph, model, longer)
    recognise_masks(graph, dict(model.named_buffers()))
    attends = [n for n in graph.graph.nodes if n.target in (attention, ATTENTION)]
    assert attends and all(n.target is attention or n.args[3] is None for n in attends), "it has a name"
    ours = measured(graph, model, longer)
    total = sum(g.square().sum() for g in theirs).sqrt().item()
    far = [distance(a, b, 1e-6 * total) for a, b in zip(ours, theirs, strict=True)]
    assert max(far) < BAR[True]


def measured(graph: fx.GraphModule, model: nn.Module, batch: Batch) -> list[Tensor]:
    """All results, then all gradients."""
    results: list[Any] = [value for value in run_graph(graph, model, batch) if isinstance(value, Tensor)]
    loss = next(value for value in results if not value.dim())
    gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return [*results, *(g for g in gradients if g is not None)]


@pytest.mark.parametrize("name", some(["llama", "Mistral", "Qwen3", "Phi-3", "GPT-2", "BERT, padded", *DENSE]))
def test_no_value_of_a_program_is_sequence_by_sequence(name: str) -> None:
    model, batch = MODELS[name](2)
    program = nd.compile(model, "dp_shard=2, tp=2", batch)
    assert [n for n in program.graph.graph.nodes if list(map(str, n.meta.get("sizes", ()))).count("s") > 1] == []
    assert program.dense_masks() == []


def test_a_mask_without_a_name_is_sharded_and_reported() -> None:
    model, batch = MODELS["unnamed mask"](2)
    program = nd.compile(model, "dp_shard=2, tp=2", batch)
    assert [str(mask) for mask in program.dense_masks()] == [
        "the model: a dense mask of 33,554,432 bytes a rank, since heads have masks of their own"
    ]
    (taken,) = (n.args[3] for n in program.graph.graph.nodes if n.target is ATTENTION)
    assert taken.meta["layout"].on("tp") == S(0)


def test_a_program_is_bound_to_the_buffers_that_it_was_compiled_with(tmp_path: Path) -> None:
    model, batch = MODELS["mask from a buffer"](2)
    nd.compile(model, "", batch).save(tmp_path / "program.py")
    assert run(1, bound, tmp_path / "program.py") == [
        [
            "",
            "buffer 'blocks.1.mask' has other values than when the program was compiled\n"
            "  why     masks of attention were told by them, and are part of the program\n"
            "  try     nd.compile again, with these values",
        ]
    ]


def bound(path: Path) -> list[str]:
    """The complaint with the model's own buffers, and with one entry changed."""
    model, _ = MODELS["mask from a buffer"](2)
    found = []
    for entry in (0, 1):
        model.blocks[1].mask[0, 0, 3, 9] = entry
        try:
            nd.load(path, model)
            found.append("")
        except CompileError as error:
            found.append(str(error))
    return found
