"""What a forward must not ask for, if its program is to be kept: answers that come from outside of it."""

from __future__ import annotations

import builtins
import types
from typing import Any

from ndcompile.cache import code

OUTSIDE = frozenset(
    "os posix io _io time random _random datetime _datetime secrets uuid subprocess socket tempfile glob pathlib "
    "shutil platform getpass importlib sys threading multiprocessing "
    "torch.distributed torch.cuda torch.random torch.backends numpy.random".split()
)
"""Modules that tell of the machine, the process, its rank, the clock, files or chance."""

FUNCTIONS = frozenset("eval exec open input globals __import__ compile".split())
"""Functions of Python's own that reach what can't be seen in code."""


def asked_for(function: types.FunctionType, name: str, value: Any) -> str | None:
    """What of the outside a function reaches through one of the globals that it reads."""
    if value is None and name.startswith("import "):
        return f"module {name[7:]}, which it loads as it runs"
    if name in FUNCTIONS and value is vars(builtins).get(name):
        return name
    if isinstance(value, types.ModuleType) and not _is_outside(value.__name__):
        inner = ((n, vars(value).get(n)) for n in sorted(code.names(function.__code__) & vars(value).keys()))
        return next((f"{name}.{n}" for n, v in inner if _is_outside(_home(v))), None)
    return name if _is_outside(_home(value)) else None


def _home(value: Any) -> str:
    """The module of a module, a function or a class; nothing for other values."""
    if isinstance(value, types.ModuleType):
        return value.__name__
    owner = getattr(value, "__self__", None)
    if isinstance(value, types.BuiltinFunctionType) and owner is not None and not isinstance(owner, types.ModuleType):
        return type(owner).__module__
    return value.__module__ or "" if isinstance(value, CODE) else ""


CODE = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType)


def _is_outside(module: str) -> bool:
    parts = module.split(".")
    return any(".".join(parts[: i + 1]) in OUTSIDE for i in range(len(parts)))
