"""What becomes of a sketch: equal to one device, refused with a clear error, or something that must not be."""

from __future__ import annotations

import copy
import math
import re
import time
import traceback
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import ndcompile as nd
from ndcompile.errors import CheckError
from ndcompile.mesh import MeshError
from ndcompile.runtime import private
from ndcompile.verify.cancelling import terms
from ndcompile.verify.compare import OF_TERMS
from ndcompile.verify.domain import Domain, Float64
from ndcompile.verify.places import norm
from tests.programs.sketch import Sketch, build, inputs, placement

REFUSALS = (nd.CompileError, MeshError)
GOOD = ("equal", "tested", "refused")
"""`tested`: an op has no meaning in the prime field, and float64 is equal."""

BAR = 1e-9
"""The largest distance of the reference graph from the untouched model, both in float64."""

FLOAT64 = Float64(0)


@dataclass(frozen=True)
class Verdict:
    """`kind` is one of `GOOD`, or `invalid` (the model runs on no device), `wrong`, `rounding` (equal in the field, not
    in float64, by more than rounding explains: to be looked at), `reference` (the reference graph is not the model),
    `crash` (an error that is no refusal), `checker` (verify itself fails), `generator` (there is no sketch)."""

    kind: str
    detail: str = ""
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        return self.kind in (*GOOD, "invalid")


def judge(sketch: Sketch) -> Verdict:
    """Compile, verify, and compare the reference graph with the untouched model."""
    begin = time.process_time()
    kind, detail = _judged(sketch)
    return Verdict(kind, detail, round(time.process_time() - begin, 2))


def _judged(sketch: Sketch) -> tuple[str, str]:
    model = build(sketch)
    try:
        expected = run_alone(model, model, sketch)
    except Exception as error:
        return "invalid", f"{type(error).__name__}: {error}"[:300]
    if not all(x is None or x.isfinite().all() for x in expected):
        return "invalid", "not finite"
    try:
        program = compiled(sketch, model)
    except Exception as error:
        if isinstance(error, REFUSALS) and not isinstance(error, CheckError):
            return "refused", str(error)
        return "crash", traceback.format_exc(limit=-4)
    try:
        report = nd.verify(program, model, seeds=1, microbatches=1)
    except Exception:
        return "checker", traceback.format_exc(limit=-4)
    said = {claim.kind: claim.held for claim in report.claims}
    if not report.equal:
        exact = said["equal over F_p"] and said["tested (float64)"] is False
        return "rounding" if exact else "wrong", "\n".join([*report.differences[:1], f"{report}"])
    if not program.manifest.random:
        far = _furthest(model, sketch, expected, run_alone(program.one_device(model), model, sketch))
        if not far <= BAR:
            return "reference", f"the reference graph is {far:.1e} away from the model"
    return ("equal", "") if said["equal over F_p"] else ("tested", report.claims[1].evidence[0])


def compiled(sketch: Sketch, model: nn.Module) -> nd.Program:
    pins: dict[str, dict[str, Any]] = {}
    for name, axis, text in sketch.pins:
        pins.setdefault(name, {})[axis] = placement(text)
    return nd.compile(
        model, sketch.mesh, inputs(sketch, sketch.sizes), placements=pins, dynamic_dims=sketch.dynamic_dims
    )  # fmt: skip


def run_alone(
    callee: nn.Module, model: nn.Module, sketch: Sketch, domain: Domain = FLOAT64
) -> list[Tensor | None]:  # fmt: skip
    """All results, gradients and buffers of one forward and backward in float64 on one device."""
    held = copy.deepcopy(model.state_dict())
    wide = model.double()
    given = inputs(sketch, sketch.sizes | {"b": 4}, 1)
    batch = {name: x.double() if x.is_floating_point() else x for name, x in given.items()}
    torch.manual_seed(0)
    with private.dispatched(domain.run):
        found = [x for x in pytree.tree_leaves(callee(**batch)) if isinstance(x, Tensor)]
        flows = [x for x in found if x.requires_grad]
        generator = torch.Generator().manual_seed(2)
        cotangents = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in flows]
        torch.autograd.backward(flows, cotangents)
    kept: list[Tensor | None] = [x.detach().clone() for x in found if x.is_floating_point()]
    kept += [None if p.grad is None else p.grad.clone() for p in wide.parameters()]
    kept += [b.clone() for b in wide.buffers()]
    wide.zero_grad()
    model.float().load_state_dict(held)
    return kept


def _furthest(
    model: nn.Module, sketch: Sketch, expected: list[Tensor | None], found: list[Tensor | None]
) -> float:  # fmt: skip
    """The largest distance, by the norm of all; if it is too large, of what is further away than rounding explains."""
    if [x is None for x in expected] != [x is None for x in found]:
        return math.inf
    both = enumerate(zip(expected, found, strict=True))
    pairs = {f"{i}": (a, b) for i, (a, b) in both if a is not None and b is not None}
    if any(a.shape != b.shape for a, b in pairs.values()):
        return math.inf
    least = 1e-6 * max([1e-9, *(norm(a) for a, _ in pairs.values())])
    far = {name: FLOAT64.distance(b, a, least) for name, (a, b) in pairs.items()}
    if all(d <= BAR for d in far.values()):
        return max([0.0, *far.values()])

    def again(domain: Domain) -> dict[str, Tensor]:
        return {f"{i}": x for i, x in enumerate(run_alone(model, model, sketch, domain)) if x is not None}

    sizes = terms(again, FLOAT64)
    explained = {n for n, (a, b) in pairs.items() if far[n] < math.inf and norm(a - b) <= OF_TERMS * sizes.get(n, 0.0)}
    return max([0.0, *(far[n] for n in far if n not in explained)])


def reason(verdict: Verdict) -> str:
    """The first line of an error without names and numbers, by which they are counted."""
    lines = verdict.detail.strip().splitlines() or [""]
    text = lines[-1] if verdict.kind in ("crash", "checker", "generator") else lines[0]
    if "cannot be traced" in text and len(lines) > 1:
        text = " ".join(line.strip() for line in lines if "why" in line) or text
    text = re.sub(r"'[^']*'|%\w+|\bv\d+\b", "…", text)
    return re.sub(r"\d+", "N", text)[:160]


def as_row(seed: int, sketch: Sketch | None, verdict: Verdict) -> dict[str, Any]:
    """A line of a log; there is no sketch where the generator fails."""
    drawn = dict(mesh=sketch.mesh, pins=len(sketch.pins)) if sketch else {}
    return dict(seed=seed, torch=str(torch.__version__)) | drawn | asdict(verdict)
