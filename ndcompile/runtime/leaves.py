"""The leaves of a call, by the names that a user would give them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils import _pytree as pytree


def named_leaves(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Each leaf by the parameter that takes it, dotted where nested; what `**kwargs` takes by its own name.

    Raises TypeError where the call does not fit.
    """
    found: dict[str, Any] = {}
    for name, value in by_name(signature, args, kwargs).items():
        for path, leaf in pytree.tree_flatten_with_path(value, is_leaf=lambda v: v is None)[0]:
            found[name + pytree.keystr(path)] = leaf
    return found


def by_name(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by parameter, those of `**kwargs` one by one."""
    given = dict(signature.bind(*args, **kwargs).arguments)
    for parameter in signature.parameters.values():
        if parameter.kind == parameter.VAR_KEYWORD:
            given |= given.pop(parameter.name, {})
    return given


_STEP = re.compile(r"\['([^']*)'\]|\[(\d+)\]")


class _Inner(dict[str | int, Any]):
    """What has leaves below it, by key or by place."""


def call_of(signature: inspect.Signature, leaves: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call, as `args` and `kwargs`, that has these leaves: the inverse of `named_leaves`, with lists for sequences.

    Raises ValueError where a leaf lies in neither a sequence nor a dict.
    """
    tree = _Inner()
    for name, leaf in leaves.items():
        *above, last = _path(name)
        inner = tree
        for step in above:
            inner = inner.setdefault(step, _Inner())
        inner[last] = leaf
    given = {str(name): _built(value) for name, value in tree.items()}
    bound = signature.bind_partial()
    for parameter in signature.parameters.values():
        if parameter.kind == parameter.VAR_KEYWORD:
            bound.arguments[parameter.name] = given
        elif parameter.name in given:
            value = given.pop(parameter.name)
            bound.arguments[parameter.name] = tuple(value) if parameter.kind == parameter.VAR_POSITIONAL else value
    return bound.args, bound.kwargs


def _path(name: str) -> list[str | int]:
    """`["x", "a", 0]` of `x['a'][0]`."""
    first, dot, _ = name.partition("[")[0].partition(".")
    steps = [int(number) if number else key for key, number in _STEP.findall(name)]
    if dot or name != first + "".join(f"[{step!r}]" for step in steps):
        raise ValueError(f"'{name}' lies in neither a sequence nor a dict")
    return [first, *steps]


def _built(value: Any) -> Any:
    if not isinstance(value, _Inner):
        return value
    built = {step: _built(inner) for step, inner in value.items()}
    return list(built.values()) if list(built) == list(range(len(built))) else built
