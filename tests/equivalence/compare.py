"""One case of the equivalence matrix: a model on a mesh against one device, on real process groups."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import ndcompile as nd
from ndcompile.mesh import MeshSpec
from tests.equivalence.zoo import ZOO, Batch

SAMPLES = 8
LEARNING_RATE = 1e-2
STEPS = 2


@dataclass
class Outcome:
    """The distances of one rank: loss, every gradient, gradient norm, and every parameter after each clipped step."""

    case: str
    distances: dict[str, float] = field(default_factory=dict)

    @property
    def worst(self) -> tuple[str, float]:
        return max(self.distances.items(), key=lambda pair: pair[1])


def distance(a: Tensor, b: Tensor, scale: float) -> float:
    """‖a − b‖ / max(‖b‖, scale): `scale` keeps gradients that are zero by mathematics from being divided by."""
    value = ((a.double() - b.double()).norm() / max(b.double().norm().item(), scale)).item()
    return value if value == value else float("inf")


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_rows(batch: Batch, spec: MeshSpec, rank: int) -> Batch:
    place, ranks, index = spec.coordinate(rank), 1, 0
    for axis in spec.of_kind("dp_replicate", "dp_shard"):
        ranks, index = ranks * spec.size(axis), index * spec.size(axis) + place[axis]
    return {k: v.chunk(ranks)[index].contiguous() for k, v in batch.items()}


def compare(name: str, mesh: str, float64: bool, compiled: bool = False) -> Outcome:
    """Run `STEPS` clipped AdamW steps on this rank and on one device beside it, and measure all distances."""
    rank = torch.distributed.get_rank()
    spec = MeshSpec.parse(mesh)
    single, batch = ZOO[name](SAMPLES)
    model, _ = ZOO[name](SAMPLES)
    if float64:
        single, model = single.double(), model.double()
        batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    mine = own_rows(batch, spec, rank)
    parallel = nd.parallelize(model, mesh, batch, float64=float64)
    if compiled:
        parallel.compile(backend="aot_eager")
    reference = nd.compile(single, "", batch, float64=float64).one_device(single)
    outcome = Outcome(f"{name} on {mesh}")
    optimizers = [torch.optim.AdamW(m.parameters(), lr=LEARNING_RATE, fused=True) for m in (parallel, single)]
    for step in range(STEPS):
        torch.manual_seed(step)
        expected = reference(**batch)
        torch.manual_seed(step)
        found = parallel(**mine)
        _compare_results(outcome, step, found, expected, spec, rank)
        found["loss"].backward()
        expected["loss"].backward()
        _compare_gradients(outcome, step, parallel, single)
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (parallel, single)]
        outcome.distances[f"{step} norm"] = distance(whole(norms[0]), norms[1], 1e-30)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for key, parameter in single.named_parameters():
            held = whole(dict(parallel.named_parameters())[key])
            scale = LEARNING_RATE * parameter.numel() ** 0.5
            outcome.distances[f"{step} stepped {key}"] = distance(held, parameter, scale)
    return outcome


def _compare_results(outcome: Outcome, step: int, found: dict, expected: dict, spec: MeshSpec, rank: int) -> None:
    for key, value in expected.items():
        if not isinstance(value, Tensor):
            continue
        mine = value if value.dim() == 0 else own_rows({"v": value}, spec, rank)["v"]
        outcome.distances[f"{step} result {key}"] = distance(whole(found[key]).detach(), mine.detach(), 1e-30)


def _compare_gradients(outcome: Outcome, step: int, parallel: nn.Module, single: nn.Module) -> None:
    expected = {k: p.grad for k, p in single.named_parameters()}
    norm = torch.stack([g.double().norm() for g in expected.values() if g is not None]).norm().item()
    for key, parameter in parallel.named_parameters():
        gradient = expected[key]
        if gradient is None or parameter.grad is None:
            assert gradient is None and parameter.grad is None, f"'{key}' has a gradient on one side only"
            continue
        outcome.distances[f"{step} gradient {key}"] = distance(whole(parameter.grad), gradient, 1e-6 * norm)


def run_cases(cases: list[tuple[str, str, bool, bool]]) -> list[Outcome]:
    """All cases of one world size, in one set of processes."""
    torch.set_num_threads(1)
    return [compare(*case) for case in cases]


__all__ = ["Outcome", "compare", "distance", "own_rows", "pytree", "run_cases", "whole"]
