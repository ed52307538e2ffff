"""Do pads change nothing? The reference graph on sequences as they are, and on the same with pads at their ends."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sympy import sympify
from torch import Tensor
from torch.nn import functional as F

from ndcompile.program import Program
from ndcompile.rules.registry import BY_INDEX, op_name
from ndcompile.runtime.lengths import Grown, lengthened, pairs
from ndcompile.verify.domain import NotInDomain, ZeroDenominator
from ndcompile.verify.execute import Step, on_one_device
from ndcompile.verify.field import Field
from ndcompile.verify.report import Claim
from ndcompile.verify.sample import Sample, draw

KIND = "pads change nothing"
ATTEMPTS = 20


def claim(program: Program, model: Any, seeds: int, device: Any) -> Claim:
    """Over the prime field: results, gradients, their norm, and the parameters after two steps are equal."""
    begin, tensors = time.perf_counter(), 0
    if _draws_along(program):
        return Claim(KIND, None, ["what is drawn at a place is that of the padded length"], 0.0)
    try:
        for seed in range(seeds):
            right, found, longer = _twice(program, model, seed, device)
            tensors, differs = _compared(program, right, found, longer)
            if differs:
                return Claim(KIND, False, [f"{differs} is another one with pads"], time.perf_counter() - begin)
    except NotInDomain as error:
        return Claim(KIND, None, [str(error)], time.perf_counter() - begin)
    cut = ", ".join(f"{symbol} = {true} as {padded}" for symbol, (true, padded) in longer.items())
    evidence = f"over F_p, {seeds} seeds, {cut}: of {tensors:,} tensors a seed the difference is 0"
    return Claim(KIND, True, [evidence], time.perf_counter() - begin)


def _draws_along(program: Program) -> bool:
    """Whether numbers are drawn by an index in a whole that pads make longer."""
    longer = set(program.manifest.multiples)
    drawn = [n for n in program.folded_reference.graph.nodes if op_name(n.target) in BY_INDEX]
    return any(longer & {str(s) for size in n.meta["sizes"] for s in sympify(size).free_symbols} for n in drawn)


def _twice(program: Program, model: Any, seed: int, device: Any) -> tuple[list[Step], list[Step], Grown]:
    """The steps on a sample whose sequences do not divide, and on the same with pads."""
    for attempt in range(ATTEMPTS):
        domain = Field(seed + 1000 * attempt, device)
        whole = draw(program, domain, model, microbatches=1)
        longer = _longer(program, whole)
        true = replace(whole, batches=[_cut(program, batch, longer) for batch in whole.batches])
        try:
            right = on_one_device(program, true, domain)
            batches = [lengthened(program.manifest, batch, longer) for batch in true.batches]
            drawn = {n: [_grown(g, end, longer) for g, end in _ended(program, gs)] for n, gs in true.drawn.items()}
            return right, on_one_device(program, replace(true, batches=batches, drawn=drawn), domain), longer
        except ZeroDenominator:
            continue
    raise NotInDomain(f"{ATTEMPTS} samples gave a zero denominator")


def _longer(program: Program, sample: Sample) -> Grown:
    """Every length that must divide, and another below it: the further below, the more axes cut it."""
    lengths = program.manifest.lengths(sample.batches[0])
    units = {s: math.lcm(*found.values(), 1) for s, found in program.manifest.multiples.items()}
    return {s: (n - max(1, units[s] - 1), n) for s, n in lengths.items() if units.get(s, 1) > 1}


def _cut(program: Program, batch: Sequence[Tensor], longer: Grown) -> list[Tensor]:
    made = []
    for plan, x in zip(program.manifest.input_plans, batch, strict=True):
        for dim, symbol in enumerate(plan.dims):
            x = x.narrow(dim, 0, longer[symbol][0]) if isinstance(symbol, str) and symbol in longer else x
        made.append(x.contiguous())
    return made


def _ended(program: Program, values: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Each result of the model with its dims that become longer; what buffers become has none."""
    ends = [*program.manifest.ends, *[[]] * (len(values) - len(program.manifest.ends))]
    return list(zip(values, ends, strict=True))


def _grown(cotangent: Tensor | None, ends: Sequence[Any], longer: Grown) -> Tensor | None:
    """With zeros at the pads: nothing there is a result."""
    more = [0] * (cotangent.dim() if cotangent is not None else 0)
    for dim, symbol, _ in ends:
        if symbol in longer:
            more[dim] = longer[symbol][1] - longer[symbol][0]
    return F.pad(cotangent, pairs(more)) if cotangent is not None and any(more) else cotangent


def _compared(program: Program, right: list[Step], found: list[Step], longer: Grown) -> tuple[int, str]:
    """How many tensors were compared, and the first that differs."""
    count = 0
    for number, (true, padded) in enumerate(zip(right, found, strict=True)):
        for what, mine, theirs in _pairs_of(program, true, padded, longer):
            count += 1
            if mine.shape != theirs.shape or not bool((mine == theirs).all()):
                return count, f"step {number}: {what}"
    return count, ""


def _pairs_of(program: Program, true: Step, padded: Step, longer: Grown) -> Any:
    for one, other in zip(true.results, padded.results, strict=True):
        for place, ((a, ends), b) in enumerate(zip(_ended(program, one), other, strict=True)):
            for dim, symbol, more in ends:
                b = b.narrow(dim, 0, longer[symbol][0] + more) if symbol in longer else b
            if isinstance(a, Tensor):
                yield f"result {place}", a, b
    for name, gradient in true.gradients.items():
        if gradient is not None:
            own = padded.gradients[name]
            yield f"the gradient of '{name}'", gradient, gradient.new_empty(0) if own is None else own
    yield "the gradient norm", true.norm, padded.norm
    for name, value in true.parameters.items():
        yield f"parameter '{name}'", value, padded.parameters[name]
