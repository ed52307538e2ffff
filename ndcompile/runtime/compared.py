"""What ranks compare of the calls of one module: all of the first call, and sizes whenever they change."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ndcompile.mesh import MeshSpec
from ndcompile.runtime import private
from ndcompile.runtime.agreement import Disagreement, everyones, said
from ndcompile.runtime.manifest import InputPlan, Manifest, digest

SIZES = (
    "  why  every data-parallel rank must have a batch of the same size\n  try  drop_last=True, or pad the last batch"
)
SAME_BATCH = (
    "all data-parallel ranks have the same batch\n"
    "  why  each is to have its own part of the global batch, in which these samples now stand several times\n"
    "  try  shard the loader by the data-parallel index"
)

_NUMBERS = itertools.count()


class Compared:
    """The calls of one module, which all ranks make alike."""

    def __init__(self, spec: MeshSpec) -> None:
        self._spec = spec
        self._number = next(_NUMBERS)
        self._sizes: list[tuple[int, ...]] = []
        self._changes = 0

    def first(self, manifest: Manifest, tensors: Sequence[Tensor], held: Mapping[str, Tensor]) -> None:
        """Equal inputs on ranks that share a batch, equal batch sizes and other inputs on all; and of what the module
        holds, equal copies.
        """
        self._number = everyones(self._number)[0]
        self._sizes = [tuple(x.shape) for x in tensors]
        self._check_copies(manifest, held)
        self._check_inputs(manifest, tensors)

    def later(self, manifest: Manifest, tensors: Sequence[Tensor]) -> None:
        """Ranks whose inputs have other sizes than in the call before tell each other; where some have and some have
        not, those that wait say so.
        """
        sizes = [tuple(x.shape) for x in tensors]
        if sizes == self._sizes or not self._spec.names:
            return
        self._sizes, self._changes = sizes, self._changes + 1
        names = ", ".join(f"'{plan.name}' {list(size)}" for plan, size in zip(manifest.input_plans, sizes, strict=True))
        keys = [f"ndcompile/sizes {self._number} {self._changes - back}" for back in range(2)]
        try:
            found = said(keys[0], names, keys[1] if self._changes > 1 else "")
        except Disagreement as error:
            raise Disagreement(
                f"inputs have other sizes than in the call before, and on other ranks they have not: {names}\n{SIZES}"
            ) from error
        if len(found) > 1:
            raise Disagreement(f"inputs differ in size between ranks: {' and '.join(sorted(found))}\n{SIZES}")

    def _check_inputs(self, manifest: Manifest, tensors: Sequence[Tensor]) -> None:
        everyone = everyones([(tuple(t.shape), str(t.dtype), digest(private.local(t))) for t in tensors])
        spec = self._spec
        data = [axis.name for axis in spec.axes if axis.kind.startswith("dp_")]
        shared = " and ".join(dict.fromkeys(axis.kind for axis in spec.axes if axis.name not in data))
        for rank, peer in self._peers(data):
            for plan, *held in zip(manifest.input_plans, everyone[rank], everyone[peer], everyone[0], strict=True):
                _refuse_other_input(plan, held, rank, peer, shared)
        if data and dist.get_rank() == 0 and all(theirs == everyone[0] for theirs in everyone):
            warnings.warn(SAME_BATCH, stacklevel=2)

    def _check_copies(self, manifest: Manifest, held: Mapping[str, Tensor]) -> None:
        """Parameters may have got their values since they were placed: ranks that hold copies must hold equal ones."""
        axes = {f"parameter '{n}'": tuple(a for dim in p.dims for a in dim) for n, p in manifest.parameters.items()}
        alike: dict[tuple[str, ...], list[str]] = {}
        for name in held:
            alike.setdefault(axes.get(name, ()), []).append(name)
        sums = {over: [_sum_of_bits(held[name]) for name in names] for over, names in alike.items()}
        everyone = everyones({over: hash(tuple(found)) for over, found in sums.items()})
        for over, names in alike.items():
            for rank, peer in self._peers(over):
                if everyone[rank][over] != everyone[peer][over]:
                    rows = everyones(sums[over])  # all ranks are here alike
                    name = next(n for n, a, b in zip(names, rows[rank], rows[peer], strict=True) if a != b)
                    raise Disagreement(
                        f"{name} differs between ranks {peer} and {rank}, which hold copies of one tensor\n"
                        f"  why  each changed its own, and equal gradients keep copies as far apart as they are\n"
                        f"  try  equal values before nd.parallelize\n"
                        f"  try  load_state_dict of one state on all ranks, after values were made on the mesh"
                    )

    def _peers(self, over: Sequence[str]) -> Iterator[tuple[int, int]]:
        """Each rank, and the first that holds the same part of what these axes shard."""
        for rank in range(self._spec.world_size):
            place = self._spec.coordinate(rank)
            yield rank, self._spec.rank({axis: place[axis] if axis in over else 0 for axis in self._spec.names})


def _refuse_other_input(plan: InputPlan, held: Sequence[Any], rank: int, peer: int, shared: str) -> None:
    """Compare one input's shape, dtype and checksum: a rank's, the first's that shares its batch, rank 0's."""
    mine, first, zeroth = held
    if mine != first:
        raise Disagreement(
            f"input '{plan.name}' differs between ranks {peer} and {rank}, which share one data-parallel batch\n"
            f"  why  ranks that differ only in {shared} work on the same samples\n"
            f"  try  seed the loader by the data-parallel index, not by the rank"
        )
    if mine[:2] != zeroth[:2]:
        raise Disagreement(
            f"input '{plan.name}' is {list(mine[0])} on rank {rank} and {list(zeroth[0])} on rank 0\n{SIZES}"
        )
    if mine != zeroth and "b" not in plan.dims:
        raise Disagreement(
            f"input '{plan.name}' differs between ranks 0 and {rank}\n"
            f"  why  it has no batch, so the program takes it to be the same on every rank\n"
            f"  try  the global one: a count of tokens is the sum over data-parallel ranks"
        )


def _sum_of_bits(tensor: Tensor) -> int:
    """Equal for equal tensors, not a number among their values or not; without a copy of them."""
    flat = private.local(tensor).contiguous().view(-1)
    flat = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
    return int(flat.view(_AS_NUMBERS[flat.element_size()]).sum(dtype=torch.int64))


_AS_NUMBERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
