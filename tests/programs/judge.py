"""What becomes of a sketch: equal to one device, refused with a clear error, or something that must not be."""

from __future__ import annotations

import re
import time
import traceback
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import ndcompile as nd
from ndcompile.checks import CheckError
from ndcompile.mesh import MeshError
from ndcompile.verify.arithmetic import Field
from ndcompile.verify.execute import on_one_device
from ndcompile.verify.sample import draw
from tests.programs.sketch import Sketch, build, inputs, placement

REFUSALS = (nd.CompileError, MeshError)
GOOD = ("equal", "tested", "refused")
"""`tested`: an op has no meaning in the prime field, and float64 is equal."""

BAR = 1e-9
"""The largest distance of the reference graph from the untouched model, both in float64."""


@dataclass(frozen=True)
class Verdict:
    """`kind` is one of `GOOD`, or `invalid` (the model runs on no device), `wrong`, `rounding` (equal in the field, not
    in float64: to be looked at), `reference` (the reference graph is not the model), `crash` (an error that is no
    refusal), `checker` (verify itself fails)."""

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
        detail = "\n".join([*report.differences[:1], f"{report}"])
        if not said["equal over F_p"] or said["tested (float64)"] is not False:
            return "wrong", detail
        if not set(map(_tensor, report.differences)) <= _zeros(program, model):
            return "rounding", detail
    if not program.manifest.random:
        far = _far(expected, run_alone(program.one_device(model), model, sketch))
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


def _tensor(difference: str) -> str:
    """Which tensor differs: `gradient of m0.bias`, in whichever step."""
    return difference.partition(": ")[2].partition(": ")[0].partition(" of microbatch")[0]


def _zeros(program: nd.Program, model: nn.Module) -> set[str]:
    """The tensors that are 0 by mathematics, as the gradient of what a softmax takes off: all of their elements are 0
    in the prime field. In float64 they are rounding alone, which has no distance of its own size from itself; so is
    what a step makes of them.
    """
    domain = Field(0)
    step = on_one_device(program, draw(program, domain, model), domain)[0]
    named = {f"result {i}": y for i, y in enumerate(step.results[0]) if isinstance(y, Tensor)}
    named |= {f"gradient of {name}": g for name, g in step.gradients.items() if g is not None}
    found = {name for name, value in named.items() if not value.any()}
    found |= {f"{name.removeprefix('gradient of ')} after it" for name in found}
    return found | ({"gradient norm"} if all(g is None or not g.any() for g in step.gradients.values()) else set())


class Widened(TorchDispatchMode):
    """Every floating dtype is float64, so that casts change nothing."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return op(*(_wide(a) for a in args), **{k: _wide(v) for k, v in (kwargs or {}).items()})


def _wide(value: Any) -> Any:
    lower = isinstance(value, torch.dtype) and value.is_floating_point
    return torch.float64 if lower else value


def run_alone(callee: nn.Module, model: nn.Module, sketch: Sketch) -> list[Tensor | None]:
    """All results, gradients and buffers of one forward and backward in float64 on one device."""
    import copy

    held = copy.deepcopy(model.state_dict())
    wide = model.double()
    given = inputs(sketch, sketch.sizes | {"b": 4}, 1)
    batch = {name: x.double() if x.is_floating_point() else x for name, x in given.items()}
    torch.manual_seed(0)
    with Widened():
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


def _far(expected: list[Tensor | None], found: list[Tensor | None]) -> float:
    """The largest distance, by the norm of all."""
    if [x is None for x in expected] != [x is None for x in found]:
        return float("inf")
    pairs = [(a, b) for a, b in zip(expected, found, strict=True) if a is not None and b is not None]
    least = 1e-6 * max([1e-9, *(float(a.double().norm()) for a, _ in pairs)])
    if any(a.shape != b.shape for a, b in pairs):
        return float("inf")
    return max(
        [0.0, *(float((a.double() - b.double()).norm()) / max(float(a.double().norm()), least) for a, b in pairs)]
    )


def reason(verdict: Verdict) -> str:
    """The first line of an error without names and numbers, by which they are counted."""
    lines = verdict.detail.strip().splitlines() or [""]
    text = lines[-1] if verdict.kind in ("crash", "checker") else lines[0]
    if "cannot be traced" in text and len(lines) > 1:
        text = " ".join(line.strip() for line in lines if "why" in line) or text
    text = re.sub(r"'[^']*'|%\w+|\bv\d+\b", "…", text)
    return re.sub(r"\d+", "N", text)[:160]


def as_row(seed: int, sketch: Sketch, verdict: Verdict) -> dict[str, Any]:
    return dict(seed=seed, mesh=sketch.mesh, pins=len(sketch.pins), torch=str(torch.__version__)) | asdict(verdict)
