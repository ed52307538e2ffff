"""What each layer says of a program, in words: proved, equal over a field, tested."""

from __future__ import annotations

import time
from collections.abc import Callable

from ndcompile import pipeline
from ndcompile.duties import duties
from ndcompile.errors import CheckError
from ndcompile.program import Program
from ndcompile.verify import own_dtypes, rings
from ndcompile.verify.domain import FAILURES
from ndcompile.verify.execute import round_trip
from ndcompile.verify.field import PRIME
from ndcompile.verify.integers import Integers
from ndcompile.verify.layer import Layer, Subject
from ndcompile.verify.report import Claim
from ndcompile.verify.sample import symbol_sizes
from ndcompile.verify.shrink import Small


def types(program: Program) -> Claim:
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
    except CheckError as error:
        evidence, held = str(error).splitlines(), False
    return Claim("proved (types)", held, evidence, time.perf_counter() - begin)


def same_ops(case: Program) -> list[Claim]:
    """At small sizes the text for one device stands for the reference graph: is it that graph, at the large sizes?"""
    if not isinstance(case, Small):
        return []
    begin = time.perf_counter()
    count, differs = round_trip(case, symbol_sizes(case))
    evidence = (
        f"the text for one device does the {count:,} ops of the reference graph, traced at the program's own sizes"
    )
    return [Claim("same ops", not differs, [differs or evidence], time.perf_counter() - begin)]


def exact(layer: Layer, seeds: int, microbatches: int, cases: list[Program]) -> Claim:
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


def float64(layer: Layer) -> Claim:
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


def integers(subject: Subject, seeds: int) -> Claim:
    """One step without the optimizer, whose squares grow too large."""
    layer = Layer()
    layer.located = True
    for seed in range(seeds):
        if layer.held is not False and not layer.unknown:
            layer.run(subject, Integers, seed)
    c = layer.comparison
    evidence = (
        layer.differences[:1]
        or ([layer.unknown] if layer.unknown else [])
        or [
            f"{seeds} seeds; results and gradients, {c.tensors:,} tensors, {c.elements:,} elements: difference 0",
            *([rings.AS_ONE] if layer.rings else []),
        ]
    )
    return Claim("equal over small integers", layer.held, evidence, layer.seconds)


def dtypes(subject: Subject, seeds: int) -> Claim:
    """One seed by the error model; where one device does not run in these dtypes, nothing can be said."""
    kind, right = own_dtypes.kind_of(subject.program), None
    try:
        right = own_dtypes.on_one_device_twice(subject.program, subject.model, subject.microbatches, subject.device)
        return own_dtypes.claim(subject.program, right, subject.source)
    except FAILURES as error:
        who = "the reference graph" if right is None else "the emitted text"
        text = f"{who} does not run in these dtypes: {type(error).__name__}: {str(error).splitlines()[0]}"
        return Claim(kind, None if right is None else False, [text], 0.0)


ALSO: dict[str, Callable[[Subject, int], Claim]] = {"dtypes": dtypes, "integers": integers}
"""Arithmetics beside the prime field and float64."""
