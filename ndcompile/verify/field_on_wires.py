"""The prime field on real process groups: the emitted text of each rank in its own process, exact over the wires.

An all-gather and an all-to-all move residues as they are. A sum of residues over ranks is exact in float64, and its
residue is taken where it has been waited for. A maximum is by the field's order of elements, and so goes by place.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ndcompile.program import Program
from ndcompile.runtime import Mesh, private
from ndcompile.runtime.symmetric import Symmetric
from ndcompile.runtime.wires import by_copies, start_all_gather, start_reduce_scatter
from ndcompile.verify import rings
from ndcompile.verify.compare import Comparison, compare
from ndcompile.verify.domain import NotInDomain, ZeroDenominator, base_name, namespace
from ndcompile.verify.execute import on_one_device, on_rank
from ndcompile.verify.field import PRIME, Field
from ndcompile.verify.lockstep import single
from ndcompile.verify.report import Claim
from ndcompile.verify.sample import draw

KIND = "equal over F_p (real ranks)"
ATTEMPTS = 20
ELEMENTS = {"cpu": 2_000_000, "cuda": 200_000_000}
"""The largest program, in elements of its parameters, that is run here."""

Everyone = Callable[[Any], list[Any]]


class Wires:
    """Does a rank's ops: those of autograd in the field, collectives by the mesh's own process groups."""

    def __init__(self, field: Field, mesh: Mesh) -> None:
        self.field, self.mesh = field, mesh
        self._arrived: dict[int | None, Callable[[Tensor], Tensor]] = {}

    def run(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if namespace(op) != "_c10d_functional":
            return self.field.run(op, args, kwargs)
        if base_name(op) == "wait_tensor":
            return self._wait(args[0])
        value, *options, group = args
        named = tuple(group.split(","))
        if base_name(op) == "all_reduce" and len(named) > 1 and named not in (self.mesh.groups or {}):
            return self._over_each(op, value, options, named)
        return self._start(op, value, options, self.mesh[named].group)

    def _start(self, op: Any, value: Any, options: list[Any], group: str) -> Any:
        """Send residues, or where a maximum is asked for their places; `_wait` makes residues of what has come."""
        values = value if isinstance(value, (list, tuple)) else [value]
        reduction = options[0] if single(base_name(op)) in ("all_reduce", "reduce_scatter_tensor") else None
        if reduction is None or not values[0].is_floating_point():
            return _sent(op, value, options, group)
        started = _sent(op, value if reduction == "sum" else self.field.order(value), options, group)
        for x in started if isinstance(started, (list, tuple)) else [started]:
            self._arrived[private.storage_id(x)] = self._residue if reduction == "sum" else self._element
        return started

    def _wait(self, started: Tensor) -> Tensor:
        arrived = private.wait(started)
        read = self._arrived.pop(private.storage_id(started), None)
        return arrived if read is None else arrived.copy_(read(arrived))

    def _over_each(self, op: Any, value: Tensor, options: list[Any], names: tuple[str, ...]) -> Tensor:
        """Over several axes of which no group was made: one after the other."""
        for name in names:
            value = self._wait(self._start(op, value, options, self.mesh[name].group))
        return value

    def _residue(self, x: Tensor) -> Tensor:
        return torch.where(x.isfinite(), x.remainder(PRIME), x)

    def _element(self, place: Tensor) -> Tensor:
        """The element at a place of the order; infinities are its ends."""
        elements = self.field.elements_in_order()
        return torch.where(place.isfinite(), elements[place.nan_to_num(0, 0, 0).long()], place)


def _sent(op: Any, value: Any, options: list[Any], group: str) -> Any:
    """By copies where the mesh's own gathers and sums go so; ranks' parts are along dim 0, as of a collective."""
    if by_copies(group) and base_name(op) == "all_gather_into_tensor":
        return start_all_gather(value, 0, options[0], group)
    if by_copies(group) and base_name(op) == "reduce_scatter_tensor" and options[0] == "sum":
        return start_reduce_scatter(value, 0, options[1], group)
    return op(value, *options, group)


class Unseen(Symmetric):
    """Copies that the field does, between ranks that meet outside of it."""

    def open(self, device: torch.device) -> None:
        with private.undispatched():
            super().open(device)

    def barrier(self) -> None:
        with private.undispatched():
            super().barrier()


def claim(
    program: Program, model: nn.Module, mesh: Mesh, device: torch.device, everyones: Everyone, transport: str = "nccl"
) -> Claim:
    """Two clipped steps of two microbatches on the real ranks, at the smallest sizes of batch and sequence. Weights
    and gradients travel by `transport`, which is `parallelize`'s.
    """
    begin = time.perf_counter()
    count = sum(torch.Size(plan.shape).numel() for plan in program.manifest.parameters.values())
    if count > ELEMENTS[device.type]:
        text = f"{count:,} elements are too many to be run here in the field: nd.verify takes them at small sizes"
        return Claim(KIND, None, [text], 0.0)
    try:
        with rings.met() as met:
            comparison = _compared(program, model, mesh, device, transport)
    except NotInDomain as error:
        return Claim(KIND, None, [str(error)], time.perf_counter() - begin)
    texts = [str(d) for theirs in everyones(comparison.differences) for d in theirs]
    c = comparison
    evidence = f"2 steps of 2 microbatches, {c.tensors:,} tensors, {c.elements:,} elements a rank: the difference is 0"
    more = [f"{rings.AS_ONE}: nd.verify has the lemma"] if met else []
    return Claim(KIND, not texts, texts[:5] or [evidence, *more], time.perf_counter() - begin)


def _compared(program: Program, model: nn.Module, mesh: Mesh, device: torch.device, transport: str) -> Comparison:
    """This rank against one device, which every rank runs for itself: a zero denominator is met by all of them."""
    if transport == "symmetric":  # memory is laid out for the dtypes that are, and the field has one for all
        program = replace(program, manifest=replace(program.manifest, compute=None, reduce=None))
    for attempt in range(ATTEMPTS):
        field = Field(1000 * attempt, device)
        sample = draw(program, field, model, microbatches=2)
        try:
            right = on_one_device(program, sample, field)
        except ZeroDenominator:
            continue
        with (
            sdpa_kernel(SDPBackend.MATH), torch.autograd.set_multithreading_enabled(False),
            private.dispatched(Wires(field, mesh).run),
        ):  # fmt: skip
            copies = Unseen(mesh) if transport == "symmetric" else None
            found = on_rank(program, sample, field, mesh.rank, transport=copies)
        return compare(program, sample, right, [found], field, first=mesh.rank)
    raise NotInDomain(f"{ATTEMPTS} samples gave a zero denominator")
