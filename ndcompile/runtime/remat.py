"""Activation checkpointing: what backward computes again instead of reading it from memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from ndcompile.runtime import private
from ndcompile.runtime.wires import STARTS

aten = torch.ops.aten
SAVABLE: Mapping[str, tuple[OpOverload, ...]] = {
    "linear": (aten.mm.default, aten.addmm.default, private.GROUPED_MM),
    "matmul": (aten.bmm.default, aten.baddbmm.default),
    "convolution": (aten.convolution.default,),
    "attention": tuple(forward for forward, _ in private.ATTENTION.values()),
    **{
        name: (op, *(other for kind, other in STARTS.items() if kind == name))
        for name, op in private.COLLECTIVES.items()
    },
}
"""The names of results that may be saved, and the ATen ops that make them."""


def recomputed(function: Callable[..., Any] | None = None, *, save: tuple[str, ...] = ()) -> Callable[..., Any]:
    """A pure function `(w, *tensors)` of which backward keeps the arguments and computes all else again.

    `save` names results that are kept too, by `SAVABLE`. The recomputation does what the function did, up to the last
    value that backward needs, collectives included: in the same order on every rank. Random numbers are the same, since
    they are functions of a key, which is an argument.
    """
    if function is None:
        return partial(recomputed, save=save)
    inner, ops = function, [op for name in save for op in SAVABLE[name]]
    options: dict[str, Any] = {}
    if ops:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, ops, allow_cache_entry_mutation=True)

    @wraps(function)
    def compute(w: Any, *values: Any) -> Any:
        kind, count = type(w), len(w)

        def run(*flat: Any) -> Any:
            return inner(kind(*flat[:count]), *flat[count:])

        # each weight is an argument: what is saved is then what autograd saves, which hides it where it was gathered
        return checkpoint(run, *w, *values, use_reentrant=False, preserve_rng_state=False, **options)

    return compute
