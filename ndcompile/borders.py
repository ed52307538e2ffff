"""Blocks while a model is traced: each distinct one is traced once, and where blocks begin and end is in the graph.

What a block's call is traced to depends on its tensors' shapes and dtypes, on its other arguments, and on what its
modules hold. While a block is traced, everything that is read of its modules is described. A later call with equal
arguments, of a block whose modules hold what has the same descriptions, would be traced to the same nodes: one node,
`ndcompile::again`, stands for them. A block that sets attributes, or looks at its modules in a way that can't be
followed, is traced at each call. Assumed, and nothing else: globals do not change in the course of one forward.
"""

from __future__ import annotations

import enum
import functools
import operator
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import has_side_effect
from torch.fx.traceback import preserve_node_meta, set_stack_trace
from torch.utils import _pytree as pytree

from ndcompile import forwards
from ndcompile.blocks import (
    CONTAINERS,
    KINDS,
    NOTHING,
    PLAIN,
    Contents,
    Scope,
    attributes,
    first_names,
    form,
    tensors_of,
)
from ndcompile.checkpoints import Checkpoints
from ndcompile.objects import made_in_python
from ndcompile.runtime import private
from ndcompile.withheld import Withheld

_LIBRARY = torch.library.Library("ndcompile", "DEF")
_TRACED: list[list[Tensor]] = []
"""The results of each body of the latest trace: what those of a later call look like."""


def _mark(*_: Any) -> None:
    return None


def _like_before(values: list[Tensor], places: list[int], block: str, body: int) -> list[Tensor]:
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in _TRACED[body]]


def _like_the_one_before(values: list[Tensor], places: list[int], block: str, body: int) -> Tensor:
    return _like_before(values, places, block, body)[0]


def _op(signature: str, kernel: Callable[..., Any]) -> Any:
    name = _LIBRARY.define(signature)
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    return has_side_effect(getattr(torch.ops.ndcompile, name.split("::")[-1]).default)


ENTER = _op("enter(Tensor[] values, str block, int body) -> ()", _mark)
LEAVE = _op("leave(Tensor[] values, int body) -> ()", _mark)
AGAIN = _op("again(Tensor[] values, str block, int body) -> Tensor[]", _mark)
"""Never run: `spell_out` writes it in place of the next two, of which the tracer makes less work."""
_LATER = _op("later(Tensor[] values, int[] places, str block, int body) -> Tensor[]", _like_before)
_LATER_ONE = _op("later_one(Tensor[] values, int[] places, str block, int body) -> Tensor", _like_the_one_before)


def spell_out(graph: fx.GraphModule) -> None:
    """Write later calls as `again`, with all of their arguments: the tracer got those that are not the body's own."""
    entered: dict[int, list[fx.Node]] = {}
    for node in graph.graph.nodes:
        if node.target is ENTER:
            entered[node.args[2]] = node.args[0]
        elif node.target in (_LATER, _LATER_ONE):
            others, places, block, body = node.args
            given = dict(enumerate(entered[body])) | dict(zip(places, others, strict=True))
            one, node.target = node.target is _LATER_ONE, AGAIN
            node.args = (list(given.values()), block, body)
            if one:
                with graph.graph.inserting_after(node):
                    result = graph.graph.call_function(operator.getitem, (node, 0))
                node.replace_all_uses_with(result, lambda user, result=result: user is not result)
                result.meta = {**node.meta}
                node.meta["val"] = [node.meta["val"]]


@dataclass
class _Body:
    """One traced block: how it was called, what was read of its modules, and how its results are put together."""

    number: int
    scope: Scope
    called: Any
    entered: list[Tensor]
    """What it took."""
    reads: dict[tuple[Any, str], Any] = field(default_factory=dict)
    """By the path of a module in the block, or a module outside, and a name: what it held."""
    followed: bool = True
    result: tuple[list[Any], Any] = ([], None)


