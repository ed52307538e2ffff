"""The training loop of the demonstration: the same lines on one device and on each rank of a mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import ndcompile as nd
from ndcompile.demo.data import Batch, global_batch, own_part
from ndcompile.demo.model import ByteGPT
from ndcompile.mesh import MeshSpec

PRECISIONS = {"float32": None, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Settings:
    """One run: `mesh` is its text; all sizes are global."""

    mesh: str = "dp_shard=2, tp=2"
    steps: int = 20
    sequences: int = 8
    context: int = 128
    width: int = 128
    depth: int = 4
    heads: int = 4
    dropout: float = 0.0
    float64: bool = False
    precision: str = "float32"
    seed: int = 0
    learning_rate: float = 1e-3

    def model(self) -> ByteGPT:
        """The one-device model: the same weights in every process."""
        torch.manual_seed(self.seed)
        model = ByteGPT(self.width, self.depth, self.heads, self.context, self.dropout)
        return model.double() if self.float64 else model

    def batch(self, step: int) -> Batch:
        """The global batch: `sequences`, or a few more, so that each data-parallel rank has as many."""
        parts = MeshSpec.parse(self.mesh).size("dp_replicate", "dp_shard")
        return global_batch(step, -(-self.sequences // parts) * parts, self.context, self.seed)

    def parallel(self, model: nn.Module) -> nn.Module:
        """The model on this process's mesh."""
        return nd.parallelize(model, self.mesh, self.example(), precision=self.compiled_precision, float64=self.float64)

    def compiled(self) -> nd.Program:
        """The program alone: no process group, no training."""
        return nd.compile(
            self.model(), self.mesh, self.example(), precision=self.compiled_precision, float64=self.float64
        )

    def example(self) -> dict[str, Tensor]:
        batch = self.batch(0)
        return {"ids": batch.ids, "labels": batch.labels}

    @property
    def compiled_precision(self) -> nd.Precision | None:
        compute = PRECISIONS[self.precision]
        return None if compute is None else nd.Precision(compute=compute, reduce=torch.float32)


@dataclass
class Record:
    """What one run saw; gradients are whole and not clipped, of the first and the last step: step → name → tensor."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[int, dict[str, Tensor]] = field(default_factory=dict)


def train(
    settings: Settings,
    device: torch.device,
    rank: int | None = None,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> Record:
    """Train on one device (`rank` is None) or as one rank of the mesh; `report` is told the loss of each step.

    With dropout, one device runs the reference graph: the model, but with random numbers that any mesh can draw again.
    """
    model: nn.Module = settings.model().to(device)
    run = model
    if rank is not None:
        run = model = settings.parallel(model)
    elif settings.dropout:
        run = settings.compiled().one_device(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
    record = Record()
    for step in range(settings.steps):
        batch = settings.batch(step)
        if rank is not None:
            batch = own_part(batch, MeshSpec.parse(settings.mesh), rank)
        torch.manual_seed(settings.seed + step)
        loss = run(ids=batch.ids.to(device), labels=batch.labels.to(device))["loss"]
        loss.backward()
        if step in (0, settings.steps - 1):
            record.gradients[step] = whole_gradients(model)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        record.losses.append(loss.item())
        record.norms.append(whole(norm).item())
        report(step, record.losses[-1])
    return record


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Every gradient, gathered, on the CPU; a parameter without one is missing, and would be noticed as such."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: whole(gradient).cpu() for name, gradient in found.items()}


def whole(tensor: Tensor) -> Tensor:
    """A copy: of all of a DTensor (each of its ranks must call), of a plain tensor as it is."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
