"""Program + this process's place on the mesh → `ParallelModule` with DTensor parameters."""

from __future__ import annotations

import atexit
import hashlib
import inspect
import itertools
import linecache
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import cache
from types import CodeType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ndcompile.errors import CompileError
from ndcompile.mesh import GATHERED, MeshLike, MeshSpec, kind_of
from ndcompile.program import Program
from ndcompile.runtime import Mesh, Root, State, peers, private, use
from ndcompile.runtime.agreement import alike, everyones, together
from ndcompile.runtime.manifest import Manifest, ParameterPlan, as_dtype, digest
from ndcompile.runtime.module import ParallelModule, class_for
from ndcompile.runtime.parts import own_part
from ndcompile.runtime.symmetric import Symmetric
from ndcompile.runtime.transport import Collectives, Transport

TIMEOUT = timedelta(seconds=300)
TRANSPORTS = ("nccl", "symmetric")
"""How weights, gradients and activations may travel."""
SHARED = (
    "some parameters of the model are those of another parallel model too\n"
    "  why  each of the two has its own copy of them, and trains it\n"
    "  try  one model that holds both, and a forward that calls what is wanted"
)


def join_world() -> None:
    """Join the process group that torchrun's environment describes, if none is up; without one, say the command."""
    if dist.is_initialized():
        return
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise CompileError(
            "there is no process group, and this process was not started by torchrun",
            why="a parallel model needs one process a rank",
            tries=(
                "torchrun --nproc-per-node 2 your_script.py",
                "nd.compile(model, mesh, …) to see the program without running it",
            ),
        )
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, timeout=TIMEOUT)
    else:
        dist.init_process_group("gloo", timeout=TIMEOUT)


def bind(
    program: Program, model: nn.Module, mesh: MeshLike, other: Callable[[bool], Program], init: str,
    transport: str = "nccl",
) -> ParallelModule:  # fmt: skip
    """Shard the model's parameters and make the module; `other` compiles the program of the other mode."""
    given = mesh if isinstance(mesh, DeviceMesh) else None
    text = str(program)

    @cache
    def texts(training: bool) -> tuple[str, Manifest]:
        found = other(training)
        return str(found), found.manifest

    return _bind(text, program.manifest, model, inspect.signature(model.forward), init, transport, given, texts)


def bind_loaded(
    source: str, manifest: Manifest, model: nn.Module | None, init: str, transport: str, path: str
) -> ParallelModule:
    """The same for a saved program, which has one mode only."""

    def other(training: bool) -> tuple[str, Manifest]:
        raise CompileError(
            f"{path} holds the program for {'train' if manifest.training else 'eval'}() only",
            tries="save one in the other mode too, or nd.parallelize",
        )

    if model is None and manifest.buffers:
        raise CompileError(
            f"{path} has buffers, '{manifest.buffers[0]}' among them, and no model was given to take them from",
            why="without a model parameters are zeros until load_state_dict, and not all buffers are in a state dict",
            tries="nd.load(path, model); its parameters may be on the meta device",
        )
    return _bind(source, manifest, model, manifest.signature, init, transport, None, other)


