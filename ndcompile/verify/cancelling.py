"""How large the numbers are that cancel in a tensor: the ruler of one that is 0, or nearly, by mathematics.

The gradient of the bias of attention's keys is a sum of terms that cancel. In floating point what is left is their
rounding, which has no size of its own to be measured by; the terms have. They are found by Monte Carlo arithmetic
(Parker, 1997): one device runs again with each computed number off by a small random part of itself. How far a tensor
moves, divided by that part, is the root of the sum of squares of what all numbers before it contribute to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ndcompile.program import Program
from ndcompile.runtime import private
from ndcompile.verify.domain import Domain, Float64, Op, base_name
from ndcompile.verify.execute import on_one_device
from ndcompile.verify.field_ops import CONSTANTS, MOVES
from ndcompile.verify.places import norm
from ndcompile.verify.sample import Sample

PARTS = (2.0**-40, 2.0**-50)
"""By which part of itself a number is off, as a root mean square: far above float64's 2⁻⁵³, and far below 1. The second
is for a tensor of which one rounding becomes so much that the first moves it further than it is long: then how far it
moves no longer says how far less would move it.
"""

RUNS = 4

STEPS_OF = frozenset("sgn sign floor ceil round trunc".split())
"""Ops whose floats are choices, as integers and booleans are."""


SUBTRACTING = frozenset(
    "native_layer_norm_backward native_group_norm_backward native_batch_norm_backward _fused_rms_norm_backward "
    "_softmax_backward_data _log_softmax_backward_data".split()
)
"""Ops in which numbers cancel: they are done as the ops that they are made of."""


class Shaken(Float64):
    """A domain in which each computed number is off by a random part of itself; whole numbers are taken to be exact.

    What is chosen (integers, booleans) is noted. Given the choices of another run, this one makes them too: where two
    numbers are equal, another choice would be another function.
    """

    name = "float64, shaken"

    def __init__(self, domain: Domain, part: float, seed: int, choices: Sequence[Tensor] | None = None) -> None:
        super().__init__(domain.seed, domain.device)
        self._domain, self._part = domain, part
        self._noise = torch.Generator().manual_seed(seed)
        self._given = None if choices is None else iter(choices)
        self.choices: list[Tensor] = []

    def run(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = base_name(op)
        if name in SUBTRACTING and (made_of := private.decomposition(op)) is not None:
            with private.dispatched(self.run):
                return made_of(*args, **kwargs)
        made = self._domain.run(op, args, kwargs)
        if name in MOVES or name in CONSTANTS:
            return made
        changed = pytree.tree_map_only(Tensor, self._choice if name in STEPS_OF else self._shaken, made)
        return made.copy_(changed) if op._schema.is_mutable and isinstance(made, Tensor) else changed

    def _shaken(self, x: Tensor) -> Tensor:
        return self._off(x) if x.is_floating_point() else self._choice(x)

    def _choice(self, x: Tensor) -> Tensor:
        chosen = x if self._given is None else next(self._given)
        self.choices.append(chosen.detach().clone())
        return chosen.clone()  # autograd writes on what an op gives, and other runs take the same choices

    def _off(self, x: Tensor) -> Tensor:
        off = x * self._part * torch.randn(x.shape, generator=self._noise, dtype=torch.float64).to(x.device)
        return torch.where((x == x.round()) | ~x.isfinite(), x, x + off.to(x.dtype))


def terms(run: Callable[[Domain], Mapping[str, Tensor]], domain: Domain, part: float = PARTS[0]) -> dict[str, float]:
    """The size of what cancels in each tensor that `run` gives in a domain, by name: a norm, as is the tensor's own."""
    still = Shaken(domain, 0.0, 0)
    right = run(still)
    moved = [run(Shaken(domain, part, seed, still.choices)) for seed in range(RUNS)]
    return {
        name: (sum((norm(found[name] - x) / part) ** 2 for found in moved) / RUNS) ** 0.5 for name, x in right.items()
    }


def terms_of(program: Program, sample: Sample, domain: Domain, part: float) -> dict[str, float]:
    """Of all that one device computes in its steps, by the names that differences are told with."""

    def run(own: Domain) -> dict[str, Tensor]:
        steps = enumerate(on_one_device(program, sample, own))
        return {f"step {n}: {what}": x for n, step in steps for what, x in step.tensors().items()}

    return terms(run, domain, part)
