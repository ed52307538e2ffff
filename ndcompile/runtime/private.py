"""Every private torch API that ndcompile uses, behind small functions: the one file to look at when torch moves."""

from __future__ import annotations

import functools
import inspect
import math
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_ops = torch.ops._c10d_functional


def wait(x: Tensor) -> Tensor:
    """The finished result of a collective that was started: the same tensor, or a functional copy when traced."""
    return _ops.wait_tensor.default(x)


def _of_reals(start: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Complex numbers travel as pairs of real ones: gloo exchanges no others, and NCCL has none."""

    @functools.wraps(start)
    def started(x: Tensor, *given: Any) -> Tensor:
        if not x.is_complex():
            return start(x, *given)
        return torch.view_as_complex(start(torch.view_as_real(x.resolve_conj()), *given))

    return started


@_of_reals
def start_all_reduce(x: Tensor, op: str, group: str) -> Tensor:
    """Start the reduction of `x` by `op` (sum, max, min) over a group; a new tensor that `wait` makes readable."""
    return _ops.all_reduce.default(x, op, group)


@_of_reals
def start_all_gather(x: Tensor, ranks: int, group: str) -> Tensor:
    """Start the gather `[n, …] → [ranks · n, …]`, in rank order along dim 0."""
    return _ops.all_gather_into_tensor.default(x, ranks, group)


@_of_reals
def start_reduce_scatter(x: Tensor, ranks: int, group: str) -> Tensor:
    """Start the sum of `x` over a group, of which this rank keeps its part: `[ranks · n, …] → [n, …]`."""
    return _ops.reduce_scatter_tensor.default(x, "sum", ranks, group)


def start_all_gather_each(xs: Sequence[Tensor], ranks: int, group: str) -> list[Tensor]:
    """`start_all_gather` of each of several tensors, as one collective."""
    with _below_autograd():
        return _ops.all_gather_into_tensor_coalesced.default(list(xs), ranks, group)


def start_reduce_scatter_each(xs: Sequence[Tensor], ranks: int, group: str) -> list[Tensor]:
    """`start_reduce_scatter` of each of several tensors, as one collective."""
    with _below_autograd():
        return _ops.reduce_scatter_tensor_coalesced.default(list(xs), "sum", ranks, group)


def wait_each(xs: Sequence[Tensor]) -> list[Tensor]:
    """`wait` for each of several tensors."""
    with _below_autograd():
        return [wait(x) for x in xs]


def _below_autograd() -> AbstractContextManager[None]:
    """For collectives that nothing differentiates or traces: torch 2.13 does autograd in Python for each of them."""
    return torch._C._AutoDispatchBelowAutograd()


def all_reduce_in_place(x: Tensor, group: str) -> Tensor:
    """The sum of `x` over a group, in its own memory."""
    with _below_autograd():
        return wait(_ops.all_reduce_.default(x, "sum", group))


def copy_each(to: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy each value to its place, with a cast; on a GPU by few kernels."""
    if to[0].is_cuda:
        torch._foreach_copy_(list(to), list(values))
        return
    for place, value in zip(to, values, strict=True):
        place.copy_(value)


@_of_reals
def start_all_to_all(x: Tensor, ranks: int, group: str) -> Tensor:
    """Start the exchange of equal parts of dim 0: part `j` goes to rank `j`; `[ranks · n, …] → [ranks · n, …]`."""
    parts = [x.shape[0] // ranks] * ranks
    return _ops.all_to_all_single.default(x, parts, parts, group)


@_of_reals
def start_exchange(x: Tensor, sent: Sequence[int], received: Sequence[int], group: str) -> Tensor:
    """Start an exchange of unequal parts of dim 0: rank `j` gets the next `sent[j]` entries and sends `received[j]`."""
    return _ops.all_to_all_single.default(x, list(received), list(sent), group)


def start_shift(x: Tensor, ranks: int, index: int, group: str) -> Tensor:
    """Start to send `x` to the next rank of a ring, and to receive the same shape from the one before."""
    sent, received = [0] * ranks, [0] * ranks
    sent[(index + 1) % ranks] = received[(index - 1) % ranks] = x.shape[0]
    return start_exchange(x, sent, received, group)


def cast(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """`x` in another dtype; without a change of dtype no op is called.

    Dynamo 2.11 loses the gradient of an autograd function whose output passed a `to` that did nothing.
    """
    return x if dtype is None or x.dtype == dtype else x.to(dtype)


def is_distributed(x: Tensor) -> TypeGuard[DTensor]:
    """Whether `x` is a DTensor."""
    return type(x) is not Tensor and hasattr(x, "_local_tensor") and hasattr(x, "_spec")


def local(x: Tensor) -> Tensor:
    """This rank's tensor of a DTensor, without dispatch and without autograd; a plain tensor is its own, detached."""
    return x._local_tensor.detach() if is_distributed(x) else x.detach()


def distributed_like(x: Tensor, like: Tensor) -> Tensor:
    """Local tensor `x` as a DTensor with the mesh, placements, global shape and stride of `like`; a plain one is `x`.

    Without autograd, and so in a tenth of the time of `DTensor.from_local`.
    """
    if not is_distributed(like):
        return x
    from torch.distributed.tensor import DTensor

    return DTensor.__new__(DTensor, x, like._spec, requires_grad=False)  # its __init__ does nothing, behind wrappers


def distributed(x: Tensor, device_mesh: DeviceMesh, sharded: Mapping[str, Sequence[int]]) -> Tensor:
    """Local tensor `x` as a DTensor on the sub-mesh of the axes that shard it; differentiable.

    `sharded` gives for each axis the dim and its whole size (0: equal parts).
    """
    from torch.distributed.tensor import DTensor, Shard

    axes, shape = tuple(sharded), list(x.shape)
    parts = device_mesh[axes if len(axes) > 1 else axes[0]]
    for number, (dim, size) in enumerate(sharded.values()):
        shape[dim] = size or shape[dim] * parts.size(number)
    stride = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    placements = [Shard(dim) for dim, _ in sharded.values()]
    return DTensor.from_local(x, parts, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride))


def version(x: Tensor) -> int:
    """A number that grows when a tensor's values change: by its in-place operations and by optimizer steps.

    A DTensor has its own count of operations and that of its local tensor. Fused and foreach operations on DTensors
    raise neither, so steps of optimizers are counted too.
    """
    own = getattr(x, "_local_tensor", None)
    return x._version + (0 if own is None else own._version) + getattr(x, _STEPS, 0)


_STEPS = "_ndcompile_steps"


def _count_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if is_distributed(parameter):
                setattr(parameter, _STEPS, getattr(parameter, _STEPS, 0) + 1)


register_optimizer_step_post_hook(_count_step)


class UnfinishedGradients(RuntimeError):
    """An optimizer was to step while gradients were held back by `accumulate`."""


def owe(parameter: Tensor, owed: bool) -> None:
    """Note that a part of the parameter's gradient is held back, or that it no longer is."""
    setattr(parameter, _OWED, owed)


_OWED = "_ndcompile_owed"


def _refuse_unfinished(optimizer: Optimizer, args: object, kwargs: object) -> None:
    if any(getattr(p, _OWED, False) for group in optimizer.param_groups for p in group["params"]):
        raise UnfinishedGradients(
            "step of an optimizer before the last microbatch\n"
            "  why  gradients of the microbatches under accumulate() have not been reduced\n"
            "  try  the forward of the last microbatch outside of accumulate(), and its backward before the step"
        )


register_optimizer_step_pre_hook(_refuse_unfinished)


class LeftBehind(ValueError):
    """An optimizer was to step on parameters of a model whose parallel one is trained."""


_GIVEN: weakref.WeakKeyDictionary[object, Mapping[int, Tensor]] = weakref.WeakKeyDictionary()


def note_given(parameters: Iterable[Tensor], taker: object) -> bool:
    """Note that `taker` has parameters made of these; whether another has some made of these, beside others."""
    held = weakref.WeakValueDictionary({id(p): p for p in parameters})
    others = [given for given in _GIVEN.values() if set(given) != set(held)]
    _GIVEN[taker] = held
    return any(given.get(number) is p for given in others for number, p in held.items())


def _refuse_left_behind(optimizer: Optimizer, args: tuple[object, ...], kwargs: object) -> None:
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if len(args) > 1 or kwargs or any(p.grad is not None for p in held):
        return  # a closure makes gradients; with gradients these are parameters that something trains
    if any(given.get(id(p)) is p for given in _GIVEN.values() for p in held):
        raise LeftBehind(
            "step of an optimizer over the parameters of the model that nd.parallelize was given\n"
            "  why  they have no gradients: the parallel model has parameters of its own, which are trained\n"
            "  try  the optimizer after nd.parallelize, over the parallel model's parameters()"
        )


register_optimizer_step_pre_hook(_refuse_left_behind)


def strided_shard(dim: int, parts: int) -> object:
    """The placement of an axis that shards each of the `parts` that a later, major axis makes of `dim`."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=parts)


def flatten(device_mesh: DeviceMesh, axes: tuple[str, ...]) -> None:
    """Give a device mesh a process group over several of its axes together, which DTensor then finds by itself."""
    device_mesh[axes]._flatten("_".join(axes))


def let_go(device_mesh: DeviceMesh) -> None:
    """Drop the mesh's process groups: torch's caches keep the mesh of every DTensor, and through it their threads.

    A gloo thread that frees a tensor while the interpreter ends aborts the process.
    """
    getattr(device_mesh, "_pg_registry", {}).clear()


def store() -> torch._C._distributed_c10d.Store:
    """Where the ranks of the world may leave a few words for each other."""
    return dist.distributed_c10d._get_default_store()


def group_name(group: dist.ProcessGroup) -> str:
    """The name by which functional collectives find a group."""
    return group.group_name


def functions_of_sizes() -> Any:
    """The tracer's own functions in sizes, such as `FloorDiv` and `Mod`. They bring sympy, which not all need."""
    from torch.utils._sympy import functions

    return functions


def asked_of_sizes(size: torch.SymInt) -> Iterator[tuple[Any, bool]]:
    """What a trace asked of its sizes, as expressions that are true of it, and whether torch's own code asked."""
    known = size.node.shape_env
    for guard in known.guards:
        yield known.replace(guard.expr), _is_torchs(guard.sloc.framework_loc)


def fixed_at(value: Tensor, size: int) -> traceback.FrameSummary | None:
    """The line of a traced model that made a number of a length, so that it is this one in all that is traced."""
    known = value.fake_mode.shape_env  # type: ignore[attr-defined]
    for guard in known.guards:
        if guard.expr.is_Equality and guard.expr.lhs.is_Symbol and guard.expr.rhs == size:
            return None if _is_torchs(guard.sloc.framework_loc) else guard.sloc.framework_loc
    return None


def _is_torchs(place: traceback.FrameSummary | None) -> bool:
    return place is not None and Path(torch.__file__).parent in Path(place.filename).parents


def bounds(size: Any, ranges: Mapping[Any, tuple[int, int | None]]) -> tuple[Any, Any]:
    """The least and the most that a size can be where its symbols are in their ranges; None where nothing is known.

    For a relation of sizes whether it can be false, and whether it can be true.
    """
    from torch.utils._sympy.numbers import int_oo
    from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

    given = {x: ValueRanges(least, int_oo if most is None else most) for x, (least, most) in ranges.items()}
    found = bound_sympy(size, given)
    if found.is_bool:
        return bool(found.lower), bool(found.upper)
    least, most = (int(end) if end.is_Integer else None for end in (found.lower, found.upper))
    return least, most


def decomposition(op: Any) -> Callable[..., Any] | None:
    """A function that does an op by others, where torch has one."""
    from torch._decomp import get_decompositions

    return get_decompositions([op]).get(op)


def is_composed(op: Any) -> bool:
    """Whether an op is a function of others by its definition; then `op.decompose` calls them."""
    return bool(op._can_decompose())


def traced(function: Callable[..., Any], values: Sequence[Any], composed: bool) -> torch.fx.GraphModule:
    """What a function calls, op by op, for tensors without memory; ops that are composed of others too, or those."""
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function, pre_dispatch=composed)(*values)


def traced_apart(function: Callable[..., Any], values: Sequence[Any]) -> torch.fx.GraphModule:
    """What a function calls below autograd, with gradients; inside what traces a model, and unseen by that.

    It is traced for a CPU: on meta some composed ops have no gradient (`where` with a number).
    """
    from torch._subclasses.fake_tensor import FakeTensor

    fakes = [x for x in values if isinstance(x, FakeTensor)]
    with undispatched(), fake_mode_of(fakes) if fakes else nullcontext(), _gradients_on():
        graph = traced(function, [x.detach().to("cpu") if isinstance(x, Tensor) else x for x in values], composed=False)
    for node in graph.graph.nodes:
        if fakes and "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": fakes[0].device}
    return graph


