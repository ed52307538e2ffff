"""All that a trace of a model may see, walked over and hashed: equal in two processes where the traces would be.

Objects are described by what is in them, never by where they lie in memory; functions by their code, the globals that
it reads, their defaults and closures; classes and modules by those members that some code has a name for. What is known
by version (Python, torch) is named and not looked into, but found where it was replaced. An object whose state can't be
seen raises `Unseen` where the user's code or the model holds it; in code of installed packages its class stands for it.
"""

from __future__ import annotations

import hashlib
import types
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ndcompile.cache import code, origin
from ndcompile.cache.outside import asked_for
from ndcompile.cache.values import describer, is_plain
from ndcompile.objects import made_in_python
from ndcompile.runtime import private
from ndcompile.twin import has_hooks


class Unseen(Exception):
    """Something that a program may depend on cannot be told: the text says what, and how it is reached."""


ENTRIES = frozenset("forward backward setup_context jvp vmap apply".split())
"""Names of methods that torch calls without naming them in code that is walked over."""

MAKING = frozenset("__init__ __new__ __post_init__ __init_subclass__ __set_name__ __class_getitem__".split())
"""What only the making of an object calls: a model is made already."""

UNNAMED = frozenset("__del__ __doc__ __module__ __dict__ __weakref__ __slots__ __qualname__".split())

OF_THE_PROCESS = frozenset({"_original_object_hash", "_torchdynamo_wrapper_id", "SESSION_ID"})
"""Names under which libraries hold what differs from process to process and decides nothing."""

INSIDE = ("torch.nn", "torch.nn.functional", "torch.special", "torch.fft", "torch.linalg", "torch.autograd")
"""The modules of torch in which replaced functions are looked for by name."""

METHODS = (types.FunctionType, staticmethod, classmethod, property)


@dataclass
class Space:
    """A class or module: its members are described as soon as some code has a name for them."""

    holder: Any
    label: str
    strict: bool
    made: bool
    done: set[str] = field(default_factory=set)

    def wanted(self, names: set[str]) -> list[str]:
        """Members not yet described that have a name in code, and what Python calls by itself."""
        held = vars(self.holder)
        found = held.keys() & names
        if isinstance(self.holder, type):
            found |= {n for n, v in held.items() if n[:2] == n[-2:] == "__" and isinstance(v, METHODS)}
            found -= UNNAMED if self.made else UNNAMED | MAKING
        else:
            found = {n for n in found if not n.startswith("__")}
        return sorted(found - self.done)


