"""The module that users train: the model's own parameters and signature around an emitted program."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ndcompile.runtime import private
from ndcompile.runtime.agreement import Disagreement, everyones, together
from ndcompile.runtime.block import Root
from ndcompile.runtime.lengths import Grown, grown, lengthened, result
from ndcompile.runtime.manifest import InputPlan, Manifest
from ndcompile.runtime.mesh import Mesh
from ndcompile.runtime.random import draw_key
from ndcompile.runtime.recorded import Recorder

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class CallError(ValueError):
    """A call that the program was not compiled for."""


class ParallelModule(nn.Module):
    """A model on a mesh: same forward signature, same parameter names; parameters are DTensors.

    Each rank passes its own data-parallel batch. Scalar results are those of one device on the global batch; other
    results are this rank's batch, and DTensors over the axes that shard them further. Programs for `train()` and
    `eval()` are compiled on first use. Raises `CallError`, before anything runs, where a call does not fit.
    """

    def __init__(self, mesh: Mesh, device_mesh: Any, make: Callable[[bool], tuple[Root, Manifest]]) -> None:
        super().__init__()
        self._mesh, self._device_mesh, self._make = mesh, device_mesh, make
        self._programs: dict[bool, tuple[Root, Manifest]] = {}
        self._compile_options: dict[str, Any] | None = None
        self._recorder: Recorder | None = None
        self._records = False
        self._held: Mapping[str, object] = {}
        self._frozen: Mapping[str, Tensor] = {}
        self._parts: list[nn.Module] = []
        self._as_held: list[object] = []
        self._checked = False
        self._data_ranks = math.prod(axis.size for axis in mesh.spec.axes if axis.kind.startswith("dp_"))

    def __init_subclass__(cls) -> None:
        cls.forward = torch.compiler.disable(cls.forward, recursive=False)  # type: ignore[method-assign]

    @torch.compiler.disable(recursive=False)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        root, manifest = self._program()
        tensors, longer = self._prepare(manifest, args, kwargs)
        with torch.autocast(tensors[0].device.type, enabled=False):
            results = self._runner(root)(*tensors)
        return self._finish(manifest, results, longer)

    def compile(self, *args: Any, **options: Any) -> None:
        """As `nn.Module.compile`: every distinct block's `compute` is compiled once."""
        if args:
            raise CallError("compile takes options by keyword only")
        self._compile_options = options
        self._recorder = None  # what it has recorded is not compiled
        for root, _ in self._programs.values():
            type(root).compile(bool(self._mesh.wires), **options)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Forwards inside are of microbatches that are not the last: the last one is called outside.

        Gradients are then not reduced over the axes on which parameters are whole (`dp_replicate`, and `tp` or `cp`
        for some); the backward of the last microbatch reduces the sum. Until then those parameters have no new
        gradient, and an optimizer's step is an error.
        """
        if self._records:
            raise CallError(
                "accumulate() of a recorded model\n"
                "  why  the CUDA graph of a step reduces every gradient\n"
                "  try  nd.parallelize without cuda_graph, or backward for each microbatch without accumulate()"
            )
        state = self._program()[0]._state
        before, state.accumulating = state.accumulating, True
        try:
            yield
        finally:
            state.accumulating = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `nn.Module.zero_grad`; what `accumulate` holds back is dropped too."""
        super().zero_grad(set_to_none)
        for root, _ in self._programs.values():
            root._state.drop_deferred()

    def record(self) -> None:
        """Run training steps as CUDA graphs, recorded after the first ones."""
        self._records = True

    @property
    def replays(self) -> bool:
        """Whether training steps are replayed by now: the first ones are not, nor any without `cuda_graph=True`."""
        return self._recorder is not None and self._recorder.has_tape

    @torch.compiler.disable
    def _runner(self, root: Root) -> Callable[..., tuple[Any, ...]]:
        if not self._records or not self.training:
            return root
        if self._recorder is None:
            self._recorder = Recorder(root)
        return self._recorder

    @property
    def program(self) -> Manifest:
        """What the program for the present mode expects and gives."""
        return self._program()[1]

    @torch.compiler.disable
    def _program(self) -> tuple[Root, Manifest]:
        if self.training not in self._programs:
            found = self._make(self.training)
            if self._compile_options is not None:
                type(found[0]).compile(bool(self._mesh.wires), **self._compile_options)
            self._programs[self.training] = found
        return self._programs[self.training]

    @torch.compiler.disable
    def _prepare(
        self, manifest: Manifest, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[list[Tensor], Grown]:
        """What the program takes, and which sequences got pads."""
        if self._checked:
            tensors = self._accept(manifest, args, kwargs)
        else:
            tensors = together(lambda: self._accept(manifest, args, kwargs))
            self._check_ranks(manifest, tensors)
            self._checked = True
        local = [t.to_local() if private.is_distributed(t) else t for t in tensors]
        longer = grown(manifest, local)
        local = lengthened(manifest, local, longer)
        return ([*local, draw_key(local[0].device)] if manifest.random else local), longer

    def _accept(self, manifest: Manifest, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensor inputs of a call. Raises ValueError where this rank alone can tell that it does not fit."""
        self._refuse_changes()
        tensors = manifest.tensors(args, kwargs)
        self._refuse_gradients(manifest, tensors)
        _check_autocast(tensors[0].device.type, manifest.autocast)
        manifest.check(tensors)
        if manifest.conditions:
            manifest.check_ways(self._sizes(manifest, tensors))
        for plan, tensor in zip(manifest.input_plans, tensors, strict=True):
            if private.is_distributed(tensor):
                _check_placements(plan, tensor)
        return tensors

    def _sizes(self, manifest: Manifest, tensors: Sequence[Tensor]) -> dict[str, int]:
        """The global sizes of a call by their symbols, with pads."""
        sizes = manifest.lengths(tensors) | {symbol: to for symbol, (_, to) in grown(manifest, tensors).items()}
        for plan, x in zip(manifest.input_plans, tensors, strict=True):
            if "b" in plan.dims:
                sizes["b"] = x.shape[plan.dims.index("b")] * (1 if private.is_distributed(x) else self._data_ranks)
        return sizes

    def freeze(self) -> None:
        """Take the parameters that have no gradient now for those of which the program reduces none."""
        self._frozen = {name: p for name, p in self.named_parameters() if not p.requires_grad}

    def hold(self) -> None:
        """Take the present parameters and buffers for those that the program is bound to."""
        self._held, self._parts = self._present(), list(self.modules())
        self._as_held = self._at_a_glance()

    def _present(self) -> Mapping[str, object]:
        parameters = {f"parameter '{name}'": (id(p), p.dtype) for name, p in self.named_parameters()}
        return parameters | {f"buffer '{name}'": (id(b), b.dtype) for name, b in self.named_buffers()}

    def _at_a_glance(self) -> list[object]:
        """What changes whenever `_present` does, in a tenth of its time."""
        held: list[object] = []
        for part in self._parts:
            for tensor in (*part._parameters.values(), *part._buffers.values()):
                held += (id(tensor), None if tensor is None else tensor.dtype)
            held += map(id, part._modules.values())
        return held

    def _refuse_changes(self) -> None:
        if self._at_a_glance() != self._as_held:
            self._refuse_other_tensors()
            self.hold()  # a module without tensors came or went
        for part in self._parts[1:]:
            forward, backward = part._forward_hooks or part._forward_pre_hooks, part._backward_hooks
            if forward or backward or part._backward_pre_hooks:
                path = next(path for path, module in self.named_modules() if module is part)
                raise CallError(
                    f"module '{path}' has a hook\n"
                    f"  why  the emitted module makes no inner calls that a hook could see\n"
                    f"  try  a hook on the whole model, or write its effect into the model before it is compiled"
                )

    def _refuse_gradients(self, manifest: Manifest, tensors: Sequence[Tensor]) -> None:
        """Refuse what requires a gradient now and did not when the model was compiled."""
        if not torch.is_grad_enabled():
            return
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise CallError(
                    f"parameter '{name}' requires a gradient, and did not when the model was compiled\n"
                    f"  why  the program reduces no gradient on the way to what was frozen\n"
                    f"  try  requires_grad_(True) before nd.parallelize; it may be frozen afterwards, and again be trained"
                )
        for plan, x in zip(manifest.input_plans, tensors, strict=True):
            if x.requires_grad and not plan.grad:
                raise CallError(
                    f"input '{plan.name}' requires a gradient, and did not in the example inputs\n"
                    f"  why  the program reduces no gradient on the way to it\n"
                    f"  try  example_inputs in which it requires one; a call without is fine then\n"
                    f"  try  {plan.name}.detach(), if none is wanted"
                )

    def _refuse_other_tensors(self) -> None:
        held = self._present()
        changed = sorted(n for n in held.keys() | self._held.keys() if held.get(n) != self._held.get(n))
        if changed:
            raise CallError(
                f"{changed[-1]} was replaced after the model was compiled\n"
                f"  why  the program uses the tensors that it was bound to\n"
                f"  try  copy_(…) under torch.no_grad(), load_state_dict, or the change before nd.parallelize"
            )

    def _check_ranks(self, manifest: Manifest, tensors: list[Tensor]) -> None:
        """On the first call: equal inputs on ranks that share a batch, equal batch sizes and other inputs on all."""
        everyone = everyones([(tuple(t.shape), str(t.dtype), _checksum(t)) for t in tensors])
        spec = self._mesh.spec
        data = [axis.name for axis in spec.axes if axis.kind.startswith("dp_")]
        shared = " and ".join(dict.fromkeys(axis.kind for axis in spec.axes if axis.name not in data))
        for rank, theirs in enumerate(everyone):
            place = spec.coordinate(rank)
            peer = spec.rank({name: place[name] if name in data else 0 for name in spec.names})
            for plan, *held in zip(manifest.input_plans, theirs, everyone[peer], everyone[0], strict=True):
                _refuse_other_input(plan, held, rank, peer, shared)
        if data and torch.distributed.get_rank() == 0 and all(theirs == everyone[0] for theirs in everyone):
            warnings.warn(SAME_BATCH, stacklevel=2)

    @torch.compiler.disable
    def _finish(self, manifest: Manifest, results: tuple[Any, ...], longer: Grown) -> Any:
        ends = manifest.ends or [[]] * len(manifest.outputs)
        leaves = [
            result(value, axes, own, longer, self._mesh, self._device_mesh)
            for value, axes, own in zip(results, manifest.outputs, ends, strict=True)
        ]
        return pytree.tree_unflatten(leaves, manifest.output_spec)


SAME_BATCH = (
    "all data-parallel ranks have the same batch\n"
    "  why  each is to have its own part of the global batch, in which these samples now stand several times\n"
    "  try  shard the loader by the data-parallel index"
)


def _refuse_other_input(plan: InputPlan, held: Sequence[Any], rank: int, peer: int, shared: str) -> None:
    """Compare one input's shape, dtype and checksum: a rank's, the first's that shares its batch, rank 0's."""
    mine, first, zeroth = held
    if mine != first:
        raise Disagreement(
            f"input '{plan.name}' differs between ranks {peer} and {rank}, which share one data-parallel batch\n"
            f"  why  ranks that differ only in {shared} work on the same samples\n"
            f"  try  seed the loader by the data-parallel index, not by the rank"
        )
    if mine[:2] != zeroth[:2]:
        raise Disagreement(
            f"input '{plan.name}' is {list(mine[0])} on rank {rank} and {list(zeroth[0])} on rank 0\n"
            f"  why  every data-parallel rank must have a batch of the same size\n"
            f"  try  drop_last=True, or pad the last batch"
        )
    if mine != zeroth and "b" not in plan.dims:
        raise Disagreement(
            f"input '{plan.name}' differs between ranks 0 and {rank}\n"
            f"  why  it has no batch, so the program takes it to be the same on every rank\n"
            f"  try  the global one: a count of tokens is the sum over data-parallel ranks"
        )


def _check_placements(plan: InputPlan, tensor: DTensor) -> None:
    """A DTensor is taken as it is, so it must lie as the program takes it: cut on its batch by data axes, or whole."""
    batch = plan.dims.index("b") if "b" in plan.dims else None
    for axis, placement in zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=False):
        cut = axis.startswith("dp_") and batch is not None
        if not (placement.is_shard(batch) if cut else placement.is_replicate()):
            wanted = f"Shard(dim={batch})" if cut else "Replicate()"
            raise CallError(
                f"input '{plan.name}' is a DTensor that is {placement!r} on axis '{axis}'\n"
                f"  why  the program takes it {wanted} there, and DTensor inputs are taken as they are\n"
                f"  try  redistribute it to {wanted}"
            )


def _check_autocast(device: str, compiled: torch.dtype | None) -> None:
    now = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    if now != compiled:
        raise CallError(
            f"the model is called under autocast to {now}, but was compiled under autocast to {compiled}\n"
            f"  why  casts are fixed when the model is compiled\n"
            f"  try  the same autocast around nd.parallelize, or precision=nd.Precision(compute={now})"
        )


def _checksum(tensor: Tensor) -> float:
    plain = private.local(tensor).detach().double().flatten()
    weights = torch.arange(1, plain.numel() + 1, device=plain.device, dtype=plain.dtype).remainder_(8191)
    return float((plain * weights).sum())


def class_for(signature: inspect.Signature) -> type[ParallelModule]:
    """`ParallelModule` with a `forward` that shows the model's signature."""

    def forward(self: ParallelModule, *args: Any, **kwargs: Any) -> Any:
        return ParallelModule.forward(self, *args, **kwargs)

    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY), *signature.parameters.values()]
    forward.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return type("ParallelModule", (ParallelModule,), {"forward": forward})
