"""Parameters of later equal blocks, which the tracer is not given: it takes milliseconds for each, used or not.

A call of a block that is equal to a traced one is one node (`borders`), which needs none of the block's parameters. So
a block that looks like two earlier ones is empty while a model is traced. That is a guess, on which nothing rests: in
the course of the model's forward, whoever looks into an empty block (the block itself, which is not equal; its caller,
for a parameter of it; a penalty, for all) ends the trace, and the model is traced again with all that it has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from ndcompile.blocks import KINDS, PLAIN, Scope, block_of, form

KEPT = 2
"""How many of the blocks that look alike are given: the first may be called otherwise than all later ones."""


class Asked(Exception):
    """What was withheld is needed."""


class Withheld:
    """The blocks that are empty while their model is traced, by path, each with what it holds."""

    def __init__(self, model: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
        own = _on_their_own(model, blocks)
        self.parts = {scope.path: _parts(scope) for scope in own}
        self.scopes = {scope.path: scope for alike in _alike(own, self.parts) for scope in alike[KEPT:]}
        self.asked = self.watched = False

    def may_be(self, path: str, traced: str) -> bool:
        """Whether all that an empty block holds, read or not, has the form of what a traced one holds."""
        return path not in self.scopes or self.parts[path] == self.parts.get(traced)

    def ask(self) -> None:
        """End the trace; noted too, as the model may handle the exception."""
        self.asked = True
        raise Asked

    def look(self) -> None:
        """The tracer may find a block empty, the model may not."""
        if self.watched:
            self.ask()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While it holds, it is the model that is at work."""
        before, self.watched = self.watched, True
        try:
            yield
        finally:
            self.watched = before

    @contextmanager
    def emptied(self) -> Iterator[None]:
        """While it holds, the blocks and all of their modules hold no part."""
        held = [contents for scope in self.scopes.values() for contents in scope.contents.values()]
        try:
            for contents in held:
                contents.attributes.update({kind: _Empty(self.look) for kind in KINDS})
            yield
        finally:
            for contents in held:
                contents.attributes.update(contents.parts)

    def settle(self, called: Collection[str]) -> None:
        """Raise `Asked` unless the trace needed nothing, and has each of the blocks: what nobody calls has no node."""
        if self.asked or not self.scopes.keys() <= set(called):
            raise Asked


class _Empty(dict[str, Any]):
    """No parts; tells of each look at them."""

    def __init__(self, look: Callable[[], None]) -> None:
        self.look = look


def _told(method: Callable[..., Any]) -> Callable[..., Any]:
    def told(self: _Empty, *args: Any, **kwargs: Any) -> Any:
        self.look()
        return method(self, *args, **kwargs)

    return told


_NO_LOOK = ("__new__", "__init__", "__getattribute__", "__sizeof__")
for _name, _method in vars(dict).items():
    if callable(_method) and _name not in _NO_LOOK:
        setattr(_Empty, _name, _told(_method))


# ---- which blocks look alike ---------------------------------------------------------------------------------------


def _on_their_own(model: nn.Module, blocks: Mapping[str, nn.Module]) -> list[Scope]:
    """The blocks none of whose modules and tensors has a name outside of its block, or in another one."""
    owners: dict[int, set[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        owner = block_of(name, blocks)
        for held in (module, *module._parameters.values(), *module._buffers.values()):
            if held is not None:
                owners.setdefault(id(held), set()).add(owner)
    shared = {path for found in owners.values() if len(found) > 1 for path in found}
    return [Scope.of(path, block) for path, block in blocks.items() if path not in shared]


def _alike(scopes: list[Scope], parts: Mapping[str, Any]) -> list[list[Scope]]:
    """Blocks of one list that have the same modules and forms of tensors, and in them the same plain values.

    A value that is another one in each block numbers them, and is thought to be read by nobody.
    """
    found = []
    for built in _grouped({scope: (scope.path.rpartition(".")[0], parts[scope.path]) for scope in scopes}):
        values = {scope: _values(scope) for scope in built}
        numbers = {name for name in values[built[0]] if len({held.get(name) for held in values.values()}) == len(built)}
        kept = {scope: frozenset((k, v) for k, v in held.items() if k not in numbers) for scope, held in values.items()}
        found += _grouped(kept)
    return found


def _grouped(keys: Mapping[Scope, Any]) -> list[list[Scope]]:
    found: dict[Any, list[Scope]] = {}
    for scope, key in keys.items():
        found.setdefault(key, []).append(scope)
    return list(found.values())


def _parts(scope: Scope) -> Any:
    """The modules and tensors of a block by name: class and form."""
    return tuple(
        (place, contents.kind, name, type(tensor), None if tensor is None else form(tensor))
        for place, contents in scope.contents.items()
        for kind in KINDS[:2]
        for name, tensor in ({"": None} | contents.parts[kind]).items()
    )


def _values(scope: Scope) -> dict[Any, Any]:
    return {
        (place, name): value
        for place, contents in scope.contents.items()
        for name, value in contents.attributes.items()
        if type(value) in PLAIN
    }