class Walk:
    """One walk. `own` names the model's parameters and buffers by id: of them only the form is known elsewhere."""

    def __init__(self, own: Mapping[int, str]) -> None:
        self.own = own
        self.names: set[str] = set(ENTRIES)
        self.packages: set[str] = set()
        self._hash = hashlib.sha256()
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []
        self._later: deque[Callable[[], None]] = deque()
        self._spaces: dict[int, Space] = {}
        self._makes = False
        self._called: set[str] = set()

    def digest(self, value: Any, name: str) -> str:
        """The hash of a value of the user's and of everything that it reaches."""
        self.value(value, True, name)
        for holder in (torch, torch.nn.functional, torch.Tensor, nn.Module):
            self._space(holder, made=True)
            self._replaced(holder)
        while self._later or self._members():
            while self._later:
                self._later.popleft()()
        return self._hash.hexdigest()

    def say(self, *parts: Any) -> None:
        """Add plain values to the hash."""
        self._hash.update(repr(parts).encode("utf-8", "surrogatepass"))

    def unseen(self, value: Any, strict: bool, way: str) -> None:
        """Refuse an object whose state can't be seen; in an installed package's own code its class stands for it."""
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if strict:
            raise Unseen(f"{way} is a {kind}, whose state cannot be seen")
        self.say("a", kind)

    # ---- values --------------------------------------------------------------------------------------------------

    def value(self, value: Any, strict: bool, way: str) -> None:
        """Describe a value; functions, classes, modules and objects that it holds are walked over later."""
        if is_plain(value):
            self.say(type(value).__name__, repr(value))
            if strict and isinstance(value, str) and value.isidentifier():
                self.names.add(value)
        elif id(value) in self.own:
            self.say("the model's", self.own[id(value)])
            self._beside(value, strict, way)
        elif id(value) in self._numbers:
            self.say("again", self._numbers[id(value)])
        else:
            self._numbers[id(value)] = len(self._numbers)
            self._kept.append(value)
            self._first_time(value, strict, way)

    def _beside(self, tensor: Tensor, strict: bool, way: str) -> None:
        """What was put on a parameter or buffer as attributes; told once."""
        if vars(tensor) and id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self._numbers)
            self.state(tensor, strict, way)

    def _first_time(self, value: Any, strict: bool, way: str) -> None:
        describe = describer(value)
        if describe is not None:
            describe(self, value, strict, way)
        elif isinstance(value, types.FunctionType):
            self.function(value, strict, way)
        elif isinstance(value, type):
            self.kind(value, made=True)
        elif isinstance(value, types.ModuleType):
            self._module(value)
        elif isinstance(value, nn.Module):
            self._object_of(value)
            self._later.append(lambda: self._layer(value, strict, way))
        elif made_in_python(value):
            self._object(value, strict, way)
        else:
            self.unseen(value, strict, way)

    def _object(self, value: Any, strict: bool, way: str) -> None:
        closed = origin.of_module(type(value).__module__) == origin.CLOSED
        self._object_of(value)
        if strict or not closed:
            self._later.append(lambda: self.state(value, strict, way))

    def _object_of(self, value: Any) -> None:
        self.say("object")
        self.kind(type(value), made=False)

    def state(self, value: Any, strict: bool, way: str) -> None:
        """What an object made in Python holds: its attributes, by name."""
        held = dict(getattr(value, "__dict__", {}))
        for cls in type(value).__mro__:
            names = vars(cls).get("__slots__", ())
            for name in (names,) if isinstance(names, str) else names:
                if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                    held[name] = getattr(value, name)
        for name in sorted(held.keys() - OF_THE_PROCESS):
            self.say(name)
            self.value(held[name], strict, f"{way}.{name}")

    def _layer(self, module: nn.Module, strict: bool, way: str) -> None:
        if has_hooks(module):
            raise Unseen(f"{way} has a hook")
        held = vars(module)
        for kind in ("_parameters", "_buffers", "_modules"):
            for name, value in held[kind].items():
                self.say(kind, name)
                self.value(value, strict, f"{way}.{name}")
        for name in sorted(held.keys() - BOOKKEEPING):
            self.say(name)
            self.value(held[name], strict, f"{way}.{name}")

    # ---- code ----------------------------------------------------------------------------------------------------

    def function(self, function: types.FunctionType, strict: bool, way: str) -> None:
        """Its code now; what it reads, later."""
        place, found = origin.of_function(function), origin.reference(function)
        self.say("function", found or function.__qualname__)
        if place == origin.CLOSED and found:
            self.say(function.__code__.co_firstlineno)
            return
        self.say(code.digest(function.__code__))
        inner = strict if place == origin.CLOSED else place == origin.USER
        if place != origin.CLOSED:
            self.names |= code.names(function.__code__, texts=place == origin.USER)
            self.packages.add(origin.package_of(function.__module__))
        self._makes |= place == origin.USER and not {"type", "__class__", "cls"}.isdisjoint(self.names)
        self._later.append(lambda: self._reads(function, place, inner, way))

    def _reads(self, function: types.FunctionType, place: str, strict: bool, way: str) -> None:
        way = f"{way}, function {function.__qualname__}"
        self.value(function.__defaults__, strict, f"{way}, its defaults")
        self.value(function.__kwdefaults__, strict, f"{way}, its defaults")
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self.say("closure", name)
            self.value(_content(cell), strict, f"{way}, '{name}' of its closure")
        if place == origin.CLOSED:
            return
        attributes = {n: v for n, v in sorted(vars(function).items()) if n not in {"__wrapped__", *OF_THE_PROCESS}}
        self.value(attributes, strict, way)
        for name, value in code.read(function):
            if name in OF_THE_PROCESS:
                continue
            outside = asked_for(function, name, value) if place == origin.USER else None
            if outside:
                raise Unseen(f"{way} reads {outside}: a program cannot be kept for that")
            self.say("reads", name)
            self.value(value, strict, f"{way}, '{name}' that it reads")

    def kind(self, cls: type, made: bool) -> None:
        """A class: its name, its line of ancestors, and the spaces of their members."""
        self.say("class", *(origin.reference(c) or c.__qualname__ for c in cls.__mro__))
        if type(cls) is not type and origin.of_module(type(cls).__module__) != origin.CLOSED:
            self.value(type(cls), True, type(cls).__qualname__)
        for ancestor in () if _is_known(cls) else cls.__mro__[:-1]:
            self._space(ancestor, made)
        flattens = pytree.SUPPORTED_NODES.get(cls)
        if flattens is not None and origin.of_module(cls.__module__) != origin.CLOSED:
            strict = origin.of_module(cls.__module__) == origin.USER
            self.value([flattens.flatten_fn, flattens.unflatten_fn], strict, f"{cls.__qualname__}'s pytree")

    def _module(self, module: types.ModuleType) -> None:
        self.say("module", module.__name__)
        if module.__name__.startswith("torch.ops."):
            self.names |= {"ops", *module.__name__.split(".")}
        elif origin.of_module(module.__name__) != origin.CLOSED or module.__name__ in INSIDE:
            self._space(module, made=True)

    def _space(self, holder: Any, made: bool) -> None:
        module = holder.__module__ if isinstance(holder, type) else holder.__name__
        place, package = origin.of_module(module), origin.package_of(module)
        if _is_known(holder):
            return
        if id(holder) not in self._spaces:
            unknown = isinstance(holder, type) and origin.reference(holder) is None
            label = holder.__qualname__ if isinstance(holder, type) else holder.__name__
            self._spaces[id(holder)] = Space(holder, label, place == origin.USER or unknown, made)
            self.packages.add(package)
        self._spaces[id(holder)].made |= made

    def _members(self) -> bool:
        """Describe members of spaces for which names have come up; whether there were any."""
        found = False
        for space in list(self._spaces.values()):
            space.made |= self._makes and space.strict
            for name in space.wanted(self.names):
                found = True
                space.done.add(name)
                self.say("member", space.label, name)
                self._member(space, name, vars(space.holder)[name])
        return self._operators() or found

    def _member(self, space: Space, name: str, value: Any) -> None:
        hidden = isinstance(value, types.ModuleType) and value.__name__.startswith("torch.")
        if not hidden or value.__name__ in INSIDE:
            self.value(value, space.strict, f"{space.label}.{name}")

    def _replaced(self, holder: Any) -> None:
        """Functions of torch in whose place stands one of another origin are described, whoever calls them."""
        for name, value in sorted(vars(holder).items()):
            if isinstance(value, types.FunctionType) and origin.of_function(value) != origin.CLOSED:
                self.say("in place of", name)
                self.value(value, True, f"{holder.__name__}.{name}")

    # ---- operators -----------------------------------------------------------------------------------------------

    def operator(self, name: str, strict: bool, way: str) -> None:
        """An operator: torch's own by its name, one made by `torch.library.custom_op` by its functions."""
        space, parts = name.partition("::")[0], private.operator_parts(name)
        self.say("operator", name)
        if space in private.OPERATORS_OF_TORCH or origin.of_module(space) == origin.PACKAGE:
            self.packages.add(space)
        elif parts is not None:
            self.value(parts, strict, f"operator {name}")
        elif strict:
            raise Unseen(f"{way} is operator {name}, whose kernels cannot be seen")

    def _operators(self) -> bool:
        """Describe the operators that code may call as `torch.ops.…`; whether there were any new ones."""
        if "ops" not in self.names:
            return False
        called = {n for n in private.operators() if set(n.split("::")) <= self.names}
        new = sorted(called - self._called)
        self._called |= called
        for name in new:
            self.operator(name, True, f"torch.ops.{name.replace('::', '.')}")
        return bool(new)


BOOKKEEPING = frozenset(vars(nn.Module())) - {"training"}
"""What torch keeps in every module for itself: hooks, and the three tables that are described one by one."""


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name of an outer function that has no value yet
        return ...


def _is_known(holder: Any) -> bool:
    """Whether the version says all of a class or module, and nobody is expected to replace members of it."""
    module = holder.__module__ if isinstance(holder, type) else holder.__name__
    closed = origin.of_module(module) == origin.CLOSED and origin.package_of(module) != "torch"
    return closed and (isinstance(holder, types.ModuleType) or origin.reference(holder) is not None)
