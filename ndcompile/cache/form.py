"""A compiled program as plain text, and back: what binding needs, without the graphs that it was made of."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ndcompile.mesh import Axis, MeshSpec
from ndcompile.placement import Layout, Placement
from ndcompile.program import Parameter, Program
from ndcompile.runtime.manifest import Manifest, as_dtype

WHY_NOT = "its results are of a class without a name to be written by, or a default of forward is no plain value"


@dataclass(frozen=True)
class Kept:
    """What is kept of a program."""

    source: str
    manifest: Manifest
    mesh: MeshSpec
    parameters: dict[str, Parameter]


def written(program: Program) -> str | None:
    """The program as JSON; None where it holds what JSON cannot, see `WHY_NOT`."""
    if not program.manifest.output_text:
        return None
    data = dict(
        source=program.source,
        manifest=program.manifest.to_json(),
        mesh=[(axis.name, axis.size) for axis in program.mesh.axes],
        layouts={name: _layout(p.layout) for name, p in program.parameters.items()},
    )
    try:
        text = json.dumps(data)
    except TypeError:
        return None
    return text if _same(read(text), program) else None


def read(text: str) -> Kept:
    """What `written` wrote."""
    data: dict[str, Any] = json.loads(text)
    manifest = Manifest.from_json(data["manifest"])
    parameters = {}
    for name, plan in manifest.parameters.items():
        dtype = as_dtype(plan.dtype)
        assert dtype is not None, "a parameter has a dtype"
        parameters[name] = Parameter(name, plan.shape, dtype, _read_layout(data["layouts"][name]))
    return Kept(data["source"], manifest, MeshSpec(tuple(Axis(*axis) for axis in data["mesh"])), parameters)


def _same(kept: Kept, program: Program) -> bool:
    """Whether what was read is what was written: JSON makes lists of tuples and texts of keys."""
    manifest = kept.manifest.to_json() == program.manifest.to_json()
    results = kept.manifest.output_spec == program.manifest.output_spec
    return manifest and results and kept.mesh == program.mesh and kept.parameters == program.parameters


def _layout(layout: Layout) -> dict[str, Any]:
    rest = [(axis, p.kind, p.dim, p.op, p.within) for axis, p in layout.rest]
    return dict(dims=layout.dims, rest=rest, within=layout.within)


def _read_layout(data: dict[str, Any]) -> Layout:
    return Layout(
        tuple(map(tuple, data["dims"])),
        tuple((axis, Placement(*placement)) for axis, *placement in data["rest"]),
        tuple((axis, size) for axis, size in data["within"]),
    )
