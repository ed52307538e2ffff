"""`verify`: is what runs on the mesh the model that was written?

Every rank runs the emitted text, forward and backward, in one process and in exact arithmetic, and all that it
computes is compared with the reference graph on one device. The module is what `nd.verify` names, so it is callable.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ndcompile.errors import CompileError
from ndcompile.program import Program
from ndcompile.request import check_option
from ndcompile.verify import claims, padded, rings, untouched
from ndcompile.verify.cases import cases_of, sizes_of
from ndcompile.verify.domain import Float64
from ndcompile.verify.field import Field
from ndcompile.verify.layer import Layer, Subject
from ndcompile.verify.report import Claim, Report

__all__ = ["Claim", "Report", "verify"]

Progress = Callable[[str, int, int], None]

NOT_CHECKED = [
    "process groups, kernels and rounding in the program's own dtypes: casts between floats change nothing here",
    "torch.compile; attention's kernel (its formula runs here)",
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

    Needs no process group and no GPU. `model` is needed where the program could not keep a buffer's whole numbers: it
    was compiled on the meta device, or they are many. `source` is another text to run in place of the program's. A
    large program runs at small sizes on a small mesh, with its own text (`shrink`). `also` asks for more arithmetics:
    "dtypes", the program's own (asked for by itself where there is a precision), and "integers", small whole numbers,
    for programs that are shallow. All ranks run on `device`, the CPU or one GPU.
    `progress(what, done, steps)` is called before each step and at the end.
    """
    wanted, device = _asked_for(program, also), _usable(device)
    has_rings, pads = rings.CALLED in (source or str(program)), bool(program.manifest.pads)
    tell = _counting(progress, seeds + 3 + len(wanted) + has_rings + pads + (model is not None))
    tell("types")
    types = claims.types(program)
    tell("sizes")
    cases = cases_of(program, model)
    subjects = [Subject(case, model, microbatches, source, device) for case in cases]
    exact, float64 = Layer(), Layer()
    for seed in range(seeds):
        tell(f"F_p, sample {seed + 1} of {seeds}")
        if exact.held is not False:
            exact.run(subjects[seed % len(subjects)], Field, seed)
    lemmas, more = [], []
    if has_rings:
        tell("rings")
        lemmas += [rings.claim(list(exact.rings.values()), seeds)] if exact.rings else []
    tell("float64")
    float64.located = bool(exact.differences)
    float64.run(subjects[0], Float64, 0)
    if pads:
        tell("pads")
        more.append(padded.claim(cases[0], model, seeds, device))
    if model is not None:
        tell("model")
        more.append(untouched.claim(cases[0], model, microbatches, device))
    for name in wanted:
        tell(name)
        more.append(claims.ALSO[name](subjects[0], seeds))
    tell("done")
    worst, beside = exact if exact.held is False else float64, [*lemmas, *more]
    exactly = claims.exact(exact, seeds, microbatches, cases)
    return Report(
        f"{program.manifest.model} on {program.mesh}",
        [types, *claims.same_ops(cases[0]), exactly, *lemmas, claims.float64(float64), *more],
        [sizes_of(case) for case in cases[: max(seeds, 1)]],
        worst.differences or [text for claim in beside if claim.held is False for text in claim.evidence],
        worst.begins,
        _not_checked(exact, wanted, model is not None),
        program,
        source or str(program),
    )


def _counting(progress: Progress | None, steps: int) -> Callable[[str], None]:
    """Tells `progress` what begins, and how many steps came before it."""
    done = itertools.count()
    return lambda what: progress(what, next(done), steps) if progress else None


def _not_checked(exact: Layer, wanted: Sequence[str], with_model: bool) -> list[str]:
    more = [f"the prime field: {exact.unknown}"] if exact.unknown else []
    more += [] if with_model else ["that the reference graph is the model: nd.verify(program, model) would"]
    first, *rest = NOT_CHECKED
    return ["process groups and kernels" if "dtypes" in wanted else first, *rest, *more]


def _asked_for(program: Program, also: Sequence[str]) -> list[str]:
    for name in also:
        check_option("also", name, tuple(claims.ALSO))
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


class _Module(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Report:
        return verify(*args, **kwargs)


sys.modules[__name__].__class__ = _Module
