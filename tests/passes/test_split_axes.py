"""Axes are cut by themselves where keys and values have fewer heads than ranks, and only there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ndcompile as nd
from ndcompile.errors import CompileError
from ndcompile.mesh import MeshSpec
from tests.equivalence.grouped import Grouped

IDS = {name: torch.zeros(2, 8, dtype=torch.long) for name in ("ids", "labels")}


def grouped(queries: int, keys: int, mesh: str, **options: Any) -> nd.Program:
    with torch.device("meta"):
        model = Grouped(queries, keys, repeat=options.pop("repeat", False))
    return nd.compile(model, mesh, IDS, **options)


@pytest.mark.parametrize(
    ("queries", "keys", "mesh", "parts"),
    [
        (8, 2, "tp=4", "tp.0=2, tp.1=2"),
        (8, 2, "tp=8", "tp.0=2, tp.1=4"),
        (6, 3, "tp=6", "tp.0=3, tp.1=2"),
        (12, 4, "dp_shard=2, tp=12", "dp_shard=2, tp.0=4, tp.1=3"),
        (8, 8, "tp=8", "tp=8"),
        (8, 4, "tp=2", "tp=2"),
        (8, 1, "tp=4", "tp=4"),
        (8, 2, "tp.0=2, tp.1=2, tp.2=2", "tp.0=2, tp.1=2, tp.2=2"),
    ],
)
@pytest.mark.parametrize("repeat", [False, True], ids=["shared", "repeated"])
def test_parts(queries: int, keys: int, mesh: str, parts: str, repeat: bool) -> None:
    program = grouped(queries, keys, mesh, repeat=repeat)
    assert str(program.mesh) == parts
    sharded = program.mesh.size(*(a for a in program.mesh.names if a.startswith("tp")))
    for name, heads in (("q", queries), ("k", keys), ("v", keys)):
        shape = program.parameters[f"layers.1.{name}.weight"].local_shape(program.mesh)
        assert shape[0] == 4 * max(1, heads // sharded), f"{name} has whole heads, each as seldom as it can be"


def test_nothing_is_gathered_for_keys_and_values() -> None:
    program = grouped(8, 2, "tp=4", repeat=True)
    inside = [f"{c.side} {c}" for c in program.collectives() if (c.block or c.module).startswith("layers.1")]
    assert sorted(set(inside)) == [
        "backward all_gather(tp.0, tp.1)",
        "backward all_reduce(tp.0)",
        "backward all_reduce(tp.1)",
        "backward reduce_scatter(tp.0, tp.1)",
        "forward all_gather(tp.0, tp.1)",
        "forward reduce_scatter(tp.0, tp.1)",
    ]


def test_heads_of_keys_that_fit_no_parts() -> None:
    with pytest.raises(CompileError) as raised:
        grouped(12, 4, "tp=6")
    assert str(raised.value).splitlines()[0] == (
        "12 attention heads over 4 of keys and values do not divide over 6 ranks of axis 'tp'"
    )
    assert str(raised.value).splitlines()[-1] == "  try     tp = 2, 4, 12"


def test_pins_on_an_axis_hold_on_its_parts() -> None:
    pins = {"layers.*.k.weight": {"tp": nd.S(0)}, "head.weight": {"tp": nd.S(1)}, "layers.*.v.weight": {"tp.1": nd.R}}
    program = grouped(8, 2, "tp=4", placements=pins)
    assert str(program.parameters["layers.0.k.weight"].layout) == "tp.0 S(0) · tp.1 S(0)"
    assert str(program.parameters["layers.0.v.weight"].layout) == "tp.0 S(0) · tp.1 I"
    assert str(program.parameters["head.weight"].layout) == "tp.0 S(1) · tp.1 S(1)"


def test_a_pin_on_a_part_of_a_whole_axis_is_refused() -> None:
    with pytest.raises(CompileError) as raised:
        grouped(8, 4, "tp=4", placements={"head.weight": {"tp.1": nd.S(0)}})
    assert str(raised.value).splitlines() == [
        "the pin 'head.weight' is on 'tp.1', but axis 'tp' is not cut so",
        "  why     the mesh is tp=4",
        "  try     a pin on tp",
    ]


HIDDEN, FFN, HEADS, KEYS, VOCABULARY = 16384, 53248, 128, 8, 128256


def test_bytes_of_405_billion_parameters_by_hand() -> None:
    """Two blocks with the widths of Llama-3 405B: keys and values on 8 of the 16 ranks, all else on all of them."""
    program = nd.compile(llama(2), "dp_replicate=8, dp_shard=64, tp=16")
    assert program.mesh == MeshSpec.parse("dp_replicate=8, dp_shard=64, tp.0=8, tp.1=2")
    assert program.manifest.multiples == {"s": {"tp": 16}}, "the sequence is sharded over both parts"
    keys = HIDDEN // HEADS * KEYS * HIDDEN // 8
    block = 2 * HIDDEN * HIDDEN // 16 + 2 * keys + 3 * HIDDEN * FFN // 16 + 2 * HIDDEN
    whole = 2 * block + 2 * VOCABULARY * HIDDEN // 16 + HIDDEN
    found = {name: p.local_bytes(program.mesh) for name, p in program.parameters.items()}
    assert found["model.layers.1.self_attn.k_proj.weight"] == 4 * keys // 64
    assert sum(found.values()) == 4 * whole // 64


def llama(layers: int) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = dict(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=layers,
        num_attention_heads=HEADS, num_key_value_heads=KEYS, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    assert isinstance(model, torch.nn.Module)
    return model
