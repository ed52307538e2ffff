"""How far a mesh run is from the run on one device."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ndcompile.demo.train import Record, Settings

FLOOR = 1e-6
"""Of the global norm: a gradient below it is zero but for rounding."""


@dataclass(frozen=True)
class Distance:
    """The largest distance of any gradient at one step, and the gradients that are zero but for rounding."""

    step: int
    largest: float
    name: str
    zero: tuple[str, ...]


def gradient_distance(step: int, mesh: dict[str, Tensor], one: dict[str, Tensor], float64: bool) -> Distance:
    """The largest ‖a − b‖ / max(‖b‖, 1e-6 · G), where G is the norm of all gradients on one device.

    A gradient that is zero by mathematics (a key's bias: softmax does not see it) is pure rounding. In float64 it is
    measured like all others, with 1e-6 · G for its norm; in lower precision it is listed instead.
    """
    if missing := one.keys() ^ mesh.keys():
        return Distance(step, float("inf"), f"only one of the runs has {sorted(missing)}", ())
    norms = {name: float(gradient.double().norm()) for name, gradient in one.items()}
    floor = FLOOR * sum(norm**2 for norm in norms.values()) ** 0.5
    zero = tuple(name for name, norm in norms.items() if norm <= floor)
    distances = {
        name: float((mesh[name].double() - one[name].double()).norm()) / max(norms[name], floor)
        for name in one
        if float64 or name not in zero
    }
    name = max(distances, key=lambda name: _infinite_if_nan(distances[name]))
    return Distance(step, distances[name], name, zero)


def distances(settings: Settings, mesh: Record, one: Record) -> list[Distance]:
    """One for each step whose gradients both runs kept."""
    return [
        gradient_distance(step, mesh.gradients[step], one.gradients[step], settings.float64) for step in one.gradients
    ]


def bar(settings: Settings) -> float | None:
    """What the distance must not exceed: 1e-10 in float64, 1e-5 in float32, none for bf16."""
    if settings.float64:
        return 1e-10
    return 1e-5 if settings.precision == "float32" else None


def judged(settings: Settings, found: list[Distance]) -> list[Distance]:
    """In float64 all steps; otherwise the first, since later ones start from weights that rounding has moved apart."""
    return found if settings.float64 else found[:1]


def holds(settings: Settings, found: list[Distance]) -> bool:
    """Whether every judged distance is within the bar (NaN is not)."""
    limit = bar(settings)
    return limit is None or all(distance.largest <= limit for distance in judged(settings, found))


def _infinite_if_nan(value: float) -> float:
    return value if value == value else float("inf")
