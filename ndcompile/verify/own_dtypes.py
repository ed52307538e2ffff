"""A program in its own dtypes, all ranks in one process: every op rounds as the text says, so a cast too many shows.

Compared by the error model, with the reference graph in float64 and in the program's dtypes on one device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ndcompile.program import Program
from ndcompile.runtime.manifest import as_dtype
from ndcompile.verify.domain import Float64, Op
from ndcompile.verify.error_model import ErrorModel, Measured
from ndcompile.verify.execute import LEARNING_RATE, Step, on_one_device, on_ranks
from ndcompile.verify.measure import Ruler, assembled
from ndcompile.verify.report import Claim
from ndcompile.verify.sample import Sample, draw
from ndcompile.verify.training import Trained


class OwnDtypes(Float64):
    """Floating point as it is written: every tensor has the program's dtype, and every op is torch's own."""

    name = "own dtypes"
    widens = False
    eps = 1e-3

    def run(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return op(*args, **kwargs)

    def encode(self, x: Tensor) -> Tensor:
        return x

    def stored(self, x: Tensor, dtype: torch.dtype | None) -> Tensor:
        return x.to(dtype)

    def reduce(self, op: str, values: Sequence[Tensor]) -> Tensor:
        """Rank after rank, each partial result rounded to the tensors' dtype."""
        by: Callable[[Tensor, Tensor], Tensor] = getattr(torch, {"sum": "add", "max": "maximum", "min": "minimum"}[op])
        total = values[0]
        for value in values[1:]:
            total = by(total, value)
        return total


class Right(Float64):
    """Float64, with the optimizer's settings of low precision."""

    eps = OwnDtypes.eps


def dtype_of(program: Program) -> torch.dtype:
    """What the program computes in: its precision, or the lowest dtype of its parameters."""
    dtypes = [as_dtype(plan.dtype) for plan in program.manifest.parameters.values()]
    floating = [d for d in dtypes if d is not None and d.is_floating_point]
    return as_dtype(program.manifest.compute) or max(floating, key=lambda d: torch.finfo(d).eps)


def kind_of(program: Program) -> str:
    return f"tested ({str(dtype_of(program)).removeprefix('torch.')})"


@dataclass
class OneDevice:
    """A sample, and what one device makes of it in float64 and in the program's dtypes."""

    domain: OwnDtypes
    sample: Sample
    exact: list[Step]
    low: list[Step]
    seconds: float


def on_one_device_twice(
    program: Program, model: nn.Module | None, microbatches: int, device: torch.device | str = "cpu", seed: int = 0
) -> OneDevice:
    begin, domain = time.perf_counter(), OwnDtypes(seed, device)
    sample = draw(program, domain, model, microbatches)
    low = on_one_device(program, sample, domain)
    exact = on_one_device(program, widened(sample), Right(seed, device))
    return OneDevice(domain, sample, exact, low, time.perf_counter() - begin)


def claim(program: Program, right: OneDevice, source: str | None = None) -> Claim:
    """Two clipped steps on all ranks in the program's dtypes, by the error model."""
    begin = time.perf_counter()
    found = on_ranks(program, right.sample, right.domain, source)
    error_model = ErrorModel(dtype_of(program), depth_of(program))
    measured = measure(program, widened(right.sample), found, right.exact, right.low)
    bad = error_model.told(measured)
    evidence = bad or error_model.evidence(measured)
    return Claim(kind_of(program), not bad, evidence, right.seconds + time.perf_counter() - begin)


def widened(sample: Sample) -> Sample:
    """The same numbers, in float64."""

    def wide(x: Tensor) -> Tensor:
        return x.double() if x.is_floating_point() else x

    return replace(
        sample,
        parameters={name: wide(x) for name, x in sample.parameters.items()},
        buffers={name: wide(x) for name, x in sample.buffers.items()},
        batches=[[wide(x) for x in batch] for batch in sample.batches],
        drawn={n: [None if g is None else wide(g) for g in of] for n, of in sample.drawn.items()},
    )


def measure(
    program: Program, sample: Sample, found: Sequence[Sequence[Step]], exact: Sequence[Step], low: Sequence[Step]
) -> list[Measured]:
    """Every tensor, on the replica where it is furthest from float64."""
    ruler = Ruler(program, sample.parameters, LEARNING_RATE, exact=False)
    right, rough = _trained(program, exact), _trained(program, low)
    rows = [list(ruler.steps(rank, _trained(program, steps), right, rough)) for rank, steps in enumerate(found)]
    return assembled(rows, program.mesh)


def _trained(program: Program, steps: Sequence[Step]) -> list[Trained]:
    names = program.manifest.updates
    made = []
    for step in steps:
        results = {f"result {i} of microbatch {n}": y for n, of in enumerate(step.results) for i, y in enumerate(of)}
        last = step.results[-1]
        buffers = dict(zip(names, last[len(last) - len(names) :], strict=True))
        gradients = {name: g for name, g in step.gradients.items() if g is not None}
        made.append(Trained(results, gradients, step.norm, step.parameters, buffers))
    return made


def depth_of(program: Program) -> int:
    """The number of blocks that run, of the longest list of modules; without one, the number of layers."""
    classes = program.made.names.classes
    lists = [name for name, kind in classes.items() if kind == "ModuleList"]
    left_out: frozenset[str] = getattr(program, "without", frozenset())
    lengths = [sum(n.rpartition(".")[0] == name and n not in left_out for n in classes) for name in lists]
    return max([0, *lengths]) or max(1, len({name.rpartition(".")[0] for name in program.manifest.parameters}))
