"""`compile`, `parallelize`, `load`: the whole way on one page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ndcompile import bind
from ndcompile.cache.kept import program_of
from ndcompile.cache.ranks import program_for_all
from ndcompile.cache.store import store_of
from ndcompile.errors import CompileError
from ndcompile.inputs import DynamicDims, Inputs
from ndcompile.loss import LossFn, with_loss
from ndcompile.mesh import MeshLike, MeshSpec
from ndcompile.pins import for_other_mode, read_pins
from ndcompile.precision import Precision
from ndcompile.program import Program, load_manifest
from ndcompile.remat import Remat, Reshard
from ndcompile.request import Asked, Request, check_halves, check_option, examples, skeleton
from ndcompile.runtime.agreement import together
from ndcompile.runtime.context import HOW
from ndcompile.runtime.module import ParallelModule


def compile(
    model: nn.Module,
    mesh: MeshLike,
    example_inputs: object = None,
    *,
    loss_fn: LossFn | None = None,
    precision: Precision | None = None,
    placements: Mapping[str, Mapping[str, Any]] | None = None,
    outputs: str = "sharded",
    float64: bool = False,
    dynamic_dims: DynamicDims | None = None,
    cp_attention: str | None = None,
    pad_inputs: bool = False,
    halves: bool = False,
    remat: Remat = None,
    reshard_after_forward: Reshard = True,
    world_size: int | None = None,
    dump: str | Path | None = None,
    cache: str | Path | None = None,
) -> Program:
    """Compile a model for a mesh. Needs no process group and no GPU; the model is left untouched and may be on meta.

    `example_inputs`: a dict of keyword inputs, a tuple of positional ones, or one tensor; their sizes mean nothing.
    `loss_fn(outputs, labels, …)` becomes part of the program, so that its means are those of the global batch: its
    first parameter takes what `forward` returns, each other one is an input by its name (`forward`'s own, or one more
    keyword of the emitted module), and what it returns is what the emitted module returns.
    `placements` pins parameters or modules by name or wildcard: `{"lm_head.weight": {"tp": nd.S(0)}}`.
    `outputs="local"` gathers results that an axis other than the data axes shards. `float64` widens every cast, for
    exact comparison. `dynamic_dims` says which input dims are the batch and the sequence: `{"pixels": {0: "b"}}`.
    `cp_attention` is how attention over `cp` brings queries and keys together: `"gather"` (keys and values are
    gathered), `"ring"` (they go round), `"heads"` (heads are sharded in place of the sequence); None: what sends least.
    With `pad_inputs` sequences of a length that the mesh does not divide get tokens at their end that change nothing,
    and results are cut back; a model in which that cannot be shown is refused.
    With `halves` each block computes two halves of a rank's batch in turn, so that one computes while the other's
    collectives over `tp` travel; a rank's batch must be even. Blocks in which samples meet stay whole, and the
    program's first lines say why; where none can be cut, or there is no `tp`, it is an error.
    `remat` is what backward recomputes: `"none"`, `"block"` (all of each block of an `nn.ModuleList`), or all but the
    results that it names, `("linear", "attention")`; or a dict of these by a block's name or wildcard. None: the blocks
    that the model itself checkpoints. `reshard_after_forward=False` keeps gathered weights for backward; a dict says it
    by block, `""` being all that is in none.
    `dump` is a folder for every pass's graph. `cache` is a folder where programs are kept for the next start, `"on"`
    (the user's own) or `"off"`; None: what the environment variable `NDCOMPILE_CACHE` says, else off. Raises
    `CompileError` where the model cannot be compiled as asked.

    >>> print(compile(nn.Linear(4, 6), "tp=2", torch.randn(3, 4)).parameters["weight"].layout)
    tp S(0)
    """
    model = model if loss_fn is None else with_loss(model, loss_fn)
    asked = _asked(
        precision, outputs, float64, dynamic_dims, cp_attention, pad_inputs, halves, remat, reshard_after_forward
    )  # fmt: skip
    request = _request(model, MeshSpec.parse(mesh, world_size), example_inputs, placements, asked)
    return program_of(request, store_of(cache), dump)


def _asked(
    precision: Precision | None,
    outputs: str,
    float64: bool,
    dynamic_dims: DynamicDims | None,
    cp_attention: str | None,
    pad_inputs: bool,
    halves: bool,
    remat: Remat,
    reshard: Reshard,
) -> Asked:
    """The options as they are asked for. Raises `CompileError` where one of them is none."""
    check_option("outputs", outputs, ("sharded", "local"))
    check_option("cp_attention", cp_attention, (None, *HOW))
    return Asked(
        precision or Precision(), outputs == "local", float64, dynamic_dims, cp_attention, pad_inputs, halves, remat,
        reshard,
    )  # fmt: skip


def _request(
    model: nn.Module,
    mesh: MeshSpec,
    example_inputs: object,
    placements: Mapping[str, Mapping[str, Any]] | None,
    asked: Asked,
) -> Request:
    if isinstance(model, ParallelModule):
        raise CompileError(
            "the model is a parallel one already",
            why="its parameters lie on a mesh, and it computes a program that was compiled",
            tries="the model that it was made from, which nd.parallelize leaves as it was",
        )
    check_halves(asked, mesh)
    example = Inputs.of(examples(model) if example_inputs is None else example_inputs)
    return Request(model, mesh, example, read_pins(placements, mesh), asked)


def parallelize(
    model: nn.Module,
    mesh: MeshLike,
    example_inputs: object = None,
    *,
    loss_fn: LossFn | None = None,
    precision: Precision | None = None,
    placements: Mapping[str, Mapping[str, Any]] | None = None,
    outputs: str = "sharded",
    float64: bool = False,
    dynamic_dims: DynamicDims | None = None,
    cp_attention: str | None = None,
    pad_inputs: bool = False,
    halves: bool = False,
    remat: Remat = None,
    reshard_after_forward: Reshard = True,
    cache: str | Path | None = None,
    init: str = "check",
    cuda_graph: bool = False,
    transport: str = "nccl",
) -> ParallelModule:
    """Compile a model and bind it to this process's place on the mesh; run by every rank alike, under torchrun.

    `init="check"` compares the parameters of all ranks and raises if they differ, `"broadcast"` takes rank 0's. A model
    on the meta device gets its parameters sharded from the start, filled with zeros. One rank compiles for all.
    `cuda_graph=True` records a training step after the first ones, and replays it: inputs then have fixed shapes, only
    the program's own losses have gradients, and each step's gradients lie in the same memory. `transport` is how
    weights, gradients and activations travel: `"nccl"` (torch.distributed's collectives) or `"symmetric"` (copies
    between the memories of one host's ranks). See `compile` for the rest.
    """
    bind.join_world()
    if cuda_graph:
        together(require_recordable)
    model = model if loss_fn is None else together(lambda: with_loss(model, loss_fn))
    check_option("init", init, ("check", "broadcast"))
    check_option("transport", transport, bind.TRANSPORTS)
    world, store = torch.distributed.get_world_size(), store_of(cache)

    def asked_for() -> Request:
        asked = _asked(
            precision, outputs, float64, dynamic_dims, cp_attention, pad_inputs, halves, remat, reshard_after_forward
        )  # fmt: skip
        return _request(model, MeshSpec.parse(mesh, world), example_inputs, placements, asked)

    request = together(asked_for)
    program = program_for_all(request, store)
    spec, layouts = program.mesh, {name: parameter.layout for name, parameter in program.parameters.items()}
    example, asked = request.example, request.asked
    bare = skeleton(model)  # the whole model's memory is the caller's to keep or to free

    def other(training: bool) -> Program:
        """The program of the other mode, with the parameters where they lie already and modules as the user pinned."""
        pins = for_other_mode(read_pins(placements, spec), layouts)
        given = Request(bare.train(training), spec, example, pins, asked, of_other_mode=True)
        return program_of(given, store)

    module = bind.bind(program, model, mesh, other, init, transport)
    if cuda_graph:
        module.record()
    return module


def require_recordable() -> None:
    """Raise where a step cannot be recorded as a CUDA graph."""
    if bind.own_device().type != "cuda":
        raise CompileError(
            "cuda_graph=True, and this rank has no GPU of its own",
            why="a CUDA graph is recorded from a GPU's streams",
            tries="cuda_graph=False, or a process group over NCCL with a GPU for each rank",
        )


def load(
    path: str | Path, model: nn.Module | None = None, init: str = "check", transport: str = "nccl"
) -> ParallelModule:
    """Run a program that `Program.save` wrote, on this process's place on its mesh, without compiling.

    Parameters are the model's; without one they are zeros, for `load_state_dict`. `transport` is as in `parallelize`.
    """
    check_option("transport", transport, bind.TRANSPORTS)
    bind.join_world()
    source, manifest = together(lambda: load_manifest(path))
    if model is not None and type(model).__name__ != manifest.model:
        raise CompileError(
            f"{path} was compiled from {manifest.model}, not from {type(model).__name__}",
            tries="the model that it was compiled from, or none",
        )
    return bind.bind_loaded(source, manifest, model, init, transport, str(path))
