"""Where an object was written: in what is known by its version, in an installed package, or by the user."""

from __future__ import annotations

import functools
import sys
import sysconfig
import types
from pathlib import Path
from typing import Any

CLOSED, PACKAGE, USER = "closed", "package", "user"
"""`CLOSED` is known by version and never looked into; a `PACKAGE` is installed; all else is the user's."""

PLUMBING = frozenset(
    "huggingface_hub tokenizers safetensors tqdm yaml psutil filelock packaging regex requests httpx httpx2".split()
)
"""Packages that model libraries use, and that compute nothing with tensors."""

KNOWN_BY_VERSION = frozenset({"torch", "numpy", "ndcompile", "sympy", "scipy"}) | PLUMBING | sys.stdlib_module_names

_INSTALLED = tuple(sorted({sysconfig.get_path(name) for name in ("purelib", "platlib")}))
_STANDARD = tuple(sorted({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}))
_OWN = str(Path(__file__).resolve().parents[1])
_PASSES = str((Path(__file__).resolve().parents[1] / "passes").resolve())


@functools.cache
def of_file(path: str) -> str | None:
    """The origin of a file; None where the name is none (`<string>`)."""
    if path.startswith("<"):
        return None
    for folder in _INSTALLED:
        if path.startswith(folder + "/"):
            top = path[len(folder) + 1 :].partition("/")[0].removesuffix(".py")
            return CLOSED if top in KNOWN_BY_VERSION else PACKAGE
    if path.startswith(tuple(f"{folder}/" for folder in (*_STANDARD, _OWN, _PASSES))):
        return CLOSED
    return USER


def of_module(name: str | None) -> str:
    """Of a module by its name. One that is not there, or has no file, is the user's unless it is built in."""
    module = sys.modules.get(name or "")
    path = getattr(module, "__file__", None)
    if isinstance(path, str):
        return of_file(path) or USER
    return CLOSED if (name or "").partition(".")[0] in KNOWN_BY_VERSION else USER


def of_function(function: types.FunctionType) -> str:
    """The user's if its code or the module that it calls its own is: a decorator's wrapper names the one it wraps."""
    places = (
        of_file(function.__code__.co_filename) or of_module(function.__globals__.get("__name__")),
        of_module(function.__module__),
    )
    return next(place for place in (USER, PACKAGE, CLOSED) if place in places)


def reference(value: Any) -> str | None:
    """`module:qualified.name`, if that is where the object is found."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = vars(found).get(part) if isinstance(found, (types.ModuleType, type)) else None
    found = found.__func__ if isinstance(found, (staticmethod, classmethod)) else found
    return f"{module}:{name}" if found is value else None


def package_of(name: str | None) -> str:
    """The package that a module is of."""
    return (name or "").partition(".")[0]
