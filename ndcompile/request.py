"""What is asked of a compilation: a model on a mesh, its example inputs, and the options."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ndcompile.autocast import Autocast
from ndcompile.errors import CompileError
from ndcompile.inputs import DynamicDims, Inputs
from ndcompile.mesh import MeshSpec
from ndcompile.pins import Pins
from ndcompile.precision import Precision
from ndcompile.remat import Remat, Reshard
from ndcompile.twin import on_meta


@dataclass(frozen=True)
class Asked:
    """The options of a compilation that hold for the programs of both modes."""

    precision: Precision
    local_outputs: bool
    float64: bool
    dynamic_dims: DynamicDims | None
    cp_attention: str | None
    pad_inputs: bool
    halves: bool
    remat: Remat
    reshard: Reshard


@dataclass(frozen=True)
class Request:
    """One compilation: the program of the model's present mode on a mesh.

    Where it is `of_other_mode`, the pins were checked with the first one.
    """

    model: nn.Module
    mesh: MeshSpec
    example: Inputs
    pins: Pins
    asked: Asked
    of_other_mode: bool = False


def check_option(name: str, value: str | None, allowed: tuple[str | None, ...]) -> None:
    if value not in allowed:
        raise CompileError(f"{name}={value!r} is no option", tries=" or ".join(map(repr, allowed)))


def check_halves(asked: Asked, mesh: MeshSpec) -> None:
    """Halves are for collectives of `tp`."""
    if asked.halves and "tp" not in [axis.kind for axis in mesh.axes]:
        raise CompileError(
            f"halves=True on the mesh '{mesh}', which has no axis 'tp'",
            why="half of a batch is computed while collectives over tp travel with the other half",
            tries=("a mesh with tp, for example 'tp=2'", "halves=False"),
        )


def examples(model: nn.Module) -> dict[str, Tensor]:
    """Example inputs of a transformers model, from its config; for others an error that says what to pass."""
    config = getattr(model, "config", None)
    parameters = inspect.signature(model.forward).parameters
    if config is None or "input_ids" not in parameters or not hasattr(config, "vocab_size"):
        raise CompileError(
            f"example inputs are needed to compile {type(model).__name__}",
            why=f"its forward{inspect.signature(model.forward)} does not say the inputs' shapes and dtypes",
            tries="example_inputs={...} with tensors as one call takes them; their sizes mean nothing",
        )
    ids = torch.zeros(2, 8, dtype=torch.long)
    return {"input_ids": ids} | ({"labels": ids.clone()} if "labels" in parameters else {})


def ambient_autocast(model: nn.Module) -> Autocast | None:
    """The autocast that compile is called under, for the device that the model is on."""
    device = next((p.device.type for p in model.parameters() if p.device.type != "meta"), None)
    for kind in dict.fromkeys(filter(None, (device, "cuda", "cpu"))):
        if torch.is_autocast_enabled(kind):
            return Autocast(kind, torch.get_autocast_dtype(kind))
    return None


def skeleton(model: nn.Module) -> nn.Module:
    """A copy on the meta device, for a second capture."""
    return on_meta(copy.copy(model))[0]