@contextmanager
def _gradients_on() -> Iterator[None]:
    """Let ops have gradients, without a word to what traces a model: it would make a region of its own of them."""
    before = torch.is_grad_enabled()
    with torch._C.DisableTorchFunction():
        torch._C._set_grad_enabled(True)
    try:
        yield
    finally:
        with torch._C.DisableTorchFunction():
            torch._C._set_grad_enabled(before)


def is_recording() -> bool:
    """Whether the current stream's ops are recorded for a CUDA graph, and not done."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def group_of(name: str) -> dist.ProcessGroup:
    """The group that functional collectives find by a name."""
    found: dist.ProcessGroup = torch._C._distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]  # a GroupName is a str
    return found


def name_group(name: str, group: dist.ProcessGroup) -> None:
    """Let functional collectives find a group by one more name."""
    torch._C._distributed_c10d._register_process_group(name, group)  # type: ignore[arg-type]  # the same


class _Arrival(torch._C._distributed_c10d.Work):
    """What `wait` waits for: the current stream does, for an event."""

    def __init__(self, event: torch.cuda.Event) -> None:
        super().__init__()
        self._event = event

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._event.wait()
        return True


def arrives(x: Tensor, event: torch.cuda.Event) -> None:
    """Let `wait` of `x` wait for an event."""
    torch._C._distributed_c10d._register_work(x, _Arrival(event))


def on_gpus() -> bool:
    """Whether the world's process group talks between GPUs."""
    return dist.is_initialized() and "nccl" in str(dist.get_backend())


