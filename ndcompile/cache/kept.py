"""A program out of the store where it is there, and else compiled and put there."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path

from ndcompile.cache import form
from ndcompile.cache.key import Key, key_or_why
from ndcompile.cache.store import Store
from ndcompile.errors import CompileError
from ndcompile.program import Made, Program
from ndcompile.request import Request, skeleton

LOG = logging.getLogger("ndcompile")


def program_of(
    request: Request, store: Store | None = None, dump: str | Path | None = None, key: Key | str | None = None
) -> Program:
    """The program that is asked for. With `dump`, where the passes are to be seen, it is always compiled.

    `key` is that of the request, or why it has none, where it is known already.
    """
    if store is None or dump is not None:
        return compiled(request, dump)
    begin = time.perf_counter()
    key = key_or_why(request) if key is None else key
    if not isinstance(key, Key):
        LOG.warning("%s is compiled anew at each start: %s", type(request.model).__name__, key)
        return compiled(request)
    name = str(key)
    text = store.read(name)
    if text is None:
        with store.alone(name):
            text = store.read(name)  # another process may have been at it
            if text is None:
                return _put(compiled(request), store, name)
    return recalled(text, request, time.perf_counter() - begin)


def compiled(request: Request, dump: str | Path | None = None) -> Program:
    """The program, made anew; only here the compiler is loaded."""
    from ndcompile import compiler

    return compiler.compiled(request, dump)


def recalled(text: str, request: Request, seconds: float = 0.0) -> Program:
    """The program that `form.written` wrote."""
    kept = form.read(text)
    return Program(
        kept.source, kept.manifest, kept.mesh, kept.parameters, lambda: _again(request, kept), {"recall": seconds}
    )


def _put(program: Program, store: Store, key: str) -> Program:
    text = form.written(program)
    if text is None:
        LOG.warning("%s is compiled anew at each start: %s", program.manifest.model, form.WHY_NOT)
    else:
        store.write(key, text)
    return program


def _again(request: Request, kept: form.Kept) -> Made:
    """What is not kept of a program, compiled again from the model as it is now."""
    LOG.info("%s is compiled again: its graphs are asked for, and only its text is kept", kept.manifest.model)
    training = kept.manifest.training
    if request.model.training != training:
        request = replace(request, model=skeleton(request.model).train(training))
    program = compiled(request)
    if program.source != kept.source:
        raise CompileError(
            f"the program of {kept.manifest.model} cannot be made again",
            why="its graphs are not kept with its text, and the model was changed since",
            tries=("ask for graphs before the model is changed", "nd.compile again, with cache='off'"),
        )
    return program.made
