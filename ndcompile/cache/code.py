"""Python code as text that is equal in two processes exactly where the code is, lines included."""

from __future__ import annotations

import builtins
import dis
import functools
import hashlib
import os
import sys
import types
from collections.abc import Iterator
from typing import Any


def digest(code: types.CodeType) -> str:
    """A hash of all that a code object does, and of the lines that errors and emitted comments name."""
    return _digest(code, os.path.basename(code.co_filename))


@functools.cache
def _digest(code: types.CodeType, file: str) -> str:
    """Code objects are equal whatever their file, so it is a key of its own."""
    consts = [digest(c) if isinstance(c, types.CodeType) else _constant(c) for c in code.co_consts]
    parts = (
        code.co_name, file, code.co_firstlineno, code.co_flags, code.co_argcount,
        code.co_posonlyargcount, code.co_kwonlyargcount, code.co_names, code.co_varnames, code.co_freevars,
        code.co_cellvars, code.co_code, code.co_linetable, code.co_exceptiontable, consts,
    )  # fmt: skip
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _constant(value: Any) -> str:
    """A constant of the compiler's: plain, or a tuple or set of such."""
    if isinstance(value, frozenset):
        return f"frozenset{sorted(map(_constant, value))}"
    if isinstance(value, tuple):
        return f"tuple{[*map(_constant, value)]}"
    return f"{type(value).__name__} {value!r}"


@functools.cache
def nested(code: types.CodeType) -> tuple[types.CodeType, ...]:
    """The code and that of the functions and classes in it."""
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return (code, *(deeper for c in inner for deeper in nested(c)))


@functools.cache
def names(code: types.CodeType, texts: bool = True) -> frozenset[str]:
    """Every name of a global, an attribute or an import; with `texts` also every text that could be one."""
    found = {name for part in nested(code) for name in part.co_names}
    if not texts:
        return frozenset(found)
    return frozenset(found | {text for part in nested(code) for c in part.co_consts for text in _texts(c)})


def _texts(constant: Any) -> Iterator[str]:
    if isinstance(constant, str) and constant.isidentifier():
        yield constant
    elif isinstance(constant, (tuple, frozenset)):
        for part in constant:
            yield from _texts(part)


@functools.cache
def _steps(code: types.CodeType) -> tuple[frozenset[str], tuple[tuple[str, Any], ...]]:
    """The globals that the code reads, and its imports, each with its level."""
    read, imported, before = set[str](), list[tuple[str, Any]](), [0, 0]
    for part in nested(code):
        for step in dis.get_instructions(part):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                read.add(step.argval)
            elif step.opname == "IMPORT_NAME":
                imported.append((step.argval, before[-2]))
            elif step.opname.startswith("LOAD_"):
                before.append(step.argval)
    return frozenset(read), tuple(imported)


def read(function: types.FunctionType) -> list[tuple[str, Any]]:
    """The globals that a function's code reads, and the modules that it imports when it runs, by name.

    None stands for a module that is not loaded yet.
    """
    held, (names, imported) = function.__globals__, _steps(function.__code__)
    package = held.get("__package__") or ""
    found = {name: held.get(name, vars(builtins).get(name, ...)) for name in names}
    found |= {f"import {name}": sys.modules.get(_absolute(name, level, package)) for name, level in imported}
    return sorted(found.items(), key=lambda item: item[0])


def _absolute(name: str, level: Any, package: str) -> str:
    if not isinstance(level, int) or level == 0:
        return name
    parts = package.split(".")
    return ".".join([*parts[: len(parts) - level + 1], *([name] if name else [])])
