"""The leaves of a call, by the names that a user would give them."""

from __future__ import annotations

import inspect
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