@torch.inference_mode(False)  # parameters are made to be trained, wherever that is
def _bind(
    source: str,
    manifest: Manifest,
    model: nn.Module | None,
    signature: inspect.Signature,
    init: str,
    transport: str,
    device_mesh: DeviceMesh | None,
    other: Callable[[bool], tuple[str, Manifest]],
) -> ParallelModule:
    spec = together(lambda: MeshSpec.parse("" if manifest.mesh == "one rank" else manifest.mesh, dist.get_world_size()))
    _same_everywhere(source, manifest, model, init)
    together(lambda: _require_assumed(manifest, model))
    together(lambda: _require_buffers(model))
    device = own_device()
    _require_transport(transport, device)
    device_mesh = _part_of(device_mesh, spec) or _device_mesh(spec, device)
    atexit.register(private.let_go, device_mesh)
    mesh = Mesh.bound(spec, [tuple(axes) for axes in manifest.flattened], device_mesh, TIMEOUT)
    mesh = mesh.by_copies(device) if transport == "symmetric" else mesh
    whole: dict[str, Tensor] = {} if model is None else dict(model.named_parameters())

    def value(tensor: Tensor) -> Tensor:
        return _of_rank_0(tensor, device) if init == "broadcast" else tensor.detach()

    placed = {
        name: _distribute(value(whole[name]) if name in whole else None, plan, spec, mesh, device_mesh, device)
        for name, plan in manifest.parameters.items()
    }
    buffers = {} if model is None else {n: _whole(value(b), device) for n, b in model.named_buffers()}

    def make(module: ParallelModule, training: bool) -> tuple[Root, Manifest]:
        text, plan = (source, manifest) if training == manifest.training else other(training)
        parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
        return execute(text, plan, mesh, parameters, buffers, transport=transport_of(transport, mesh)), plan

    module = class_for(signature)(mesh, device_mesh, make)
    _fill(module, model, manifest, placed, buffers)
    if private.note_given([p for p in whole.values() if p.requires_grad], module) and dist.get_rank() == 0:
        warnings.warn(SHARED, stacklevel=3)
    module.train(manifest.training)
    module._program()
    return module


def transport_of(name: str, mesh: Mesh) -> Transport:
    """One of `TRANSPORTS`, for one program."""
    return Symmetric(mesh) if name == "symmetric" else Collectives()


def _require_transport(transport: str, device: torch.device) -> None:
    """All ranks ask for the same, and can have it."""
    alike(
        everyones(transport), "transports", "a rank that sends by collectives and one that copies wait for each other",
        "the same transport=… on every rank",
    )  # fmt: skip
    if transport == "symmetric":
        peers.require(device)


def _require_assumed(manifest: Manifest, model: nn.Module | None) -> None:
    """The buffers that gave masks their names hold what they held."""
    buffers = {} if model is None else dict(model.named_buffers())
    for name in manifest.assumed.keys() & buffers.keys():
        if not buffers[name].is_meta and digest(buffers[name]) != manifest.assumed[name]:
            raise CompileError(
                f"buffer '{name}' has other values than when the program was compiled",
                why="masks of attention were told by them, and are part of the program",
                tries="nd.compile again, with these values",
            )


def _require_buffers(model: nn.Module | None) -> None:
    """A buffer on the meta device is one that a state dict will bring."""
    buffers = {} if model is None else dict(model.named_buffers())
    brought = {} if model is None else model.state_dict()
    for name, buffer in buffers.items():
        if buffer.is_meta and name not in brought:
            raise CompileError(
                f"buffer '{name}' is on the meta device, and in no state dict",
                why="parameters get their values from load_state_dict, and this buffer from the model's __init__ alone",
                tries=(
                    "with accelerate.init_empty_weights(): in place of torch.device('meta'), which leaves buffers",
                    "the module that has the buffer made anew, outside of torch.device('meta')",
                ),
            )


def _whole(buffer: Tensor, device: torch.device) -> Tensor:
    """A copy of a buffer; zeros of one on the meta device."""
    return torch.zeros_like(buffer, device=device) if buffer.is_meta else buffer.to(device, copy=True)


def own_device() -> torch.device:
    """This rank's GPU where the process group talks between GPUs; gloo's ranks stay on the CPU, GPUs or not."""
    backends = str(dist.get_backend())
    on_gpus = torch.cuda.is_available() and ("nccl" in backends or "cuda" in backends)
    return torch.device("cuda", torch.cuda.current_device()) if on_gpus else torch.device("cpu")


def _part_of(given: DeviceMesh | None, spec: MeshSpec) -> DeviceMesh | None:
    """The user's mesh without its axes of size 1; None if its names are not ours."""
    if given is None or not spec.names or not set(spec.names) <= set(given.mesh_dim_names or ()):
        return None
    return given if given.mesh_dim_names == spec.names else given[spec.names]


