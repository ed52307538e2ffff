"""A model's twin on the meta device: what is traced in its place, so that the model stays untouched."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ndcompile.blocks import CONTAINERS, KINDS, PLAIN
from ndcompile.errors import CompileError
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
    """They are attributes: what a forward puts there is a value of that call (`while_traced.py`)."""
    for module in twin.modules():
        for name in [name for name, buffer in module._buffers.items() if buffer is None]:
            del module._buffers[name]
            vars(module)[name] = None


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
