"""What an emitted text calls, in the words of the package `spmd_types`: its checker follows the text's forward.

Every conversion is the package's own, between the placements that the table of conversions says, and every weight comes
by the conversions that its line of `weights` says. Values are one rank's, in a world where nothing is sent.
"""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import spmd_types as spmd
import torch
import torch.nn.functional as torch_functional
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ndcompile.mesh import MeshSpec
from ndcompile.placement import BY_NAME
from ndcompile.runtime import Mesh, Ranks, weight

__all__ = [
    "Block",
    "Root",
    "current",
    "embedding",
    "functional",
    "cross_entropy",
    "reshaped",
    "scale_gradient",
    "weight",
]


@dataclass
class World:
    """The mesh of the package, and the typed parameters and buffers by name."""

    spec: MeshSpec
    mesh: DeviceMesh
    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]

    def group(self, axis: str) -> Any:
        return self.mesh.get_group(axis)


world: ContextVar[World] = ContextVar("world")


def current(text: str, *flattened: tuple[str, ...]) -> Mesh:
    return Mesh(world.get().spec)


# ---- conversions ---------------------------------------------------------------------------------------------------


def _placement(kind: str, dim: int | None) -> Any:
    if kind == "S":
        assert dim is not None, "a shard is of a dim"
        return spmd.S(dim)
    return {"R": spmd.R, "I": spmd.I, "P": spmd.P}[kind]


def _over(x: Tensor, axis: str, forward: str, source: Any, target: Any) -> Tensor:
    """One row of the table on one axis, by the function of the package that its forward is."""
    group, x = world.get().group(axis), x.contiguous()
    if forward == "all_reduce":
        return spmd.all_reduce(x, group, src=source, dst=target)
    if forward == "all_gather":
        return spmd.all_gather(x, group, src=source, dst=target)
    if forward == "reduce_scatter":
        return spmd.reduce_scatter(x, group, src=source, dst=target)
    if forward == "all_to_all":
        return spmd.all_to_all(x, group, src=source, dst=target)
    return spmd.convert(x, group, src=source, dst=target, expert_mode=True)


def _conversion(name: str) -> Callable[..., Tensor]:
    row = BY_NAME[name]

    def run(x: Tensor, axis: Ranks, *, dim: int | None = None, source: int | None = None, target: int | None = None,
            size: int | None = None, dtype: Any = None) -> Tensor:  # fmt: skip
        before = _placement(row.source, dim if source is None else source)
        after = _placement(row.target, dim if target is None else target)
        names = axis.name.split(",")
        for each in names if row.target == "S" else reversed(names):  # parts are joined from the minor axis on
            x = _over(x, each, row.forward, before, after)
        return x

    return run


for _name in BY_NAME:
    globals()[_name] = _conversion(_name)


# ---- weights, blocks, the root -------------------------------------------------------------------------------------


@contextmanager
def _gathered(weights: Mapping[str, Any], prefix: str) -> Iterator[Any]:
    values = []
    for each in weights.values():
        x = world.get().parameters[each.name[1:] if each.name[0] == "/" else f"{prefix}.{each.name}"]
        for axis, dim in reversed(each.gather.items()):
            x = _over(x, axis, "all_gather", spmd.S(dim), spmd.R)
        for axis in each.reduce:
            x = _over(x, axis, "identity", spmd.I, spmd.R)
        values.append(x)
    yield namedtuple("Weights", weights)(*values)


class Block:
    weights: Mapping[str, Any] = {}
    forward: Any

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, *values: Tensor) -> Any:
        return self.forward(*values)

    def gathered(self) -> Any:
        return _gathered(self.weights, self.path)

    def buffer(self, name: str) -> Tensor:
        return world.get().buffers[f"{self.path}.{name}"]


class Root:
    weights: Mapping[str, Any] = {}
    blocks: Mapping[str, type[Block]] = {}
    forward: Any

    def __init__(self) -> None:
        self.made: dict[str, Block] = {}
        for text, kind in self.blocks.items():
            path, _, numbers = text.rstrip("]").partition("[")
            for number in range(*map(int, numbers.split(":"))):
                self.made[f"{path}.{number}"] = kind(f"{path}.{number}")

    def gathered(self, title: str) -> Any:
        return _gathered(self.weights[title], "")

    def block(self, path: str) -> Block:
        return self.made[path]

    def list(self, path: str, start: int = 0, stop: int | None = None, step: int = 1) -> list[Block]:
        found = [block for name, block in self.made.items() if name.rpartition(".")[0] == path]
        return found[start:stop:step]

    def buffer(self, name: str) -> Tensor:
        return world.get().buffers[name]


