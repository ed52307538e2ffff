"""A model's twin on the meta device: what is traced in its place, so that the model stays untouched."""

from __future__ import annotations

import copy
import functools
import inspect
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ndcompile.blocks import CONTAINERS, KINDS, PLAIN
from ndcompile.counts import CALLS, bincount
from ndcompile.errors import CompileError, NotOneGraph
from ndcompile.held import follow, twin_functions


def refuse_hooks(model: nn.Module) -> None:
    """Forward hooks on inner modules do not run in emitted code, so a model that has some is refused."""
    for path, module in model.named_modules():
        if has_hooks(module):
            raise CompileError(
                f"module '{path or type(model).__name__}' has a hook",
                why="the emitted module has no inner calls that a hook could see",
                tries=("remove the hook", "write its effect into forward"),
            )

    for path, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise CompileError(
                f"parameter '{path}' has a hook",
                why="the emitted module has parameters of its own, whose gradients are reduced over ranks",
                tries=("remove the hook", "put it on the parameter of the emitted module, where that is what is meant"),
            )


def has_hooks(module: nn.Module) -> bool:
    after = [hook for hook in module._forward_hooks.values() if not _only_asks_for_gradients(hook)]
    return any((after, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))


def _only_asks_for_gradients(hook: Any) -> bool:
    """What `gradient_checkpointing_enable` of transformers puts on embeddings, for checkpoints that are reentrant."""
    name = f"{hook.__module__}.{getattr(hook, '__name__', '')}"
    return name == "transformers.modeling_utils.make_inputs_require_grads"


def on_meta(model: nn.Module) -> tuple[nn.Module, dict[int, Tensor]]:
    """A copy that shares no storage: parameters, buffers and plain tensor attributes on the meta device.

    The second result gives the real tensor of each plain attribute by the id of its copy.
    """
    twin, attributes = copy_with(model, lambda tensor: torch.empty_like(tensor, device="meta"))
    choose_experts(twin, "batched_mm")
    _without_buffers_that_are_none(twin)
    return twin, attributes


def copy_with(model: nn.Module, made: Callable[[Tensor], Tensor]) -> tuple[nn.Module, dict[int, Tensor]]:
    """A copy of the model that has in each tensor's place what is `made` of it; the second result as `on_meta`'s."""
    memo: dict[int, Any] = {}
    modules = list(model.modules())
    for tensor in (t for m in modules for held in (m._parameters, m._buffers) for t in held.values() if t is not None):
        if id(tensor) not in memo:
            memo[id(tensor)] = _as_parameter(made(tensor), tensor) if isinstance(tensor, nn.Parameter) else made(tensor)
    attributes: dict[int, Tensor] = {}
    functions: list[Any] = []
    for value in (value for m in modules for name, value in vars(m).items() if name not in KINDS):
        if type(value) in CONTAINERS and not value:
            memo.setdefault(id(value), type(value)())
        for leaf in () if type(value) in PLAIN or id(value) in memo else pytree.tree_leaves(value):
            if isinstance(leaf, (FunctionType, functools.partial)):
                functions.append(leaf)
            if isinstance(leaf, Tensor) and id(leaf) not in memo:
                memo[id(leaf)] = made(leaf)
                attributes[id(memo[id(leaf)])] = leaf
    closures = twin_functions(functions, memo.keys() | set(map(id, modules)))
    memo |= {id(function): its for function, its in closures}
    kinds = {kind for kind in set(map(type, modules)) if _copied_by_attributes(kind)}
    _copy_attributes([module for module in modules if type(module) in kinds], memo)
    copied = copy.deepcopy(model, memo)
    for function, its in closures:
        follow(function, its, memo)
    return copied, attributes


def _as_parameter(made: Tensor, parameter: nn.Parameter) -> nn.Parameter:
    return made if isinstance(made, nn.Parameter) else nn.Parameter(made, requires_grad=parameter.requires_grad)


def _copy_attributes(modules: list[nn.Module], memo: dict[int, Any]) -> None:
    """What `copy.deepcopy` does for each of these modules, in a fraction of its time."""
    memo |= {id(module): type(module).__new__(type(module)) for module in modules}
    for module in modules:
        state = dict(module.__getstate__())
        for name, value in state.items():
            if type(value) not in PLAIN:
                state[name] = copy.deepcopy(value, memo)
        memo[id(module)].__setstate__(state)


