"""The module that users train: the model's own parameters and signature around an emitted program."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ndcompile.runtime import private
from ndcompile.runtime.agreement import together
from ndcompile.runtime.block import Root
from ndcompile.runtime.compared import Compared
from ndcompile.runtime.gradient import scale_gradient
from ndcompile.runtime.lengths import Grown, grown, lengthened, result
from ndcompile.runtime.manifest import InputPlan, Manifest
from ndcompile.runtime.mesh import Mesh
from ndcompile.runtime.parts import own_part
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

    def __init__(
        self, mesh: Mesh, device_mesh: Any, make: Callable[[ParallelModule, bool], tuple[Root, Manifest]]
    ) -> None:
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
        self._compared = Compared(mesh.spec)
        self.register_load_state_dict_pre_hook(_take_parts)
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

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        """A model of its own on the same mesh, with copies of the parameters and buffers: for their moving average,
        say.
        """
        made = memo[id(self)] = type(self)(self._mesh, self._device_mesh, self._make)
        own = vars(made).keys() - vars(nn.Module()).keys()
        vars(made).update(copy.deepcopy({k: v for k, v in vars(self).items() if k not in own}, memo))
        made._compile_options, made._records = self._compile_options, self._records
        made._frozen = {name: made.get_parameter(name) for name in self._frozen}
        made.hold()
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a parallel model cannot be pickled\n"
            "  why  it has process groups, and parts of parameters of which other ranks have the rest\n"
            "  try  torch.distributed.checkpoint with its state_dict(), and program.save() for the program"
        )

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
        gradient, and an optimizer's step is an error. The model's `zero_grad` drops what is held back; an optimizer's
        does not.
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
            with torch.inference_mode(False):  # what a program keeps is for all modes
                found = self._make(self, self.training)
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
            self._compared.later(manifest, tensors)
        else:
            tensors = together(lambda: self._accept(manifest, args, kwargs))
            self._compared.first(manifest, tensors, self._tensors())
            self._checked = True
        local = [self._local(plan, x) for plan, x in zip(manifest.input_plans, tensors, strict=True)]
        longer = grown(manifest, local)
        local = lengthened(manifest, local, longer)
        return ([*local, draw_key(local[0].device)] if manifest.random else local), longer

    def _local(self, plan: InputPlan, x: Tensor) -> Tensor:
        """This rank's tensor of an input. What other modules computed of this rank's batch gets the gradient of this
        rank's own loss, as DDP has it: whatever reduces their parameters' gradients takes the mean over ranks.
        """
        over = x.device_mesh.mesh_dim_names or () if private.is_distributed(x) else ()
        computed = x.requires_grad and x.grad_fn is not None and "b" in plan.dims
        x = x.to_local() if private.is_distributed(x) else x
        if not computed or self._data_ranks == 1 or any(axis.startswith("dp_") for axis in over):
            return x
        return scale_gradient(x, self._data_ranks)

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
        return {name: (id(x), x.dtype) for name, x in self._tensors().items()}

    def _tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers, as errors name them."""
        found: dict[str, Tensor] = {f"parameter '{name}'": p for name, p in self.named_parameters()}
        return found | {f"buffer '{name}'": b for name, b in self.named_buffers()}

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
            if part.training != self.training:
                raise CallError(
                    f"module '{self._path(part)}' is in {_mode(part)}, and the whole model in {_mode(self)}\n"
                    f"  why  a program computes all of the model in one mode, that of the whole\n"
                    f"  try  the module's own mode before nd.parallelize, which then is part of the program\n"
                    f"  try  {_mode(self)} of the whole model, for its parts too"
                )
            forward, backward = part._forward_hooks or part._forward_pre_hooks, part._backward_hooks
            if forward or backward or part._backward_pre_hooks:
                raise CallError(
                    f"module '{self._path(part)}' has a hook\n"
                    f"  why  the emitted module makes no inner calls that a hook could see\n"
                    f"  try  a hook on the whole model, or write its effect into the model before it is compiled"
                )

    def _path(self, part: nn.Module) -> str:
        return next(path for path, module in self.named_modules() if module is part)

    def _refuse_gradients(self, manifest: Manifest, tensors: Sequence[Tensor]) -> None:
        """Refuse what requires a gradient now and did not when the model was compiled."""
        if not torch.is_grad_enabled():
            return
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise CallError(
                    f"parameter '{name}' requires a gradient, and did not when the model was compiled\n"
                    f"  why  the program reduces no gradient on the way to what was frozen\n"
                    f"  try  requires_grad_(True) before nd.parallelize; freeze it afterwards, and train it at any time"
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

    @torch.compiler.disable
    def _finish(self, manifest: Manifest, results: tuple[Any, ...], longer: Grown) -> Any:
        ends = manifest.ends or [[]] * len(manifest.outputs)
        leaves = [
            result(value, axes, own, longer, self._mesh, self._device_mesh)
            for value, axes, own in zip(results, manifest.outputs, ends, strict=True)
        ]
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(_refuse_second_derivative)
        return pytree.tree_unflatten(leaves, manifest.output_spec)


def _take_parts(module: ParallelModule, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before a state dict is loaded: of each whole tensor, as one device has it, this rank's part."""
    plans, aliases = module.program.parameters, module.program.aliases
    for name, parameter in module.named_parameters(remove_duplicate=False):
        value = state.get(prefix + name)
        if isinstance(value, Tensor) and not private.is_distributed(value) and value.shape == parameter.shape:
            part = own_part(value.detach(), plans[aliases.get(name, name)].dims, module._mesh)
            part = part.to(private.local(parameter), copy=True).contiguous()
            state[prefix + name] = private.distributed_like(part, parameter)


def _refuse_second_derivative(gradient: Tensor) -> None:
    """A hook of results, which autograd calls with gradients enabled exactly if it is to differentiate its backward."""
    if torch.is_grad_enabled():
        raise CallError(
            "create_graph=True in a backward through a parallel model\n"
            "  why  what its backward sends has no derivative, so that a gradient of its gradient would lack parts\n"
            "  try  the same without create_graph; a penalty on gradients needs a model that is not parallelized"
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


def _mode(module: nn.Module) -> str:
    return "train()" if module.training else "eval()"


def _check_autocast(device: str, compiled: torch.dtype | None) -> None:
    now = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    if now != compiled:
        told = [f"autocast to {dtype}" if dtype else "no autocast" for dtype in (now, compiled)]
        instead = f", or precision=nd.Precision(compute={now})" if now else ""
        raise CallError(
            f"the model is called under {told[0]}, but was compiled under {told[1]}\n"
            f"  why  casts are fixed when the model is compiled\n"
            f"  try  the same autocast around nd.parallelize{instead}"
        )


def class_for(signature: inspect.Signature) -> type[ParallelModule]:
    """`ParallelModule` with a `forward` that shows the model's signature."""

    def forward(self: ParallelModule, *args: Any, **kwargs: Any) -> Any:
        return ParallelModule.forward(self, *args, **kwargs)

    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY), *signature.parameters.values()]
    forward.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return type("ParallelModule", (ParallelModule,), {"forward": forward})