# ---- ops with an algorithm of their own ----------------------------------------------------------------------------


class _Functional:
    """`torch.nn.functional`, but a linear map is a product and a sum: the package types their partial values so."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch_functional, name)

    def linear(self, x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        product = torch_functional.linear(x, matrix)
        return product if bias is None else product + bias

    def scaled_dot_product_attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, p: float = 0.0, causal: bool = False,
        scale: float | None = None,
    ) -> Tensor:  # fmt: skip
        """By its formula, since the package has no rule for it on a CPU, nor torch 2.11 for such products."""
        assert mask is None and not p, "the models here have causal attention without dropout"
        scores = (q.unsqueeze(-2) * k.unsqueeze(-3)).sum(-1) * (q.shape[-1] ** -0.5 if scale is None else scale)
        later = torch.ones(q.shape[-2], k.shape[-2]).triu(1) > 0
        shares = (scores.masked_fill(later, -torch.inf) if causal else scores).softmax(-1)
        return (shares.unsqueeze(-1) * v.unsqueeze(-3)).sum(-2)


functional = _Functional()


def _shards(x: Tensor) -> list[tuple[Any, ...]]:
    """The axes that shard each dim."""
    spec = spmd.get_partition_spec(x) or (None,) * x.dim()
    return [() if axes is None else axes if isinstance(axes, tuple) else (axes,) for axes in spec]


def _typed(x: Tensor, types: Mapping[Any, Any], shards: Sequence[tuple[Any, ...]]) -> Tensor:
    spec = spmd.PartitionSpec(*(axes if len(axes) > 1 else axes[0] if axes else None for axes in shards))
    return spmd.assert_type(x, dict(types), partition_spec=spec if any(shards) else None)


def _told(x: Tensor, axis: Ranks, word: Any) -> Tensor:
    """The same value with another type on an axis: what an algorithm on that axis may take it for."""
    with spmd.no_typecheck():
        y = x.view_as(x)
    key = spmd.normalize_axis(world.get().group(axis.name))
    shards = [tuple(a for a in axes if a != key) for axes in _shards(x)]
    return _typed(y, {**spmd.get_local_type(x), key: word}, shards)


def reshaped(x: Tensor, *sizes: int) -> Tensor:
    """The package has no rule for cutting a sharded dim in two (heads): there the first of them has the shard."""
    try:
        return x.reshape(*sizes)
    except spmd.SpmdTypeError:
        with spmd.no_typecheck():
            y = x.reshape(*sizes)
    shards: list[tuple[Any, ...]] = [()] * y.dim()
    for dim, axes in enumerate(_shards(x)):
        before = math.prod(x.shape[:dim])
        at = next(i for i in range(y.dim()) if math.prod(y.shape[:i]) == before)
        assert not axes or x.shape[dim] % y.shape[at] == 0, "a sharded dim is cut into whole ones"
        shards[at] += axes
    return _typed(y, spmd.get_local_type(x), shards)


def embedding(ids: Tensor, table: Tensor, padding_idx: int = -1, axis: Ranks | None = None, size: int | None = None
              ) -> Tensor:  # fmt: skip
    """A table whose rows an axis shards gives a partial result."""
    if axis is None:
        return torch_functional.embedding(ids, table)
    return _told(torch_functional.embedding(ids % len(table), _told(table, axis, spmd.R)), axis, spmd.P)


def cross_entropy(logits: Tensor, target: Tensor, axis: Ranks | None = None, size: int | None = None,
                  ignore_index: int = -100, label_smoothing: float = 0.0) -> Tensor:  # fmt: skip
    """Logits whose classes an axis shards give an invariant result."""
    logits = logits if axis is None else _told(logits, axis, spmd.I)
    return torch_functional.cross_entropy(
        logits, target.clamp(max=logits.shape[1] - 1), ignore_index=ignore_index, label_smoothing=label_smoothing,
        reduction="none",
    )  # fmt: skip


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    return x * 1.0
