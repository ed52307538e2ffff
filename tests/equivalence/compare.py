"""Cases of the equivalence matrix: a model on a mesh against one device, on real process groups.

The parent process compiles the program, and trains on one device for the right answers; the ranks load the program,
train on the mesh, and measure how far they are from them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import ndcompile as nd
from ndcompile.capture import Captured
from ndcompile.mesh import MeshSpec
from tests.equivalence.captures import captured_once
from tests.equivalence.registry import MODELS
from tests.equivalence.zoo import Batch

SAMPLES = 8
LEARNING_RATE = 1e-2
STEPS = 2
CLIP = 0.1
EPS = {True: 1e-8, False: 1e-3}
"""AdamW's eps in float64 mode (torch's default) and in float32: there a gradient near 1e-8 is all rounding, and
dividing it by its own size would make steps of it; 1e-3 keeps the step a smooth function of the gradient.
"""
BAR = {True: 1e-10, False: 1e-6}
"""The largest distance in float64 mode and in float32; there, if one device itself rounds further, four times that."""


@dataclass(frozen=True)
class Case:
    """One cell of the matrix."""

    model: str
    mesh: str
    float64: bool = True
    length: int | None = None
    """Sequences of this length, which the mesh need not divide."""
    remat: str | tuple[str, ...] | None = None
    reshard: bool = True
    halves: bool = False

    def __str__(self) -> str:
        how = [
            "" if self.length is None else f", {self.length} tokens",
            "" if self.remat is None else f", remat={self.remat}",
            "" if self.reshard else ", weights kept",
            ", in halves" if self.halves else "",
        ]
        return f"{self.model} on {self.mesh}, {'float64' if self.float64 else 'float32'}{''.join(how)}"


@dataclass
class Step:
    """What one device computes in a step: results, gradients, their norm, parameters and buffers after it."""

    results: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    norm: Tensor
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]


@dataclass
class Outcome:
    """The distances that one rank measured, by what was compared."""

    case: Case
    distances: dict[str, float] = field(default_factory=dict)
    own: dict[str, float] = field(default_factory=dict)
    """How far one device in this dtype is from one device in float64."""

    @property
    def failures(self) -> list[str]:
        bars = {what: max(BAR[self.case.float64], 4 * own) for what, own in self.own.items()}
        return [
            f"{self.case}: {what} is {far:.2e} away, {bars[what]:.0e} is allowed"
            for what, far in self.distances.items()
            if not far < bars[what]
        ]


def distance(a: Tensor, b: Tensor, least: float) -> float:
    """‖a − b‖ / max(‖b‖, least)."""
    if a.shape != b.shape:
        return float("inf")
    value = ((a.double() - b.double()).norm() / max(b.double().norm().item(), least)).item()
    return value if value == value else float("inf")


def make(case: Case) -> tuple[nn.Module, Batch]:
    model, batch = MODELS[case.model](SAMPLES)
    if case.length is not None:
        batch = {k: v[:, : case.length].contiguous() for k, v in batch.items()}
    if case.float64:
        model = model.double()
        batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    return model, batch


def prepare(case: Case, folder: Path) -> Path:
    """Compile the case, and train on one device in float64 (and in the case's dtype); all goes to `folder`."""
    model, batch = make(case)
    options: dict[str, Any] = dict(
        remat=case.remat, reshard_after_forward=case.reshard, pad_inputs=case.length is not None, halves=case.halves
    )
    with _captured_once(case, case.float64):
        nd.compile(model, case.mesh, batch, float64=case.float64, **options).save(folder / "program.py")
    torch.save(on_one_device(case.model, case.float64, case.length), folder / "steps.pt")
    torch.save(case, folder / "case.pt")
    return folder


CAPTURES: dict[Any, Captured] = {}
"""What this process has captured."""


def _captured_once(case: Case, float64: bool) -> AbstractContextManager[None]:
    return captured_once(CAPTURES, case.model, float64, case.length)


@lru_cache(maxsize=4)
def on_one_device(name: str, float64: bool, length: int | None = None) -> list[list[Step]]:
    """The steps of one device in float64, and in float32 if that is asked for: the same for every mesh."""
    case = Case(name, "", float64, length)
    model, batch = make(replace(case, float64=True))
    with _captured_once(case, True):
        program = nd.compile(model, "", batch, float64=True)
    steps = [train(program.one_device(model), model, batch, EPS[float64])]
    if not float64:
        model, batch = make(case)
        callee = nd.compile(model, "", batch).one_device(model) if program.manifest.random else model
        steps.append(train(callee, model, batch, EPS[False]))
    return steps


def train(callee: nn.Module, model: nn.Module, batch: Batch, eps: float) -> list[Step]:
    """Two clipped AdamW steps on the whole batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=eps, fused=True)
    steps = []
    for number in range(STEPS):
        torch.manual_seed(number)
        results = dict(callee(**batch).items())
        results["loss"].backward()
        gradients = {k: None if p.grad is None else p.grad.clone() for k, p in model.named_parameters()}
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        held = {k: p.detach().clone() for k, p in model.named_parameters()}
        kept = {k: v.detach().clone() for k, v in results.items() if isinstance(v, Tensor)}
        buffers = {k: b.detach().clone() for k, b in model.named_buffers()}
        steps.append(Step(kept, gradients, norm, held, buffers))
    return steps


def measure(folder: Path) -> Outcome:
    """On a rank: load the program, take the same steps on this rank's rows, and compare everything."""
    case: Case = torch.load(folder / "case.pt", weights_only=False)
    exact, *low = torch.load(folder / "steps.pt", weights_only=False)
    model, batch = make(case)
    parallel = nd.load(folder / "program.py", model)
    spec, rank = MeshSpec.parse(case.mesh), torch.distributed.get_rank()
    outcome = Outcome(case)
    taken = steps_on_mesh(parallel, own_rows(batch, spec, rank), EPS[case.float64])
    for number, (found, step) in enumerate(zip(taken, exact, strict=True)):
        local = replace(step, results=own_results(step.results, spec, rank))
        outcome.distances |= distances(number, found, local)
        own = replace(low[0][number], results=own_results(low[0][number].results, spec, rank)) if low else local
        outcome.own |= distances(number, own, local)
    return outcome


def steps_on_mesh(parallel: nn.Module, batch: Batch, eps: float) -> list[Step]:
    """The steps of `train`, with every DTensor gathered."""
    return [
        Step(
            {k: whole(v) for k, v in step.results.items()},
            {k: None if g is None else whole(g) for k, g in step.gradients.items()},
            whole(step.norm),
            {k: whole(p) for k, p in step.parameters.items()},
            step.buffers,
        )
        for step in train(parallel, parallel, batch, eps)
    ]


def distances(number: int, found: Step, expected: Step) -> dict[str, float]:
    """How far one step is from another: results, every gradient, the norm, every parameter and buffer."""
    assert found.results.keys() == expected.results.keys(), "the same results"
    assert found.gradients.keys() == expected.gradients.keys(), "the same parameters"
    total = expected.norm.double().item()
    far = {f"result {k}": distance(found.results[k], v, 1e-30) for k, v in expected.results.items()}
    for key, gradient in expected.gradients.items():
        mine = found.gradients[key]
        if gradient is None or mine is None:
            assert gradient is mine is None, f"'{key}' has a gradient on one side only"
            continue
        far[f"gradient {key}"] = distance(mine, gradient, 1e-6 * total)
    far["gradient norm"] = distance(found.norm, expected.norm, 1e-30)
    for key, parameter in expected.parameters.items():
        far[f"parameter {key}"] = distance(found.parameters[key], parameter, LEARNING_RATE * parameter.numel() ** 0.5)
    assert found.buffers.keys() >= expected.buffers.keys(), "the same buffers"
    for key, buffer in expected.buffers.items():
        far[f"buffer {key}"] = distance(found.buffers[key], buffer, 1e-30)
    return {f"step {number}: {what}": value for what, value in far.items()}


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_rows(batch: dict[str, Any], spec: MeshSpec, rank: int) -> dict[str, Any]:
    """This rank's rows of each tensor: the data axes are one index, dp_replicate major."""
    place, ranks, index = spec.coordinate(rank), 1, 0
    for axis in spec.of_kind("dp_replicate", "dp_shard"):
        ranks, index = ranks * spec.size(axis), index * spec.size(axis) + place[axis]
    return {k: v.chunk(ranks)[index].contiguous() for k, v in batch.items()}


def own_results(results: dict[str, Tensor], spec: MeshSpec, rank: int) -> dict[str, Tensor]:
    """Scalars are the same everywhere; of others a rank has its rows."""
    return {k: v if v.dim() == 0 else own_rows({k: v}, spec, rank)[k] for k, v in results.items()}


def measure_all(folders: list[Path]) -> list[Outcome]:
    """All cases of one world size, in one set of processes."""
    torch.set_num_threads(1)
    return [measure(folder) for folder in folders]
