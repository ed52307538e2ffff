"""The inputs of a model: how it is called, and which of their sizes are the batch and the sequence."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ndcompile.errors import CompileError
from ndcompile.runtime.leaves import named_leaves

DynamicDims = Mapping[str, Mapping[int, str]]
"""For an input by name, which of its dims is which symbol: `{"pixels": {0: "b"}}`."""


@dataclass(frozen=True)
class Inputs:
    """How the model is called: positional and keyword arguments, and where in them the tensors are."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, example: object) -> Inputs:
        """A dict is keyword arguments, a tuple or list positional ones, one tensor the only one."""
        if isinstance(example, Mapping):
            return cls((), dict(example))
        if isinstance(example, (tuple, list)):
            return cls(tuple(example), {})
        return cls((example,), {})

    def named(self, model: nn.Module) -> dict[str, Any]:
        """Every leaf with a name that a user would give it: the parameter of `forward`, dotted where nested."""
        signature = inspect.signature(model.forward)
        try:
            return named_leaves(signature, self.args, self.kwargs)
        except TypeError as error:
            raise CompileError(
                f"the example inputs do not fit {type(model).__name__}.forward: {error}",
                tries=f"example_inputs for forward{signature}",
            ) from error


SEQUENCES = "stuv"
"""The symbols of sequences of different lengths."""


def name_dims(named: Mapping[str, Any], dynamic_dims: DynamicDims | None) -> dict[str, dict[int, str]]:
    """Which dim of which input is `b` or `s`: dim 0 of all is the batch, dim 1 of integer inputs the sequence.

    Sequences of another length than the first's (a decoder's) are `t`, then `u`. A floating companion of an integer
    input has its sequence at dim 1 too if it has as many entries there.
    """
    tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
    for name in dynamic_dims or {}:
        if name not in tensors:
            raise CompileError(f"dynamic_dims names '{name}', which is no tensor input", tries=", ".join(tensors))
    ids = [value for value in tensors.values() if value.dim() > 1 and not value.is_floating_point()]
    lengths = dict(zip(dict.fromkeys(value.shape[1] for value in ids), SEQUENCES, strict=False))
    found: dict[str, dict[int, str]] = {}
    for name, value in tensors.items():
        dims = {0: "b"} if value.dim() else {}
        if value.dim() > 1 and (not value.is_floating_point() or (value.dim() == 2 and value.shape[1] in lengths)):
            dims[1] = lengths.get(value.shape[1], "s")
        found[name] = dict((dynamic_dims or {}).get(name, dims))
    return found


def traced_inputs(
    named: Mapping[str, Any], symbols: Mapping[str, Mapping[int, str]], widen: torch.dtype | None
) -> Iterator[tuple[str, Any]]:
    """Each input its own meta tensor, with sizes ≥ 2 that differ between symbols and from all other dims."""
    used = {n for v in named.values() if isinstance(v, Tensor) for n in v.shape}
    sizes = {}
    for name, value in named.items():
        for dim, symbol in symbols.get(name, {}).items():
            if symbol == "s" or symbol not in sizes:
                sizes[symbol] = int(value.shape[dim])
    fresh = (n for n in (5, 7, 11, 13, 17, 19, 23) if n not in used)
    for symbol in sizes:
        if symbol == "b" or sizes[symbol] < 2 or list(sizes.values()).count(sizes[symbol]) > 1:
            sizes[symbol] = next(fresh)
    for name, value in named.items():
        if not isinstance(value, Tensor):
            yield name, value
            continue
        shape = [sizes[symbols[name][d]] if d in symbols[name] else n for d, n in enumerate(value.shape)]
        dtype = widen if widen is not None and value.is_floating_point() else value.dtype
        yield name, torch.empty(shape, dtype=dtype, device="meta", requires_grad=value.requires_grad)