def _device_mesh(spec: MeshSpec, device: torch.device) -> DeviceMesh:
    """The mesh of DTensors, with its axes flattened in all ways, so that a gradient norm is one reduction."""
    sizes, names = [axis.size for axis in spec.axes] or [1], list(spec.names) or ["one"]
    device_mesh = init_device_mesh(device.type, tuple(sizes), mesh_dim_names=tuple(names))
    for count in range(2, len(spec.axes) + 1):
        for axes in itertools.combinations(spec.names, count):
            private.flatten(device_mesh, axes)
    return device_mesh


def _same_everywhere(source: str, manifest: Manifest, model: nn.Module | None, init: str) -> None:
    """All ranks have one program, and (with `init="check"`) one set of values."""
    _same_program(source, manifest)
    without = model is None or any(p.is_meta for p in model.parameters())
    alike(
        ["on the meta device" if without else "with values" for without in everyones(without)], "models",
        "each rank gives its own copy's values", "values on every rank, or the meta device on every rank",
    )  # fmt: skip
    if model is None or without:
        return
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    if init == "broadcast":
        return
    sums = {name: _digest(t.detach()) for name, t in tensors.items()}
    everyone = everyones(sums)
    for name in tensors:
        alike(
            [theirs[name] for theirs in everyone], f"the values of '{name}'",
            "each rank shards its own copy, so all copies must be equal",
            "torch.manual_seed(0) before the model is made on every rank, or init='broadcast'",
        )  # fmt: skip


def _same_program(source: str, manifest: Manifest) -> None:
    """Every rank has the same text and plan; where not, the first thing that differs is shown."""
    data = manifest.to_json()
    digest = hashlib.sha256((source + str(data)).encode()).hexdigest()[:12]
    if len(set(everyones(digest))) == 1:
        return
    layouts = [_shown(name, plan) for name, plan in manifest.parameters.items()]
    told = [f"{manifest.model} on {manifest.mesh}", *layouts, *(f"{k} {v}" for k, v in data.items()), digest]
    theirs = everyones(told)
    rows = zip(*theirs, strict=False)
    alike(
        next((row for row in rows if len(set(row)) > 1), [len(t) for t in theirs]), "programs",
        "every rank must run the same program", "the same model, mesh, options and library versions on every rank",
    )  # fmt: skip


def _shown(name: str, plan: ParameterPlan) -> str:
    cuts = [f"dim {dim} on {', '.join(axes)}" for dim, axes in enumerate(plan.dims) if axes]
    return f"{name} {list(plan.shape)} {plan.dtype}, {'; '.join(cuts) or 'whole'}"


def _of_rank_0(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy with rank 0's values; the model keeps its own."""
    if tensor.is_meta:
        return tensor
    copied = tensor.detach().to(device, copy=True).contiguous()
    dist.broadcast(copied, 0)
    return copied


def _digest(tensor: Tensor) -> str:
    flat = tensor.contiguous().flatten().view(torch.uint8).cpu()
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:12]


def _distribute(
    whole: Tensor | None,
    plan: ParameterPlan,
    spec: MeshSpec,
    mesh: Mesh,
    device_mesh: DeviceMesh,
    device: torch.device,
) -> nn.Parameter:
    """This rank's part of a parameter as a DTensor; a meta tensor, or none, gives zeros of the local shape."""
    if whole is None or whole.is_meta:
        whole = torch.empty(plan.shape, dtype=as_dtype(plan.dtype), device="meta")
    part = own_part(whole.detach(), plan.dims, mesh)
    local = torch.zeros(part.shape, dtype=part.dtype, device=device) if part.is_meta else part.to(device, copy=True)
    local = local.contiguous()
    stride = torch.empty(plan.shape, device="meta").stride()
    tensor = DTensor.from_local(
        local, device_mesh, dtensor_placements(plan, spec), run_check=False, shape=torch.Size(plan.shape), stride=stride
    )
    return nn.Parameter(tensor, requires_grad=plan.requires_grad)


