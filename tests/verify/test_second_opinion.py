"""A second opinion on types: the checker of the package `spmd_types` follows the forward of emitted texts.

It must object where ours would, and where it does not, every line must have the placements that our graph says: R, I
and P are the same words in both, and S(d) is its V with dim d in its partition spec.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import pytest
import spmd_types as spmd
import spmd_types.checker as checker
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import ndcompile as nd
from ndcompile.placement import Layout
from ndcompile.verify import trace
from ndcompile.verify.domain import Float64
from ndcompile.verify.execute import input_dims
from ndcompile.verify.localise import _rows, keyed
from ndcompile.verify.mutants import mutants
from ndcompile.verify.places import part
from ndcompile.verify.sample import draw
from tests.equivalence.compare import Case, make
from tests.equivalence.zoo import Batch, masked
from tests.models import Stack, tokens
from tests.verify import spmd_runtime
from tests.verify.spmd_runtime import World, world


def llama() -> tuple[nn.Module, Batch]:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = dict(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**sizes)), masked("input_ids", 32, 4)


MODELS: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {
    "stack": lambda: (Stack(2, 12, 20, 32), tokens()),
    "llama": llama,
    **{name: partial(make, Case(name, "")) for name in ("mlp", "towers", "shared block")},
}
"""All sizes divide evenly: the package's collectives join and cut equal parts only."""


@cache
def compiled(model: str, mesh: str) -> nd.Program:
    made, batch = MODELS[model]()
    return nd.compile(made, mesh, batch, float64=True)


@contextlib.contextmanager
def fake_world(program: nd.Program) -> Iterator[Any]:
    """A mesh of process groups in which nothing is sent."""
    dist.init_process_group(backend="fake", rank=0, world_size=program.mesh.world_size, store=FakeStore())
    try:
        names = tuple(program.mesh.names)
        yield init_device_mesh("cpu", tuple(map(program.mesh.size, names)), mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


def told(x: torch.Tensor, layout: Layout, mesh: Any) -> None:
    """Say where a tensor lies, in their words."""
    words = {"R": spmd.R, "I": spmd.I, "P": spmd.P, "S": spmd.V}
    types = {mesh.get_group(name): words[layout.on(name).kind] for name in mesh.mesh_dim_names}
    dims = [tuple(mesh.get_group(name) for name in axes) for axes in layout.dims]
    spec = spmd.PartitionSpec(*(None if not axes else axes if len(axes) > 1 else axes[0] for axes in dims))
    spmd.assert_type(x, types, partition_spec=spec if any(dims) else None)


def said(value: torch.Tensor, axis: str, mesh: Any) -> str:
    """What they say of a value on an axis, in our words."""
    key = spmd.normalize_axis(mesh.get_group(axis))
    kind = spmd.get_local_type(value)[key]
    if kind is not spmd.V:
        return str(kind.value)
    spec = spmd.get_partition_spec(value)
    dims = [d for d, axes in enumerate(spec or ()) if key in (axes if isinstance(axes, tuple) else (axes,))]
    return f"S({dims[0]})" if dims else "V"


def disagreements(program: nd.Program, text: str | None = None) -> tuple[list[str], int]:
    """Lines of which both say different things, and how many were compared. Raises what their checker raises."""
    text = text or str(program)
    manifest, sample = program.manifest, draw(program, Float64(0), None, 1)
    leaves = sample.leaves(lambda name, whole: part(whole, manifest.parameters[name].dims, program.mesh, 0))
    inputs = [part(x, dims, program.mesh, 0) for x, dims in zip(sample.batches[0], input_dims(program), strict=True)]
    with fake_world(program) as mesh, spmd.set_current_mesh(mesh), checker.typecheck(local=False):
        for name, leaf in leaves.items():
            told(leaf, program.parameters[name].layout, mesh)
        for x, dims in zip(inputs, input_dims(program), strict=True):
            told(x, Layout(dims, ()), mesh)
        for buffer in sample.buffers.values():
            told(buffer, Layout(((),) * buffer.dim(), ()), mesh)
        token = world.set(World(program.mesh, mesh, leaves, sample.buffers))
        try:
            with patch.object(trace, "_seen", trace.Value), trace.traced(text) as calls:
                root(program, text).forward(*inputs)
            return _compared(program, calls, mesh)
        finally:
            world.reset(token)


def root(program: nd.Program, text: str) -> Any:
    replaced = text.replace("import torch.nn.functional as F", "from tests.verify.spmd_runtime import functional as F")
    replaced = re.sub(r"([\w.]+)\.(?:view|reshape)\(", r"reshaped(\1, ", replaced)
    replaced = replaced.replace(
        "from ndcompile.runtime import",
        f"from {spmd_runtime.__name__} import reshaped; from {spmd_runtime.__name__} import",
    )
    replaced = replaced.replace("from ndcompile import runtime", f"import {spmd_runtime.__name__} as runtime")
    namespace: dict[str, Any] = {"__name__": "second_opinion"}
    exec(compile(replaced, "<ndcompile second opinion>", "exec"), namespace)
    return namespace[program.manifest.root]()


def _compared(program: nd.Program, calls: Sequence[Any], mesh: Any) -> tuple[list[str], int]:
    found, count = [], 0
    for node, layout, [value] in _rows(keyed(program.folded), [calls]):
        for axis in program.mesh.names:
            ours, other = str(layout.on(axis)), said(value.value, axis, mesh)
            count += 1
            if ours != other and not ({ours, other} == {"R", "I"} and not node.meta["grad"]):
                found.append(f"line {value.line}: {value.name} is {ours} on {axis}, they say {other}")
    return found, count


MESHES = ("tp=2", "dp_shard=2, tp=2", "dp_replicate=2, dp_shard=2")


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("model", MODELS)
def test_both_say_the_same_of_every_value(model: str, mesh: str) -> None:
    different, count = disagreements(compiled(model, mesh))
    assert not different and count > 10, different


OF_TYPES = (
    "drop a collective",
    "drop the sum of a gradient",
    "another conversion of the same forward",
    "a parameter's gradient not reduced on an axis",
    "a parameter's gradient reduced on one more axis",
)
"""The planted bugs that are wrong types."""


def objection(program: nd.Program, text: str) -> str:
    """What the package has against a text: an error of its own, other placements than ours, or that it does not run."""
    try:
        different, _ = disagreements(program, text)
    except (ValueError, RuntimeError, AssertionError) as error:
        return type(error).__name__
    return different[0] if different else ""


COUNT = "all_reduce(total_2, dp_shard) → runtime.all_reduce_invariant(total_2, dp_shard)"
"""No bug to either: a count of tokens has no gradient, and without one R and I are the same."""


@pytest.mark.parametrize("model, mesh, right", [("stack", "dp_shard=2, tp=2", [COUNT]), ("shared block", "tp=2", [])])
def test_the_package_sees_every_wrong_conversion(model: str, mesh: str, right: list[str]) -> None:
    program = compiled(model, mesh)
    planted = [m for m in mutants(str(program), program.mesh) if m.operator in OF_TYPES]
    found = {f"{mutant.before} → {mutant.after}": objection(program, mutant.source) for mutant in planted}
    assert [mutant for mutant, text in found.items() if not text] == right
    counts = Counter(found.values())
    assert len(found) > 15 and counts["SpmdTypeError"] > 0.7 * len(found), "the others change a shape, and do not run"
