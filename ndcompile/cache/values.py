"""How values are described that are neither Python code nor objects made in Python: one line of a table a kind."""

from __future__ import annotations

import collections
import contextvars
import enum
import functools
import inspect
import logging
import pathlib
import re
import threading
import types
import typing
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ndcompile.runtime import private
from ndcompile.runtime.manifest import digest

if TYPE_CHECKING:
    from ndcompile.cache.walk import Walk

PLAIN = (
    bool, int, float, complex, str, bytes, type(None), type(...), type(NotImplemented), range, slice, torch.dtype,
    torch.device, torch.layout, torch.memory_format, torch.Size, torch.finfo, torch.iinfo,
)  # fmt: skip

BUILT_IN = (
    types.BuiltinFunctionType, types.MemberDescriptorType, types.GetSetDescriptorType, types.MethodDescriptorType,
    types.WrapperDescriptorType, types.MethodWrapperType, types.ClassMethodDescriptorType,
)  # fmt: skip

GENERIC = (types.GenericAlias, types.UnionType, typing.TypeVar, type(typing.Any), type(typing.Optional[int]))  # noqa: UP045

WITHOUT_MEANING = (logging.Logger, type(threading.Lock()), type(threading.RLock()), threading.local)
"""What decides nothing about a trace, whatever its state."""


def is_plain(value: Any) -> bool:
    """Whether the text of a value is all of it."""
    return type(value) in PLAIN


def _tensor(walk: Walk, value: Tensor, strict: bool, way: str) -> None:
    """A tensor that is none of the model's own: its form and its values."""
    if not is_whole(value):
        return walk.unseen(value, strict, way)
    walk.say("tensor", type(value).__name__, *form(value), "meta" if value.is_meta else digest(value))
    walk.state(value, strict, way)