def _copied_by_attributes(kind: type[nn.Module]) -> bool:
    """Whether a class leaves its copies to Python and to `nn.Module`, and keeps all that it has in attributes."""
    ways = ("__deepcopy__", "__reduce_ex__", "__reduce__", "__getstate__", "__setstate__", "__new__", "__getnewargs__")
    plain = all(getattr(kind, way, None) is getattr(nn.Module, way, None) for way in ways)
    return plain and not any("__slots__" in vars(base) for base in kind.__mro__)


def choose_experts(twin: nn.Module, implementation: str) -> None:
    """transformers' experts choose an implementation by device and dtype; some read values on the host, some know no
    float64. `batched_mm` is plain ops of static shapes, which `recognise_experts` knows; `eager` goes expert by expert.
    """
    for module in twin.modules():
        config: Any = vars(module).get("config")
        if hasattr(config, "_experts_implementation"):
            config._experts_implementation = implementation


def _without_buffers_that_are_none(twin: nn.Module) -> None:
    """They are attributes: what a forward puts there is a value of that call, see `registered_as_values`."""
    for module in twin.modules():
        for name in [name for name, buffer in module._buffers.items() if buffer is None]:
            del module._buffers[name]
            vars(module)[name] = None


@contextmanager
def registered_as_values() -> Iterator[None]:
    """While a model is traced, a buffer that its forward registers is an attribute.

    The tracer knows no place for it, and would write it to another input.
    """
    inner = nn.Module.register_buffer

    @functools.wraps(inner)
    def register(self: nn.Module, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        if name in self._buffers:
            inner(self, name, tensor, persistent)
        else:
            setattr(self, name, tensor)

    nn.Module.register_buffer = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_buffer = inner  # type: ignore[method-assign]


def cast_parameters(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Floating parameters become `dtype`; for float64 the buffers too. Tied parameters stay tied."""
    assert dtype is not None
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    if dtype == torch.float64:
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(dtype)


def cast_inputs(twin: nn.Module, dtype: torch.dtype) -> None:
    """Make the twin cast its floating inputs first, so that the casts are in the graph."""
    inner = twin.forward

    def cast(x: Tensor) -> Tensor:
        return x.to(dtype) if x.is_floating_point() else x

    def forward(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map_only(Tensor, cast, (args, kwargs))
        return inner(*args, **kwargs)

    forward.__signature__ = inspect.signature(inner)  # type: ignore[attr-defined]
    twin.forward = forward


def name_keywords(twin: nn.Module, names: Iterable[str]) -> None:
    """Make of `forward(x, **kwargs)` that is called with `y=` a `forward(x, *, y)`: the tracer wants names."""
    inner, signature = twin.forward, inspect.signature(twin.forward)
    held = [p for p in signature.parameters.values() if p.kind != p.VAR_KEYWORD]
    more = [name for name in names if name not in signature.parameters]
    if not more:
        return

    def forward(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    held += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in more]
    forward.__signature__ = inspect.Signature(held)  # type: ignore[attr-defined]
    twin.forward = forward


@contextmanager
def around_forward(model: nn.Module, made: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """While it holds, each call of the model's `forward` stands in a context: the model's code, and not the tracer's.

    A class that has a `__call__` of its own has code around its `forward`, so there the context is on all the time.
    """
    if type(model).__call__ is not nn.Module.__call__:
        with made():
            yield
        return
    own, inner = vars(model).get("forward"), model.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with made():
            return inner(*args, **kwargs)

    forward.__signature__ = inspect.signature(inner)  # type: ignore[attr-defined]  # not that of the class, with `self`
    model.forward = forward
    try:
        yield
    finally:
        del model.forward
        if own is not None:
            model.forward = own


FACTORIES = frozenset(
    {torch.arange, torch.empty, torch.eye, torch.full, torch.linspace, torch.logspace, torch.ones, torch.zeros}
    | {torch.hann_window, torch.hamming_window, torch.blackman_window}
    | {
        torch.rand,
        torch.randint,
        torch.randn,
        torch.randperm,
        torch.scalar_tensor,
        torch.tril_indices,
        torch.triu_indices,
    }
)


DIVISIONS = frozenset({torch.div, torch.divide, torch.true_divide})
"""`torch.div(x.size(1), 8, rounding_mode="trunc")` would be a tensor, and as a size of another be read on the host."""

HOOKS = frozenset({Tensor.register_hook, Tensor.register_post_accumulate_grad_hook})
DATA = Tensor.data.__get__  # type: ignore[attr-defined]
VALUED = frozenset({torch.tensor, torch.as_tensor})


class WhereInputsAre(TorchFunctionMode):
    """Tensors that a model makes without saying a device are made where its inputs are: while traced, on meta.

    Those that it makes of values are made with them, and then moved: the values stay in the graph, as a constant.
    `called` is told of every function.
    """

    def __init__(self, called: Callable[[Any], None]) -> None:
        super().__init__()
        self._called = called

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._called(function)
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if function in VALUED and not (args and isinstance(args[0], Tensor)):
            return function(*args, **kwargs | {"device": None}).to("meta" if device is None else device)
        if function is Tensor.new_tensor and not isinstance(args[1], Tensor):
            return torch.tensor(args[1], dtype=kwargs.get("dtype") or args[0].dtype).to(device or args[0].device)
        if function is Tensor.__getitem__:
            return function(args[0], _listed_places(args[1]))
        if function in DIVISIONS and _of_sizes(*args, **kwargs):
            return args[0] // args[1]
        if function is F.cross_entropy:
            return _cross_entropy(*args, **kwargs)
        if function in HOOKS:
            raise NotOneGraph(
                "a hook changes or sees a gradient, and a graph has the forward alone",
                "the same in the forward: x * a + (x - x * a).detach() has the value of x, and a times its gradient",
            )
        if function == DATA:
            return args[0].detach()
        if function in CALLS:
            return bincount(*args, **kwargs)
        if device is None and function in FACTORIES:
            return function(*args, **kwargs | {"device": "meta"})
        return function(*args, **kwargs)


def _of_sizes(one: Any, two: Any, *, rounding_mode: str | None = None, out: Any = None) -> bool:
    """Whether a division is one of sizes, which are not negative, to a whole number."""
    sizes = type(one) is torch.SymInt and type(two) in (int, torch.SymInt)
    return sizes and rounding_mode is not None and out is None and (type(two) is torch.SymInt or two > 0)


@contextmanager
def inference_is_no_grad() -> Iterator[None]:
    """While a model is traced, `torch.inference_mode()` is `torch.no_grad()`: the tracer forgets the former."""
    kind: Any = torch.inference_mode
    enter, leave = kind.__enter__, kind.__exit__

    def entered(self: Any) -> None:
        self.within = torch.set_grad_enabled(not self.mode)
        self.within.__enter__()

    kind.__enter__, kind.__exit__ = entered, lambda self, *error: self.within.__exit__(*error)
    try:
        yield
    finally:
        kind.__enter__, kind.__exit__ = enter, leave


@contextmanager
def drawn_by_torch() -> Iterator[None]:
    """Refuse a model that draws numbers by Python's `random` or by numpy: the graph would have what came out."""
    before = _states()
    yield
    if _states() != before:
        raise NotOneGraph(
            "it draws numbers by Python's random or by numpy, and each call would have those of the trace",
            "torch.rand, torch.randn or dropout, which no mesh changes",
            "0 as the probability, if layers are skipped at random",
        )


def _states() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    kind, keys, place, *_ = numpy.random.get_state() if numpy else ("", b"", 0)
    return random.getstate(), kind, bytes(keys), place


@contextmanager
def autocast_where_inputs_are() -> Iterator[None]:
    """While a model is traced, `torch.autocast(x.device.type, enabled=False)` switches autocast off, as on any device.

    One that is on casts other ops on each device, and while traced `x` has none.
    """
    inner = torch.autocast.__init__

    @functools.wraps(inner)
    def made(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, *cached: Any, **more: Any) -> None:
        if device_type == "meta" and enabled:
            raise NotOneGraph(
                "what autocast does depends on the device, and it is on for the device of a tensor that is traced",
                'the device by its name: torch.autocast("cuda", dtype=torch.bfloat16)',
                "torch.autocast around nd.compile",
            )
        inner(self, "cpu" if device_type == "meta" else device_type, dtype, enabled, *cached, **more)

    torch.autocast.__init__ = made  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = inner  # type: ignore[method-assign]


def _cross_entropy(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Losses that are not reduced, over classes at dim 1 of three: with two dims torch gives them no shape on meta."""
    reduction = kwargs.get("reduction", args[4] if len(args) > 4 else "mean")
    if reduction != "none" or input.dim() != 2 or target.dim() != 1:
        return F.cross_entropy(input, target, *args, **kwargs)
    return F.cross_entropy(input.unsqueeze(2), target.unsqueeze(1), *args, **kwargs).squeeze(1)


def _listed_places(index: Any) -> Any:
    """An index with each list of places as a tensor that keeps its values, `x[:, [0, -1]]`."""
    if isinstance(index, tuple):
        return tuple(_listed_places(part) for part in index)
    if isinstance(index, list) and index and all(type(place) is int for place in index):
        return torch.tensor(index).to("meta")
    return index
