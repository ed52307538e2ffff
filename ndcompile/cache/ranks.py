"""One rank compiles for all, where all are known to ask for the same program."""

from __future__ import annotations

import logging
import pickle
from typing import Any

import torch.distributed as dist

from ndcompile.cache import form
from ndcompile.cache.kept import program_of, recalled
from ndcompile.cache.key import Key, key_or_why
from ndcompile.cache.store import Store
from ndcompile.program import Program
from ndcompile.request import Request
from ndcompile.runtime.agreement import everyones, together

LOG = logging.getLogger("ndcompile")


def program_for_all(request: Request, store: Store | None) -> Program:
    """The program on every rank: rank 0's if all keys are equal, else each rank's own.

    What rank 0 raises, all raise. Each rank compiles for itself where its key differs from another's, or cannot be
    told; whether the programs are equal is for binding to compare.
    """
    if dist.get_world_size() == 1:
        return program_of(request, store)
    key = key_or_why(request)
    why_not = _why_not(everyones(key))
    if why_not:
        LOG.info("each rank compiles %s for itself: %s", type(request.model).__name__, why_not)
        return together(lambda: program_of(request, store, key=key))
    own, text = _of_rank_0(request, store, key)
    if text is not None:
        return own or recalled(text, request)
    LOG.info("each rank compiles %s for itself: %s", type(request.model).__name__, form.WHY_NOT)
    return together(lambda: own or program_of(request, store, key=key))


def _why_not(asked: list[Key | str]) -> str:
    """Why ranks cannot take the program of one; nothing where they can."""
    first = asked[0]
    for rank, theirs in enumerate(asked):
        if isinstance(theirs, str):
            return theirs
        if isinstance(first, Key) and theirs != first:
            return f"ranks 0 and {rank} differ in {', '.join(first.differs(theirs))}"
    return ""


def _of_rank_0(request: Request, store: Store | None, key: Key | str) -> tuple[Program | None, str | None]:
    """Rank 0's program, there as it is and everywhere as text (None where it has none); or the error that it raises."""
    own: Program | None = None
    told: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            own = program_of(request, store, key=key)
            told = [form.written(own), None]
        except Exception as error:  # raised on every rank, which would else wait
            dist.broadcast_object_list([None, _portable(error)])
            raise
    dist.broadcast_object_list(told)
    text, failure = told
    if failure is not None:
        raise failure
    return own, text


def _portable(error: Exception) -> Exception:
    """An error as it can be sent; one that cannot be is told by its text."""
    try:
        sent = pickle.loads(pickle.dumps(error))
    except Exception:  # whatever an error of a model's is made of
        sent = None
    return error if type(sent) is type(error) and str(sent) == str(error) else RuntimeError(f"rank 0 failed: {error!r}")