def high_priority() -> object:
    """Options of a process group whose kernels go before those of the computation."""
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    return options


def has_symmetric_memory() -> bool:
    """Whether this torch can give GPUs of one host memory that all of them address."""
    return torch.cuda.is_available() and hasattr(torch._C._distributed_c10d, "_SymmetricMemory")


def symmetric_memory(
    size: int, device: torch.device, group: dist.ProcessGroup | None, seconds: float
) -> tuple[list[Tensor], Callable[[], None]]:
    """`size` bytes on every GPU of a group (the world's), as this one addresses them, by rank; and a barrier of all
    ranks' current streams, which fails after so long. All ranks call it alike.
    """
    import torch.distributed._symmetric_memory as symmetric

    group = group or dist.group.WORLD
    assert group is not None, "the world has a process group"
    own = symmetric.empty(size, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(own, group_name(group))  # type: ignore[arg-type]  # a GroupName is a str
    views = [
        own if rank == group.rank() else handle.get_buffer(rank, (size,), torch.uint8) for rank in range(group.size())
    ]
    return views, lambda: handle.barrier(0, int(seconds * 1000))


def in_backward() -> bool:
    """Whether autograd is running a backward pass in this thread (so a forward is a recomputation)."""
    return backward_number() != -1


def backward_number() -> int:
    """Which backward pass is running in this thread; −1 for none."""
    return torch._C._current_graph_task_id()


def after_backward(function: Callable[[], None]) -> None:
    """Call it when the backward pass that is running in this thread has ended; nothing is done outside of one."""
    if in_backward():
        torch.autograd.Variable._execution_engine.queue_callback(function)


def storage_id(x: Tensor) -> int | None:
    """What two tensors have in common exactly if they share memory; none for a DTensor."""
    return None if is_distributed(x) else x.untyped_storage()._cdata


class _Dispatched(TorchDispatchMode):
    def __init__(self, run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self._run = run

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing of it is compiled, and telling dynamo so at each op takes longer than most ops

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._run(func, args, kwargs or {})


@contextmanager
def dispatched(run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> Iterator[None]:
    """Let `run(op, args, kwargs)` do every ATen op of this thread, forward and backward, below autograd."""
    with _Dispatched(run):
        yield


@contextmanager
def undispatched() -> Iterator[None]:
    """Inside `dispatched`, let torch do the ops again."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        yield


@contextmanager
def untraced() -> Iterator[None]:
    """Inside what traces a model, let torch do the ops, on tensors that have values."""
    with undispatched(), torch._C.DisableTorchFunction(), torch.enable_grad():
        yield


def hint(size: Any) -> Any:
    """A symbolic size as it is in the example; anything else is itself."""
    return size.node.hint if isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) else size


def spin(seconds: float) -> None:
    """Let the current GPU's stream do nothing for about so long, at some 1.5 GHz, while this process goes on."""
    torch.cuda._sleep(int(seconds * 1.5e9))


@contextmanager
def checkpoint_calls(noted: Callable[[bool], AbstractContextManager[None]]) -> Iterator[None]:
    """Inside, `torch.utils.checkpoint.checkpoint`, by whatever name it is known, calls its function in `noted(…)`.

    What `noted` is given says whether the call has a policy of its own.
    """
    owner: Any = torch.utils.checkpoint
    name = "_checkpoint_without_reentrant_generator"
    name = f"{name}_impl" if hasattr(owner, f"{name}_impl") else name  # torch 2.14 has both, and calls this one
    before = owner.CheckpointFunction, getattr(owner, name)
    signature = inspect.signature(before[1])

    class Reentrant:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            with noted(False):
                return function(*args)

    def other(*args: Any, **named: Any) -> Iterator[None]:
        context = signature.bind(*args, **named).arguments.get("context_fn")
        with noted(context not in (None, owner.noop_context_fn)):
            yield

    owner.CheckpointFunction = Reentrant
    setattr(owner, name, other)
    try:
        yield
    finally:
        owner.CheckpointFunction = before[0]
        setattr(owner, name, before[1])


_aten = torch.ops.aten
ATTENTION = {
    "cudnn": (
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_cudnn_attention_backward.default,
    ),
    "flash": (
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_backward.default,
    ),
    "efficient": (
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_efficient_attention_backward.default,
    ),
    "cpu": (
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    ),
}
"""torch's attention kernels, which also give the log-sum-exp of the scores, each with its backward."""

COLLECTIVES = {
    "all_gather": _ops.all_gather_into_tensor.default,
    "reduce_scatter": _ops.reduce_scatter_tensor.default,
    "all_reduce": _ops.all_reduce.default,
    "all_to_all": _ops.all_to_all_single.default,
}
"""The op that starts each kind of collective."""

GROUPED_MM = _aten._grouped_mm.default
WAIT = _ops.wait_tensor.default
CAST = _aten._to_copy.default


def fake_mode_of(values: Any) -> AbstractContextManager[Any]:
    """The mode in which ops are done on fake tensors, of which there are some among nested values."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._pytree import tree_leaves

    return next(x for x in tree_leaves(values) if isinstance(x, FakeTensor)).fake_mode


def in_this_order(graph: fx.Graph, after: Mapping[fx.Node, Sequence[fx.Node]]) -> None:
    """Let inductor schedule each node after others, of which it need not take anything."""
    from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
    from torch.utils._ordered_set import OrderedSet

    preserve_node_ordering(graph, {node: OrderedSet(others) for node, others in after.items()})


def inductor_options(
    mode: str | None, run: Callable[[fx.Graph], None], file: str, in_order: bool = True
) -> dict[str, Any]:
    """Inductor's options of a mode, with `run` as its last pass over a graph, after which (`in_order`) nothing is put
    in another order to save memory. What inductor keeps depends on the text of `file`.
    """
    from torch._inductor import list_mode_options
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class Pass(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            run(graph)

        def uuid(self) -> Any:
            return get_hash_for_files((file,))

    own: dict[str, Any] = {"post_grad_custom_post_pass": Pass()}
    if in_order:
        own["reorder_for_peak_memory"] = False
    return {**(list_mode_options(mode) if mode else {}), **own}


def without_functions() -> AbstractContextManager[None]:
    """While it holds, calls and reads of tensors are not told to modes and subclasses that override functions."""
    held: AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return held


def modes_are_on() -> bool:
    """Whether a torch function mode or dispatch mode sees the ops that are called."""
    return torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack() > 0


OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._library.custom_ops.CustomOpDef)
"""The classes of operators, made by `torch.library.custom_op` among them."""

OPERATORS_OF_TORCH = frozenset(
    "prims mkldnn_prepacked static_runtime onednn profiler c10d _quantized _c10d_functional_autograd inductor_prims "
    "debug_mode_ops _dtensor _native _c10d_functional inductor mkl rngprims mkldnn debugprims symm_mem export "
    "quantized aten sparse _test quantization ndcompile".split()
)
"""The namespaces of operators that torch and this package define."""


def operator_name(operator: Any) -> str:
    """`namespace::name` of an operator, whichever its overload."""
    packet = getattr(operator, "_opoverload", operator)
    packet = getattr(packet, "overloadpacket", packet)
    return packet._qualified_op_name


def operators() -> set[str]:
    """`namespace::name` of every operator that is none of torch's."""
    names = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    return {name for name in names if name.partition("::")[0] not in OPERATORS_OF_TORCH}


def operator_parts(name: str) -> dict[str, Any] | None:
    """The functions of an operator that `torch.library.custom_op` made, and its settings; None of any other."""
    found = torch._library.custom_ops.OPDEFS.get(name)
    if found is None:
        return None
    return {k: v for k, v in sorted(vars(found).items()) if k not in ("_lib", "_opoverload")}
