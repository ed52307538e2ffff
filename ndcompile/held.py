"""Functions that a module holds, and that themselves hold parts of the model: `lambda y: y @ self.weight.t()`.

To `copy.deepcopy` a function is one thing, so a copied module would call that of the original, with its tensors.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence, Set
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree


def twin_functions(given: Sequence[Any], own: Set[int]) -> list[tuple[FunctionType, FunctionType]]:
    """Each function, given or held by one that is, that holds what has an id of `own`; and its twin, which `follow`
    gives what it is to hold."""
    found: dict[int, tuple[FunctionType, FunctionType]] = {}
    reach: dict[int, bool] = {}

    def reaches(value: Any) -> bool:
        if id(value) not in reach:
            reach[id(value)] = id(value) in own  # what holds itself does not by that
            parts = [reaches(part) for part in _held(value)] if id(value) not in own else []
            reach[id(value)] |= any(parts)
            if reach[id(value)] and isinstance(value, FunctionType):
                found[id(value)] = value, _twin(value, reaches)
        return reach[id(value)]

    for value in given:
        reaches(value)
    return list(found.values())


def _held(value: Any) -> Iterator[Any]:
    """What a value holds, as far as one can say."""
    if isinstance(value, FunctionType):
        yield from map(_content, value.__closure__ or ())
        yield from (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    elif isinstance(value, MethodType):
        yield value.__self__
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, nn.Module):  # another one of the same parts: what `with_loss` has extended
        yield from (*value.children(), *value.parameters(recurse=False), *value.buffers(recurse=False))
    else:
        yield from (leaf for leaf in pytree.tree_leaves(value) if leaf is not value)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # of a variable that has no value yet
        return None


def _twin(function: FunctionType, reaches: Callable[[Any], bool]) -> FunctionType:
    """A function that shares what is not of the model, and has empty cells for the rest."""
    cells = tuple(CellType() if reaches(_content(cell)) else cell for cell in function.__closure__ or ())
    twin = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    twin.__kwdefaults__ = function.__kwdefaults__
    twin.__dict__.update(function.__dict__)
    return twin


def follow(function: FunctionType, twin: FunctionType, memo: dict[int, Any]) -> None:
    """Let the twin hold the copies of what the function holds of the model; `memo` is that of `copy.deepcopy`."""
    for before, after in zip(function.__closure__ or (), twin.__closure__ or (), strict=True):
        if after is not before:
            after.cell_contents = copy.deepcopy(before.cell_contents, memo)
    twin.__defaults__ = copy.deepcopy(function.__defaults__, memo)
    twin.__kwdefaults__ = copy.deepcopy(function.__kwdefaults__, memo)