class Borders:
    """The blocks of a model, by path. With `once=False` every call is traced, and only borders are marked."""

    def __init__(
        self, model: nn.Module, blocks: Mapping[str, nn.Module], once: bool = True, withheld: Withheld | None = None
    ) -> None:
        self.blocks, self.once, self.withheld = blocks, once, withheld
        self.paths = {id(vars(module)): path for path, module in blocks.items()}
        self.describe = _Describer(model)
        self.checkpoints = Checkpoints(bool(blocks))
        self.bodies: list[_Body] = []
        self.again: set[str] = set()
        """The blocks of which a call was not traced."""
        self.recording: _Body | None = None

    @contextmanager
    def marked(self) -> Iterator[None]:
        """While it holds, calls of blocks are traced as the head of this file says."""
        classes: set[Any] = {type(block) for block in self.blocks.values()}
        _TRACED.clear()
        with forwards.replaced({cls: self._marking(cls, cls.forward) for cls in classes}):
            yield

    def _marking(self, cls: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
        def plain(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            """As the class has it: transformers' layers ask whether theirs is the class's own `forward`."""
            marking, cls.forward = cls.forward, forward
            try:
                return forward(module, *args, **kwargs)
            finally:
                cls.forward = marking

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            path = self.paths.get(id(attributes(module)))
            if path is None or self.recording is not None:
                return forward(module, *args, **kwargs)
            leaves, spec = pytree.tree_flatten((args, kwargs))
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            called = self._called(leaves, spec, tensors)
            scope = self._scope(path)
            body = next((body for body in self.bodies if self._fits(body, scope, called)), None)
            if body is not None:
                self.checkpoints.again(path, body.scope.path)
                return self._again(body, path, tensors)
            body = _Body(len(self.bodies), scope, called, tensors)
            with self.checkpoints.block(path):
                return self._traced(body, tensors, lambda: plain(module, *args, **kwargs))

        return call

    def _scope(self, path: str) -> Scope:
        """What a block holds now; one that is empty can't have got anything else since then."""
        withheld = self.withheld.scopes.get(path) if self.withheld else None
        return withheld or Scope.of(path, self.blocks[path])

    def _called(self, leaves: list[Any], spec: Any, tensors: list[Tensor]) -> Any:
        """All that a trace sees of a call; nothing is equal to None."""
        try:
            with private.without_functions():
                return (spec, tuple(self._argument(leaf, tensors) for leaf in leaves), *_modes())
        except Opaque:
            return None

    def _argument(self, leaf: Any, tensors: list[Tensor]) -> Any:
        """An argument as a trace sees it: of a tensor its form, and which of the arguments it is."""
        if not isinstance(leaf, Tensor):
            return self.describe(leaf)
        return (next(i for i, t in enumerate(tensors) if t is leaf), *form(leaf))

    def _traced(self, body: _Body, tensors: list[Tensor], forward: Callable[[], Any]) -> Any:
        if self.withheld and body.scope.path in self.withheld.scopes:
            self.withheld.ask()
        self.bodies.append(body)
        ENTER(tensors, body.scope.path, body.number)
        with self._written_down(body):
            result = forward()
        returned, spec = pytree.tree_flatten(result)
        values = [leaf for leaf in returned if isinstance(leaf, Tensor)]
        LEAVE(values, body.number)
        body.followed &= all(isinstance(leaf, (Tensor, *VALUES)) for leaf in returned)
        body.result = ([None if isinstance(leaf, Tensor) else (leaf,) for leaf in returned], spec)
        _TRACED.append([value.detach() for value in values])
        return result

    def _again(self, body: _Body, path: str, tensors: list[Tensor]) -> Any:
        self.again.add(path)
        with preserve_node_meta():
            set_stack_trace([f"a call as that of {body.scope.path}"])  # torch would walk the stack, which nobody reads
            places = [i for i, (now, then) in enumerate(zip(tensors, body.entered, strict=True)) if now is not then]
            places = places or [0][: len(tensors)]  # the tracer takes the device from what it is given
            values = iter(self._called_later([tensors[i] for i in places], places, path, body))
        leaves, spec = body.result
        return pytree.tree_unflatten([next(values) if leaf is None else leaf[0] for leaf in leaves], spec)

    def _called_later(self, others: list[Tensor], places: list[int], path: str, body: _Body) -> list[Tensor]:
        if len(_TRACED[body.number]) == 1:
            return [_LATER_ONE(others, places, path, body.number)]
        return list(_LATER(others, places, path, body.number))

    # ---- what a trace reads of the modules -----------------------------------------------------------------------

    @contextmanager
    def _written_down(self, body: _Body) -> Iterator[None]:
        """While it holds, reads and writes of modules are those of a block that is traced."""
        written = nn.Module.__setattr__
        nn.Module.__getattribute__ = self._reading()  # type: ignore[method-assign]
        nn.Module.__setattr__ = self._writing(written)  # type: ignore[method-assign]
        self.recording = body
        try:
            yield
        finally:
            self.recording = None
            nn.Module.__setattr__ = written  # type: ignore[method-assign]
            del nn.Module.__getattribute__

    def _reading(self) -> Callable[[Any, str], Any]:
        plain = object.__getattribute__

        def read(module: Any, name: str) -> Any:
            body = self.recording
            if body is not None and name[:2] != "__":
                place = body.scope.modules.get(id(plain(module, "__dict__")), module)
                if (place, name) not in body.reads:
                    self.recording = None
                    try:
                        body.reads[place, name] = self._held(Contents.of(module), body.scope, place, name)
                    except Opaque:
                        body.reads[place, name], body.followed = None, False
                    self.recording = body
            elif body is not None and name == "__dict__":
                body.followed &= _by_the_tracer(sys._getframe(1))
            return plain(module, name)

        return read

    def _writing(self, plain: Callable[..., None]) -> Callable[..., None]:
        def write(module: Any, name: str, value: Any) -> None:
            if self.recording is not None:
                self.recording.followed &= _by_the_tracer(sys._getframe(1))
            plain(module, name, value)

        return write

    def _held(self, contents: Contents, scope: Scope, place: Any, name: str) -> Any:
        """What a module itself holds under a name; what its class has is the same for all of the class."""
        value = contents.find(name)
        if type(value) in PLAIN or value is NOTHING:
            return (type(value), value)
        if type(value) in CONTAINERS and not value:
            return (type(value),)
        parts = (scope.path, place if isinstance(place, str) else "", "" if name in KINDS else name)
        return self.describe(value, scope, ".".join(filter(None, parts)))

    def _fits(self, body: _Body, scope: Scope, called: Any) -> bool:
        """Whether a call of the block would be traced to this body."""
        alike = scope.kind is body.scope.kind and (
            not self.withheld or self.withheld.may_be(scope.path, body.scope.path)
        )
        if not (self.once and body.followed and alike and called is not None and called == body.called):
            return False
        try:
            for (place, name), found in body.reads.items():
                contents = scope.contents.get(place) if isinstance(place, str) else Contents.of(place)
                if contents is None or self._held(contents, scope, place, name) != found:
                    return False
        except Opaque:
            return False
        return True


VALUES = (*PLAIN, torch.Size)
TRACER = (nn.Module.__getattr__.__code__.co_filename, str(Path(torch.fx.__file__).parent))


NOWHERE = Scope("", {}, {})


def _by_the_tracer(frame: types.FrameType) -> bool:
    """Whether code of `nn.Module` itself, or of torch.fx, which wraps modules while it traces, is at work."""
    return frame.f_code.co_filename.startswith(TRACER)


class _Describer:
    """Says of a value what a trace can see of it, so that equal descriptions give equal traces."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors = dict(tensors_of(model))
        self.first = first_names(self.tensors)
        self.forms = {name: form(tensor) for name, tensor in self.tensors.items()}
        self.kinds = {name: type(tensor) for name, tensor in self.tensors.items()}
        """Of the tensors that the tracer takes the place of with its own."""
        self.kept: list[Any] = []

    def __call__(self, value: Any, scope: Scope = NOWHERE, name: str = "", above: tuple[int, ...] = ()) -> Any:
        """A parameter or buffer is described by its form and its name in its block; a block's module by its class."""
        if type(value) in PLAIN or isinstance(value, VALUES):
            return (type(value), value)
        if id(value) in above:
            return ("above", above.index(id(value)))
        above = (*above, id(value))
        if isinstance(value, Tensor) and name in self.first:
            first, own = self.first[name], scope.path + "."
            shape = self.forms[name] if value is self.tensors[name] else form(value)
            return (self.kinds[name], *shape, first[len(own) :] if first.startswith(own) else "/" + first)
        if isinstance(value, nn.Module) and id(attributes(value)) in scope.modules:
            return type(value)
        if isinstance(value, types.MethodType):
            return (value.__func__, self(value.__self__, scope, "", above))
        if isinstance(value, (list, tuple)):
            return (type(value), *(self(v, scope, f"{name}.{i}", above) for i, v in enumerate(value)))
        if isinstance(value, dict):
            keys = [k if type(k) is str else self(k, scope, "", above) for k in value]
            held = [
                (type(v), v) if type(v) in PLAIN else self(v, scope, f"{name}.{k}", above) for k, v in value.items()
            ]
            return (type(value), tuple(keys), tuple(held))
        if isinstance(value, (set, frozenset)):
            return (type(value), frozenset(self(v, scope, "", above) for v in value))
        if isinstance(value, functools.partial):
            return (type(value), self((value.func, value.args, value.keywords), scope, "", above))
        if isinstance(value, FIXED):
            self.kept.append(value)
            return ("itself", id(value))
        if _made_in_python(value):
            return (type(value), self(vars(value), scope, "", above))
        raise Opaque


class Opaque(Exception):
    """A value whose state can't be seen: two looks at it may be of different states."""


FIXED = (Tensor, nn.Module, type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, enum.Enum)
"""What is the same as long as it is the same object: reads of modules are written down, changes of tensors are ops."""


def _made_in_python(value: Any) -> bool:
    """Whether all of an object's state is in its `__dict__`."""
    slots = any("__slots__" in vars(cls) for cls in type(value).__mro__[:-1])
    return (
        made_in_python(value)
        and not slots
        and not isinstance(value, (type, nn.Module, Tensor))
        and hasattr(value, "__dict__")
    )


def _modes() -> tuple[Any, ...]:
    """What of torch's state decides how ops are traced."""
    casts = tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))
    return (torch.is_grad_enabled(), casts)
