"""`verify`: is what runs on the mesh the model that was written?

Every rank runs the emitted text, forward and backward, in one process and in exact arithmetic, and all that it
computes is compared with the reference graph on one device. The module is what `nd.verify` names, so it is callable.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ndcompile import checks, pipeline
from ndcompile.duties import duties
from ndcompile.errors import CompileError
from ndcompile.program import Program
from ndcompile.request import check_option
from ndcompile.verify import own_dtypes, padded, rings
from ndcompile.verify.arithmetic import FAILURES, PRIME, Domain, Field, Float64, NotInDomain, ZeroDenominator
from ndcompile.verify.compare import Comparison, compare
from ndcompile.verify.execute import on_one_device, on_ranks, round_trip
from ndcompile.verify.integers import Integers
from ndcompile.verify.localise import begins_at
from ndcompile.verify.report import Claim, Report
from ndcompile.verify.sample import Sample, draw, symbol_sizes
from ndcompile.verify.shrink import Small, parameter_count, shrink

__all__ = ["Claim", "Report", "verify"]

Progress = Callable[[str, int, int], None]

ATTEMPTS = 20

NOT_CHECKED = [
    "process groups, kernels and rounding in the program's own dtypes: casts between floats change nothing here",
    "torch.compile; attention's kernel (its formula runs here); that the reference graph is the model, but for tests",
]


def verify(
    program: Program,
    model: nn.Module | None = None,
    *,
    seeds: int = 3,
    microbatches: int = 2,
    source: str | None = None,
    also: Sequence[str] = (),
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> Report:
    """Check that the emitted text computes what the reference graph computes: results, every gradient on every rank,
    the gradient norm, and the parameters after two clipped steps of AdamW over `microbatches` each.

    Needs no process group and no GPU. `model` is needed where it has integer buffers. `source` is another text to run
    in place of the program's. A large program runs at small sizes on a small mesh, with its own text (`shrink`).
    `also` asks for more arithmetics: "dtypes", the program's own (asked for by itself where there is a precision), and
    "integers", small whole numbers, for programs that are shallow. All ranks run on `device`, the CPU or one GPU.
    `progress(what, done, steps)` is called before each step and at the end.
    """
    wanted, device = _asked_for(program, also), _usable(device)
    has_rings = rings.CALLED in (source or str(program))
    pads = bool(program.manifest.pads)
    tell = _counting(progress, seeds + 3 + len(wanted) + has_rings + pads)
    tell("types")
    types = _types(program)
    exact, float64 = _Layer(), _Layer()
    tell("sizes")
    cases = _cases(program, model)
    for seed in range(seeds):
        tell(f"F_p, sample {seed + 1} of {seeds}")
        if exact.held is not False:
            _run(cases[seed % len(cases)], model, Field, seed, microbatches, source, exact, device)
    lemmas = []
    if has_rings:
        tell("rings")
        lemmas = [rings.claim(list(exact.rings.values()), seeds)] if exact.rings else []
    float64.located = bool(exact.differences)
    tell("float64")
    _run(cases[0], model, Float64, 0, microbatches, source, float64, device)
    more = []
    if pads:
        tell("pads")
        more.append(padded.claim(cases[0], model, seeds, device))
    for name in wanted:
        tell(name)
        more.append(ALSO[name](cases[0], model, seeds, microbatches, source, device))
    tell("done")
    worst = exact if exact.held is False else float64
    return Report(
        f"{program.manifest.model} on {program.mesh}",
        [
            types,
            *_round_trip(cases[0]),
            _exact_claim(exact, seeds, microbatches, cases),
            *lemmas,
            _float64_claim(float64),
            *more,
        ],
        [_sizes(case) for case in cases[: max(seeds, 1)]],
        worst.differences or [text for claim in (*lemmas, *more) if claim.held is False for text in claim.evidence],
        worst.begins,
        _not_checked(exact, wanted),
        program,
        source or str(program),
    )


def _counting(progress: Progress | None, steps: int) -> Callable[[str], None]:
    """Tells `progress` what begins, and how many steps came before it."""
    done = itertools.count()
    return lambda what: progress(what, next(done), steps) if progress else None


def _not_checked(exact: _Layer, wanted: Sequence[str]) -> list[str]:
    more = [f"the prime field: {exact.unknown}"] if exact.unknown else []
    first, *rest = NOT_CHECKED
    return ["process groups and kernels" if "dtypes" in wanted else first, *rest, *more]


def _asked_for(program: Program, also: Sequence[str]) -> list[str]:
    for name in also:
        check_option("also", name, tuple(ALSO))
    return list(dict.fromkeys([*also, *(["dtypes"] if program.manifest.compute else [])]))


def _usable(device: torch.device | str) -> torch.device:
    """The CPU or a GPU that is there."""
    try:
        found = torch.zeros((), device=device).device
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for CUDA
        raise CompileError(
            f"device='{device}' cannot be used",
            why=str(error).splitlines()[0],
            tries="'cpu', or 'cuda' on a machine with a GPU",
        ) from error
    check_option("device", found.type, ("cpu", "cuda"))
    return found


RANKS, ELEMENTS = 16, 2_000_000
"""A program of more ranks, or with more elements in its parameters, runs at small sizes."""


def _cases(program: Program, model: nn.Module | None) -> list[Program]:
    """The program itself; of a large one two small ones, with axes of equal and of coprime sizes if both fit: 24 rows
    that 8 ranks cut evenly and 16 do not cannot become rows that 2 ranks cut evenly and 2 do not.
    """
    if program.mesh.world_size <= RANKS and parameter_count(program) <= ELEMENTS:
        return [program]
    settings: list[dict[str, int]] = [{}, *({axis.name: 3} for axis in reversed(program.mesh.axes))]
    found: list[Program] = []
    refused: list[CompileError] = []
    for ranks in settings:
        if len(found) < min(2, len(program.mesh.axes)):
            try:
                found.append(_fitting(program, model, ranks))
            except CompileError as error:
                refused.append(error)
    if not found:
        raise refused[0]
    return found


def _fitting(program: Program, model: nn.Module | None, ranks: dict[str, int]) -> Program:
    """The first small program whose reference runs."""
    failure: Exception | None = None
    for small in itertools.islice(shrink(program, ranks), ATTEMPTS):
        domain = Float64(0)
        try:
            on_one_device(small, draw(small, domain, model, steps=1), domain)
        except FAILURES as error:
            failure = error
            continue
        return small
    raise CompileError(
        "no small sizes were found at which the model runs", why=str(failure), tries="a smaller configuration"
    ) from failure


def _round_trip(case: Program) -> list[Claim]:
    """At small sizes the text for one device stands for the reference graph: is it that graph, at the large sizes?"""
    if not isinstance(case, Small):
        return []
    begin = time.perf_counter()
    count, differs = round_trip(case, symbol_sizes(case))
    evidence = (
        f"the text for one device does the {count:,} ops of the reference graph, traced at the program's own sizes"
    )
    return [Claim("same ops", not differs, [differs or evidence], time.perf_counter() - begin)]


def _sizes(case: Program) -> str:
    """At which sizes it ran."""
    symbols = ", ".join(f"{name} = {size}" for name, size in symbol_sizes(case).items())
    if not isinstance(case, Small):
        return f"{symbols}; others as in the program"
    named = ", ".join(f"{name} = {size}" for name, size in case.named.items())
    left = f", without {len(case.without)} blocks" if case.without else ""
    return f"{case.mesh}: {named}, {symbols}{left}"


class _Layer:
    """What one arithmetic found so far."""

    def __init__(self) -> None:
        self.comparison = Comparison()
        self.differences: list[str] = []
        self.begins = ""
        self.located = False
        """Whether it is known already where differences begin."""
        self.unknown = ""
        self.rings: dict[Any, rings.Ring] = {}
        self.ran = self.drawn_again = self.degree = 0
        self.seconds = 0.0

    @property
    def held(self) -> bool | None:
        if self.differences:
            return False
        return True if self.ran and not self.unknown else None


def _run(
    program: Program, model: nn.Module | None, kind: type[Domain], seed: int, microbatches: int, source: str | None,
    layer: _Layer, device: torch.device | str = "cpu",
) -> None:  # fmt: skip
    """One sample through the reference and the ranks; another one where chance brings a zero denominator."""
    begin = time.perf_counter()
    for attempt in range(ATTEMPTS):
        domain = kind(seed + 1000 * attempt, device)
        sample = draw(program, domain, model, microbatches)
        try:
            _compare(program, sample, domain, source, layer)
        except ZeroDenominator:
            layer.drawn_again += 1
            continue
        except NotInDomain as error:
            layer.unknown = str(error)
        break
    else:
        layer.differences.append(f"{ATTEMPTS} samples gave a zero denominator")
    layer.seconds += time.perf_counter() - begin


def _compare(program: Program, sample: Sample, domain: Domain, source: str | None, layer: _Layer) -> None:
    right = on_one_device(program, sample, domain)
    layer.degree = max(layer.degree, getattr(domain, "degree", 0))
    try:
        with rings.met() as met:
            found = on_ranks(program, sample, domain, source)
        layer.rings |= met
    except NotInDomain:
        raise
    except FAILURES as error:
        layer.differences.append(f"the emitted text does not run: {type(error).__name__}: {error}")
        return
    comparison = compare(program, sample, right, found, domain)
    layer.comparison.join(comparison)
    layer.differences += [str(d) for d in comparison.differences]
    if comparison.differences and not layer.located:
        layer.begins = begins_at(program, sample, domain, source, comparison.differences)
    layer.ran += 1


def _types(program: Program) -> Claim:
    begin = time.perf_counter()
    steps = [s for s in pipeline.PIPELINE if s.name in ("propagate_layouts", "insert_collectives")]
    try:
        for step in steps:
            for check in step.ensures:
                check(program.folded, program.mesh)
        nodes = [n for n in program.folded.graph.nodes if n.op == "call_function"]
        moves = sum("move" in n.meta for n in nodes)
        evidence = [
            f"{len(nodes)} values have legal layouts, {moves} conversions are rows of the table, "
            f"{len(duties(program.folded, program.mesh))} uses of parameters are reduced exactly once"
        ]
        held = True
    except checks.CheckError as error:
        evidence, held = str(error).splitlines(), False
    return Claim("proved (types)", held, evidence, time.perf_counter() - begin)


def _exact_claim(layer: _Layer, seeds: int, microbatches: int, cases: list[Program]) -> Claim:
    if layer.unknown and not layer.differences:
        return Claim("equal over F_p", None, [layer.unknown], layer.seconds)
    if layer.differences:
        return Claim("equal over F_p", False, [layer.differences[0]], layer.seconds)
    again = f", {layer.drawn_again} samples drawn again" if layer.drawn_again else ""
    ranks = " and ".join(str(case.mesh.world_size) for case in cases[:seeds])
    c, chance = layer.comparison, min(1.0, layer.degree / PRIME)
    evidence = [
        f"{seeds} seeds{again}; 2 steps of {microbatches} microbatches on {ranks} ranks: "
        f"{c.tensors:,} tensors, {c.elements:,} elements, the difference is 0",
        f"p = {PRIME}; one element of another function would pass by chance with at most about {chance**seeds:.0e}",
        *([f"{rings.AS_ONE}; that it is one is the lemma below"] if layer.rings else []),
    ]
    return Claim("equal over F_p", True, evidence, layer.seconds)


def _float64_claim(layer: _Layer) -> Claim:
    if layer.differences:
        return Claim("tested (float64)", False, [layer.differences[0]], layer.seconds)
    c = layer.comparison
    evidence = [f"the furthest of {c.tensors:,} tensors is {c.worst:.1e} away; 1e-10 would fail"]
    if c.cancelled:
        what, most = max(c.cancelled.items(), key=lambda found: found[1])
        evidence.append(
            f"but for {len(c.cancelled)} that nearly cancel: {what} is {most:.0e} of its terms away; 1e-14 would fail"
        )
    return Claim("tested (float64)", layer.held, evidence, layer.seconds)


def _integers_claim(
    case: Program, model: nn.Module | None, seeds: int, microbatches: int, source: str | None,
    device: torch.device | str,
) -> Claim:  # fmt: skip
    """One step without the optimizer, whose squares grow too large."""
    layer, kind = _Layer(), "equal over small integers"
    layer.located = True
    for seed in range(seeds):
        if layer.held is not False and not layer.unknown:
            _run(case, model, Integers, seed, microbatches, source, layer, device)
    c = layer.comparison
    evidence = (
        layer.differences[:1]
        or ([layer.unknown] if layer.unknown else [])
        or [
            f"{seeds} seeds; results and gradients, {c.tensors:,} tensors, {c.elements:,} elements: difference 0",
            *([rings.AS_ONE] if layer.rings else []),
        ]
    )
    return Claim(kind, layer.held, evidence, layer.seconds)


def _dtypes_claim(
    case: Program, model: nn.Module | None, seeds: int, microbatches: int, source: str | None,
    device: torch.device | str,
) -> Claim:  # fmt: skip
    """One seed by the error model; where one device does not run in these dtypes, nothing can be said."""
    kind, right = own_dtypes.kind_of(case), None
    try:
        right = own_dtypes.on_one_device_twice(case, model, microbatches, device)
        return own_dtypes.claim(case, right, source)
    except FAILURES as error:
        who = "the reference graph" if right is None else "the emitted text"
        text = f"{who} does not run in these dtypes: {type(error).__name__}: {str(error).splitlines()[0]}"
        return Claim(kind, None if right is None else False, [text], 0.0)


ALSO = {"dtypes": _dtypes_claim, "integers": _integers_claim}
"""Arithmetics beside the prime field and float64."""


class _Module(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Report:
        return verify(*args, **kwargs)


sys.modules[__name__].__class__ = _Module
