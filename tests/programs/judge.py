"""What becomes of a sketch: equal to one device, refused with a clear error, or something that must not be."""

from __future__ import annotations

import copy
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
from ndcompile.verify import untouched
from ndcompile.verify.domain import Float64
from tests.programs.sketch import Sketch, build, inputs, placement

REFUSALS = (nd.CompileError, MeshError)
GOOD = ("equal", "tested", "refused")
"""`tested`: an op has no meaning in the prime field, and float64 is equal."""


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
    """Compile, and verify beside the untouched model."""
    begin = time.process_time()
    kind, detail = _judged(sketch)
    return Verdict(kind, detail, round(time.process_time() - begin, 2))


def _judged(sketch: Sketch) -> tuple[str, str]:
    model = build(sketch)
    try:
        expected = run_alone(model, sketch)
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
        kind = "wrong"
        if said["equal over F_p"]:
            kind = (
                "rounding" if said["tested (float64)"] is False else "reference" if not said[untouched.KIND] else kind
            )
        return kind, "\n".join([*report.differences[:1], f"{report}"])
    if said[untouched.KIND] is None:
        return "checker", f"{report}"
    return ("equal", "") if said["equal over F_p"] else ("tested", report.claims[1].evidence[0])


def compiled(sketch: Sketch, model: nn.Module) -> nd.Program:
    pins: dict[str, dict[str, Any]] = {}
    for name, axis, text in sketch.pins:
        pins.setdefault(name, {})[axis] = placement(text)
    return nd.compile(
        model, sketch.mesh, inputs(sketch, sketch.sizes), placements=pins, dynamic_dims=sketch.dynamic_dims
    )  # fmt: skip


def run_alone(model: nn.Module, sketch: Sketch) -> list[Tensor | None]:
    """All results, gradients and buffers of one forward and backward in float64 on one device."""
    held = copy.deepcopy(model.state_dict())
    wide = model.double()
    given = inputs(sketch, sketch.sizes | {"b": 4}, 1)
    batch = {name: x.double() if x.is_floating_point() else x for name, x in given.items()}
    with private.dispatched(Float64(0).run):
        found = [x for x in pytree.tree_leaves(model(**batch)) if isinstance(x, Tensor)]
        flows = [x for x in found if x.requires_grad]
        torch.autograd.backward(flows, [torch.ones_like(x) for x in flows])
    kept: list[Tensor | None] = [x.detach().clone() for x in found if x.is_floating_point()]
    kept += [None if p.grad is None else p.grad.clone() for p in wide.parameters()]
    kept += [b.clone() for b in wide.buffers()]
    wide.zero_grad()
    model.float().load_state_dict(held)
    return kept


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
