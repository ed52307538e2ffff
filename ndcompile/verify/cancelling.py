"""How large the numbers are that cancel in a tensor: the ruler of one that is 0, or nearly, by mathematics.

The gradient of the bias of attention's keys is a sum of terms that cancel. In floating point what is left is their
rounding, which has no size of its own to be measured by; the terms have. They are found by Monte Carlo arithmetic
(Parker, 1997): one device runs again with each computed number off by a small random part of itself. How far a tensor
moves, divided by that part, is the root of the sum of squares of what all numbers before it contribute to it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ndcompile.program import Program
from ndcompile.verify.arithmetic import Domain, Float64, Op, base_name
from ndcompile.verify.execute import on_one_device
from ndcompile.verify.field import CONSTANTS, MOVES
from ndcompile.verify.places import norm
from ndcompile.verify.sample import Sample

PART = 2.0**-40
"""By which part of itself a number is off, as a root mean square: far above float64's 2⁻⁵³, and far below 1."""

RUNS = 4

STEPS_OF = frozenset("sgn sign floor ceil round trunc".split())
"""Ops whose floats are choices, as integers and booleans are."""


class Shaken(Float64):
    """A domain in which each computed number is off by a random part of itself; whole numbers are taken to be exact.

    What is chosen (integers, booleans) is noted: a run that chooses otherwise is of another function.
    """

    name = "float64, shaken"

    def __init__(self, domain: Domain, part: float, seed: int) -> None:
        super().__init__(domain.seed, domain.device)
        self._domain, self._part = domain, part
        self._noise = torch.Generator().manual_seed(seed)
        self.choices: list[int] = []

    def run(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        made, name = self._domain.run(op, args, kwargs), base_name(op)
        if name in MOVES or name in CONSTANTS:
            return made
        if name in STEPS_OF:
            self._note(made)
            return made
        shaken = pytree.tree_map_only(Tensor, self._shaken, made)
        return made.copy_(shaken) if op._schema.is_mutable and isinstance(made, Tensor) else shaken

    def _shaken(self, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            self._note(x)
            return x
        off = x * self._part * torch.randn(x.shape, generator=self._noise, dtype=torch.float64).to(x.device)
        return torch.where((x == x.round()) | ~x.isfinite(), x, x + off.to(x.dtype))

    def _note(self, x: Tensor) -> None:
        self.choices.append(zlib.crc32(x.detach().cpu().resolve_conj().contiguous().numpy().tobytes()))


def terms(run: Callable[[Domain], Mapping[str, Tensor]], domain: Domain) -> dict[str, float]:
    """The size of what cancels in each tensor that `run` gives in a domain, by name: a norm, as is the tensor's own.

    Nothing is known, and the dict is empty, where each shaken run makes another choice somewhere.
    """
    still = Shaken(domain, 0.0, 0)
    right, squares = run(still), list[dict[str, float]]()
    for seed in range(RUNS):
        shaken = Shaken(domain, PART, seed)
        moved = run(shaken)
        if shaken.choices == still.choices:
            squares.append({name: (norm(moved[name] - x) / PART) ** 2 for name, x in right.items()})
    return {name: (sum(found[name] for found in squares) / len(squares)) ** 0.5 for name in right if squares}


def terms_of(program: Program, sample: Sample, domain: Domain) -> dict[str, float]:
    """Of all that one device computes in its steps, by the names that differences are told with."""

    def run(own: Domain) -> dict[str, Tensor]:
        steps = enumerate(on_one_device(program, sample, own))
        return {f"step {n}: {what}": x for n, step in steps for what, x in step.tensors().items()}

    return terms(run, domain)