def is_whole(tensor: Tensor) -> bool:
    """Whether form and values are all of a tensor: it is of torch's own class, and dense."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_quantized


def form(tensor: Tensor) -> tuple[Any, ...]:
    """What a trace sees of a tensor without its values."""
    return (tuple(tensor.shape), tensor.stride(), str(tensor.dtype), tensor.device.type, tensor.requires_grad)


def _array(walk: Walk, value: Any, strict: bool, way: str) -> None:
    if value.dtype.hasobject:
        return walk.unseen(value, strict, way)
    walk.say("array", value.shape, str(value.dtype), value.tobytes())


def _built_in(walk: Walk, value: Any, strict: bool, way: str) -> None:
    owner = getattr(value, "__self__", None)
    walk.say("built in", getattr(value, "__module__", None), getattr(value, "__qualname__", value.__name__))
    if owner is not None and not isinstance(owner, (type, types.ModuleType)):
        walk.value(owner, strict, f"{way}, what it is bound to")


def _mapping(walk: Walk, value: Any, strict: bool, way: str) -> None:
    walk.say("mapping", len(value))
    for key in list(value):
        walk.value(key, strict, f"a key of {way}")
        walk.value(value[key], strict, f"{way}[{key!r}]" if is_plain(key) else f"a value of {way}")
    _rest(walk, value, strict, way)


def _dict(walk: Walk, value: dict[Any, Any], strict: bool, way: str) -> None:
    walk.say("dict", len(value))
    items = list(dict.items(value))
    if not strict and all(type(key) is str for key, _ in items):
        items.sort(key=lambda item: item[0])  # packages make some of sets, which have another order in each process
    for key, held in items:
        walk.value(key, strict, f"a key of {way}")
        walk.value(held, strict, f"{way}[{key!r}]" if is_plain(key) else f"a value of {way}")
    _rest(walk, value, strict, way)


def _sequence(walk: Walk, value: Any, strict: bool, way: str) -> None:
    walk.say("sequence", len(value))
    for number, held in enumerate(value):
        walk.value(held, strict, f"{way}[{number}]")
    _rest(walk, value, strict, way)


def _set(walk: Walk, value: Iterable[Any], strict: bool, way: str) -> None:
    """Sets have no order, so their elements need a text that has one."""
    elements = list(value)
    if not all(is_plain(element) for element in elements):
        return walk.unseen(value, strict, way)
    walk.say("set", sorted((type(element).__name__, repr(element)) for element in elements))
    walk.names |= {element for element in elements if strict and isinstance(element, str)}
    _rest(walk, value, strict, way)


def _rest(walk: Walk, value: Any, strict: bool, way: str) -> None:
    """Of a subclass of a container, its class and the attributes beside its elements."""
    if type(value).__module__ not in ("builtins", "collections"):
        walk.kind(type(value), made=False)
        walk.state(value, strict, way)


def _enum(walk: Walk, value: enum.Enum, strict: bool, way: str) -> None:
    walk.say("enum", value.name)
    walk.kind(type(value), made=False)
    walk.value(value.value, strict, f"{way}.value")


def _method(walk: Walk, value: types.MethodType, strict: bool, way: str) -> None:
    walk.say("method")
    walk.value(value.__func__, strict, way)
    walk.value(value.__self__, strict, f"{way}, what it is bound to")


def _partial(walk: Walk, value: functools.partial[Any], strict: bool, way: str) -> None:
    walk.say("partial")
    for held in (value.func, value.args, value.keywords):
        walk.value(held, strict, f"{way}, a partial")


def _accessor(walk: Walk, value: Any, strict: bool, way: str) -> None:
    walk.say(type(value).__name__)
    parts = (value.fget, value.fset, value.fdel) if isinstance(value, property) else (_wrapped(value),)
    for part in parts:
        walk.value(part, strict, way)


def _wrapped(value: Any) -> Any:
    if isinstance(value, (staticmethod, classmethod)):
        return value.__func__
    return value.func if isinstance(value, functools.cached_property) else value.__wrapped__


def _operator(walk: Walk, value: Any, strict: bool, way: str) -> None:
    walk.operator(private.operator_name(value), strict, way)


def _reference(walk: Walk, value: weakref.ref[Any], strict: bool, way: str) -> None:
    walk.say("weak")
    walk.value(value(), strict, way)


def _parameter(walk: Walk, value: inspect.Parameter, strict: bool, way: str) -> None:
    walk.say("parameter", value.name, int(value.kind))
    walk.value(value.default, strict, f"the default of '{value.name}' in {way}")


def _signature(walk: Walk, value: inspect.Signature, strict: bool, way: str) -> None:
    walk.value(list(value.parameters.values()), strict, way)


def _variable(walk: Walk, value: contextvars.ContextVar[Any], strict: bool, way: str) -> None:
    walk.say("variable", value.name)
    walk.value(value.get(None), strict, way)


def _text(walk: Walk, value: Any, strict: bool, way: str) -> None:
    walk.say(type(value).__name__, str(value))


def _named(walk: Walk, value: Any, strict: bool, way: str) -> None:
    walk.say(type(value).__name__)


Describe = Callable[["Walk", Any, bool, str], None]
KINDS: tuple[tuple[Any, Describe], ...] = (
    (Tensor, _tensor),
    (enum.Enum, _enum),
    (dict, _dict),
    ((types.MappingProxyType, collections.ChainMap), _mapping),
    ((tuple, list, collections.deque), _sequence),
    ((set, frozenset), _set),
    (types.MethodType, _method),
    (BUILT_IN, _built_in),
    ((property, staticmethod, classmethod, functools.cached_property, functools._lru_cache_wrapper), _accessor),
    (functools.partial, _partial),
    (private.OPERATORS, _operator),
    (weakref.ref, _reference),
    (inspect.Parameter, _parameter),
    (inspect.Signature, _signature),
    (contextvars.ContextVar, _variable),
    ((re.Pattern, pathlib.PurePath, *GENERIC), _text),
    (WITHOUT_MEANING, _named),
)
"""The first that fits is taken."""


def describer(value: Any) -> Describe | None:
    """The way in which a value is described; None for functions, classes, modules and what is made in Python."""
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        return _array
    return next((describe for kinds, describe in KINDS if isinstance(value, kinds)), None)
