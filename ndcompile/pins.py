"""Pins: placements that the user fixes, by the name of a parameter or module, or by wildcard."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Mapping
from typing import Any

from torch import fx, nn

from ndcompile.errors import CompileError
from ndcompile.mesh import GATHERED, MeshSpec, kind_of
from ndcompile.mesh import KINDS as AXIS_KINDS
from ndcompile.placement import Layout, Placement, R, S

Pins = Mapping[str, Mapping[str, Placement]]
"""For a parameter or module by name (or wildcard): a placement on an axis."""


def read_pins(placements: Mapping[str, Mapping[str, Any]] | None, mesh: MeshSpec) -> dict[str, dict[str, Placement]]:
    """The user's pins with our placements for torch's, and known axes only."""
    found: dict[str, dict[str, Placement]] = {}
    for pattern, by_axis in (placements or {}).items():
        if not isinstance(by_axis, Mapping):
            raise CompileError(
                f"the pin '{pattern}' is {by_axis!r}, which names no axis", tries=f'{{"{pattern}": {{"tp": nd.S(0)}}}}'
            )
        for axis, given in by_axis.items():
            if kind_of(axis) not in AXIS_KINDS:
                raise CompileError(
                    f"the pin '{pattern}' names axis '{axis}', which no mesh has", tries=", ".join(mesh.names) or "tp"
                )
            if mesh.size(kind_of(axis)) == 1:
                continue
            if kind_of(axis) in GATHERED:
                raise CompileError(
                    f"the pin '{pattern}' is on axis '{axis}'",
                    why="data axes and cp are forced: inputs are sharded, parameters whole where they are used",
                    tries="a pin on tp",
                )
            found.setdefault(pattern, {})[axis] = _placement(pattern, given)
    return found


def _placement(pattern: str, given: Any) -> Placement:
    if isinstance(given, Placement):
        return given
    kind = type(given).__name__
    if kind == "Shard":
        return S(int(given.dim))
    if kind == "Replicate":
        return R
    raise CompileError(f"the pin '{pattern}' has {given!r} for a placement", tries=("nd.S(0)", "nd.R"))


def pinned_names(model: nn.Module, given: Mapping[str, Mapping[str, Placement]]) -> dict[str, str]:
    """Each parameter or module that a pin matches, with the pin's text."""
    if not given:
        return {}
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    names += [name for name, _ in model.named_modules()]
    return {name: str(pin) for pattern, pin in given.items() for name in fnmatch.filter(names, pattern)}


def placements_of(name: str, pins: Pins) -> set[Placement]:
    """What a name is pinned to, on any axis."""
    return {p for pattern, by_axis in pins.items() if fnmatch.fnmatch(name, pattern) for p in by_axis.values()}


def for_other_mode(pins: Pins, layouts: Mapping[str, Layout]) -> dict[str, dict[str, Placement]]:
    """The pins for the program of the other mode: parameters lie as they do, modules are as the user pinned them."""
    held = {name: _as_pin(layout) for name, layout in layouts.items()}
    return {pattern: {**pins.get(pattern, {}), **held.get(pattern, {})} for pattern in [*held, *pins]}


def _as_pin(layout: Layout) -> dict[str, Placement]:
    """A parameter's layout as pins on the axes where there is a choice."""
    return {a: layout.on(a) for a in layout.axes if kind_of(a) not in GATHERED}


def resolve_pins(
    graph: fx.GraphModule, mesh: MeshSpec, pins: Pins, all_match: bool
) -> dict[str, dict[fx.Node, Placement]]:
    """Each pin's nodes by axis: a parameter, or the last value that a module computes.

    With `all_match`, a pin without any is an error; else its module computes nothing in this mode (dropout in eval).
    """
    nodes = [n for n in graph.graph.nodes if "shape" in n.meta]
    names: dict[str, fx.Node] = {n.meta["module"]: n for n in nodes if n.op == "call_function" and n.meta["module"]}
    names |= {n.meta["name"]: n for n in nodes if n.meta.get("role") == "parameter"}
    found: dict[str, dict[fx.Node, Placement]] = {}
    for pattern, placements in pins.items():
        matches = fnmatch.filter(names, pattern)
        if not matches and all_match:
            raise CompileError(
                f"the pin '{pattern}' matches no parameter and no module",
                tries=tuple(_close(pattern, names)) or "a name from model.named_parameters()",
            )
        parts = [(part, p) for axis, p in placements.items() for part in _parts(pattern, axis, mesh)]
        for axis, placement in parts:
            for name in matches:
                earlier = found.setdefault(axis, {}).setdefault(names[name], placement)
                if earlier != placement and not (earlier.whole and placement.whole):
                    raise CompileError(
                        f"pins contradict each other: '{name}' is {earlier} and {placement} on axis '{axis}'",
                        why=f"the last of the pins that match it is '{pattern}'",
                        tries="one pin for it, or narrower wildcards",
                    )
    return found


def _parts(pattern: str, axis: str, mesh: MeshSpec) -> list[str]:
    """The axis that a pin names, or the parts that it is cut into; a part of an axis that is whole is none."""
    found = [name for name in mesh.names if name == axis or name.startswith(axis + ".")]
    if not found:
        raise CompileError(
            f"the pin '{pattern}' is on '{axis}', but axis '{axis.partition('.')[0]}' is not cut so",
            why=f"the mesh is {mesh}",
            tries=f"a pin on {axis.partition('.')[0]}",
        )
    return found


def _close(pattern: str, names: Mapping[str, Any]) -> list[str]:
    return [f"'{name}'" for name in difflib.get_close_matches(pattern, names, n=2)]
