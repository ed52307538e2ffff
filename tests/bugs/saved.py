"""Programs for four ranks that are compiled once, in the process of the tests, and run by all claims of this folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ndcompile as nd
from ndcompile.mesh import MeshSpec
from tests.bugs.models import Fused, batch

folder = Path()
"""Where this rank finds the programs."""


@dataclass(frozen=True)
class Saved:
    """A mesh, and what else makes a program of the one model."""

    mesh: str
    pins: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    float64: bool = True
    replaced: tuple[str, str] = ("", "")


TP, HSDP = "dp_replicate=2, tp=2", "dp_replicate=2, dp_shard=2"
ROWS = {"tokens.weight": {"tp": nd.S(0)}}
PROGRAMS = {
    "tp": Saved(TP, ROWS),
    "tp, other dims": Saved(TP, {"tokens.weight": {"tp": nd.S(1)}, "down.weight": {"tp": nd.S(0)}}),
    "hsdp": Saved(HSDP),
    "cp": Saved("dp_shard=2, cp=2"),
    "hsdp, not summed": Saved(HSDP, replaced=(', reduce=("dp_replicate",)', "")),
    "hsdp, two dtypes": Saved(HSDP, float64=False),
    "tp, two dtypes": Saved(TP, ROWS, float64=False),
}


def model(name: str = "tp") -> nn.Module:
    """In double, or in half precision but for its norms."""
    torch.manual_seed(0)
    made = Fused()
    if PROGRAMS[name].float64:
        return made.double()
    made.bfloat16().norm.float()
    return made


def save(where: Path) -> None:
    for name, given in PROGRAMS.items():
        program = nd.compile(model(name), given.mesh, batch(), float64=given.float64, placements=given.pins)
        program.save(where / f"{name}.py")
        text, (right, wrong) = (where / f"{name}.py").read_text(), given.replaced
        assert right in text, text
        (where / f"{name}.py").write_text(text.replace(right, wrong))


def load(name: str) -> nd.ParallelModule:
    return nd.load(folder / f"{name}.py", model(name))


def share(name: str, given: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """This rank's rows of a global batch."""
    spec, rank = MeshSpec.parse(PROGRAMS[name].mesh), torch.distributed.get_rank()
    data = [axis for axis in spec.names if axis.startswith("dp_")]
    index = 0
    for axis in data:
        index = index * spec.size(axis) + spec.coordinate(rank)[axis]
    rows = batch() if given is None else given
    return {key: value.chunk(spec.size(*data))[index] for key, value in rows.items()}
