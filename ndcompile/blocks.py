"""The blocks of a model: which they are, and what each holds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

CONTAINERS = (dict, OrderedDict, list, set)

PLAIN = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format}
)
"""Types of what never changes, and is equal where it is equal by value."""

KINDS = ("_parameters", "_buffers", "_modules")
"""The dicts in which a module has its own parts."""


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """The children of the model's `ModuleList`s, by path; in nested lists those of the outermost."""
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(path.startswith(block + ".") for block in found):
            found |= {f"{path}.{name}".lstrip("."): child for name, child in module.named_children()}
    return found


def block_of(name: str, blocks: Container[str]) -> str:
    """The path of the block that a module, parameter or buffer is in; empty outside of all."""
    parts = name.split(".")
    paths = (".".join(parts[: i + 1]) for i in range(len(parts)))
    return next((path for path in paths if path in blocks), "")


def tensors_of(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Every parameter and buffer under each of its names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def first_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """For every name the first one of the same tensor."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()}


def attributes(module: nn.Module) -> dict[str, Any]:
    """A module's `__dict__`, without a look that `borders` would write down."""
    found: dict[str, Any] = object.__getattribute__(module, "__dict__")
    return found


NOTHING = object()


@dataclass
class Contents:
    """What a module itself holds: the dicts that are its own, also while others stand in their place."""

    kind: type
    attributes: dict[str, Any]
    parts: dict[str, dict[str, Any]]
    """By the name of each of `KINDS`."""

    @classmethod
    def of(cls, module: nn.Module) -> Contents:
        held = attributes(module)
        return cls(type(module), held, {kind: held.get(kind, {}) for kind in KINDS})

    def find(self, name: str) -> Any:
        """What the module itself has under a name, or `NOTHING`."""
        if name in KINDS:
            return self.parts[name]
        for values in (self.attributes, *self.parts.values()):
            if name in values:
                return values[name]
        return NOTHING


@dataclass(eq=False)
class Scope:
    """A block: the paths in it of its modules, each by the identity of its attributes, and what they hold, by path."""

    path: str
    modules: dict[int, str]
    contents: dict[str, Contents]

    @classmethod
    def of(cls, path: str, block: nn.Module) -> Scope:
        contents = {place: Contents.of(m) for place, m in block.named_modules(remove_duplicate=False)}
        return cls(path, {id(held.attributes): place for place, held in contents.items()}, contents)

    @property
    def kind(self) -> type:
        return self.contents[""].kind


def form(tensor: Tensor) -> tuple[Any, ...]:
    """What a trace sees of a tensor besides its values: sizes, strides, dtype, device, whether it takes a gradient."""
    sizes = tuple(n.node.expr if isinstance(n, torch.SymInt) else n for n in (*tensor.shape, *tensor.stride()))
    return (sizes, tensor.dtype, tensor.device, tensor.requires_grad)