def dtensor_placements(plan: ParameterPlan, spec: MeshSpec) -> list[Any]:
    """The layout in torch's terms: where a later mesh axis is major on a dim, the earlier one is strided."""
    found: list[Any] = []
    for axis in spec.names or ("one",):
        dim = next((d for d, axes in enumerate(plan.dims) if axis in axes), None)
        if dim is None:
            found.append(Replicate())
            continue
        axes = plan.dims[dim]
        major = [a for a in axes[: axes.index(axis)] if spec.names.index(a) > spec.names.index(axis)]
        found.append(private.strided_shard(dim, spec.size(*major)) if major else Shard(dim))
    return found


def _fill(
    module: ParallelModule,
    model: nn.Module | None,
    manifest: Manifest,
    placed: Mapping[str, nn.Parameter],
    buffers: Mapping[str, Tensor],
) -> None:
    """Put parameters and buffers in a tree of containers with the model's own names."""
    aliases = {name: placed[first] for name, first in manifest.aliases.items()}
    order = list(placed) if model is None else [n for n, _ in model.named_parameters(remove_duplicate=False)]
    for name in order:
        owner, leaf = _container(module, name)
        owner.register_parameter(leaf, placed[name] if name in placed else aliases[name])
    persistent = set(model.state_dict()) if model is not None else set()
    for name, buffer in buffers.items():
        owner, leaf = _container(module, name)
        owner.register_buffer(leaf, buffer, persistent=name in persistent)
    module.hold()
    module.freeze()


def _container(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    *path, leaf = name.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module._modules[part]  # type: ignore[assignment]
    return module, leaf


def execute(
    source: str,
    manifest: Manifest,
    mesh: Mesh,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    without: frozenset[str] = frozenset(),
    transport: Transport | None = None,
    code: Callable[[str, str], CodeType] | None = None,
) -> Root:
    """Run the emitted text as a module (tracebacks show its lines) and make its root, without some of its blocks.

    Weights travel by `transport`, which gets what memory it needs; by default by collectives. `code` is asked in the
    place of `code_of`.
    """
    transport = transport or Collectives()
    name = f"<ndcompile {manifest.root} {hashlib.sha256(source.encode()).hexdigest()[:8]}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    module = ModuleType(f"ndcompile_emitted_{manifest.root}_{next(_EXECUTED)}")
    with use(mesh):
        exec((code or code_of)(source, name), vars(module))
    shapes = {n: _shape_in_compute(plan, mesh) for n, plan in manifest.parameters.items()}
    state = State(
        mesh, parameters, buffers, shapes,
        as_dtype(manifest.compute), as_dtype(manifest.reduce), without=without, transport=transport,
    )  # fmt: skip
    root = vars(module)[manifest.root](state)
    transport.open(state.device)
    assert isinstance(root, Root), f"{manifest.root} is the emitted root"
    sys.modules[module.__name__] = module  # where torch.compile looks for what inlined functions read
    weakref.finalize(root, sys.modules.pop, module.__name__, None)
    return root


_EXECUTED = itertools.count()


def code_of(source: str, name: str) -> CodeType:
    """The text for Python. torch.compile puts what it makes of a function beside the code of it, so that each module
    that may be compiled has code of its own.
    """
    return compile(source, name, "exec")


def _shape_in_compute(plan: ParameterPlan, mesh: Mesh) -> tuple[int, ...]:
    """Whole along the axes that are gathered; this rank's part along the others."""
    shape = list(plan.shape)
    for dim, axes in enumerate(plan.dims):
        for axis in axes:
            if kind_of(axis) not in GATHERED:
                shape[dim] = mesh[axis].part(shape[dim])
    return tuple(shape)
