"""Who reduces which gradient: a row for each parameter, axis and use, read from a parallel graph."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from ndcompile.mesh import MeshSpec
from ndcompile.placement import REDUCING, P, Placement, R


@dataclass(frozen=True)
class Duty:
    """One use of a parameter on one axis: the gradient's placement there, and what reduces it on its way back.

    `bytes` are those of the gradient that a rank gives to the reduction, 0 where there is none.
    """

    parameter: str
    axis: str
    use: str
    cotangent: Placement
    reductions: tuple[str, ...]
    dtype: torch.dtype | None
    bytes: int = 0
    source: str | None = None

    def __str__(self) -> str:
        how = ", ".join(self.reductions) or "–"
        return f"{self.parameter}  {self.axis}  at {self.use}: gradient {self.cotangent}, {how} {self.dtype or ''}"


class Duties(list[Duty]):
    """All duties of a program; `print` shows them as a table, in which equal ones of many blocks are one row.

    >>> print(Duties([Duty("weight", "tp", "%linear", P(), ("all_reduce",), torch.float32, 64)]))
    parameter  axis  gradient  reduced by  in       bytes  uses
    weight     tp    P         all_reduce  float32     64     1
    """

    HEAD = ("parameter", "axis", "gradient", "reduced by", "in", "bytes", "uses")

    def rows(self) -> list[tuple[str, ...]]:
        """A row of texts for each that differs in more than the number of its block: `layers.*.norm.weight`."""
        names = _patterns(duty.parameter for duty in self)
        counts: dict[tuple[str, ...], int] = {}
        for duty in self:
            how, dtype = ", ".join(duty.reductions) or "–", str(duty.dtype or "–").removeprefix("torch.")
            row = (names[duty.parameter], duty.axis, str(duty.cotangent), how, dtype, f"{duty.bytes:,}")
            counts[row] = counts.get(row, 0) + 1
        return [(*row, f"{count:,}") for row, count in counts.items()]

    def __str__(self) -> str:
        table = [self.HEAD, *self.rows()]
        widths = [max(len(row[i]) for row in table) for i in range(len(self.HEAD))]
        numbers = ("bytes", "uses")
        cells = [[text.rjust(w) if head in numbers else text.ljust(w)
                  for text, w, head in zip(row, widths, self.HEAD, strict=True)] for row in table]  # fmt: skip
        return "\n".join("  ".join(row).rstrip() for row in cells)


SEVERAL = 3
"""From so many on, parameters that differ in one number are one row."""


def _patterns(names: Iterable[str]) -> dict[str, str]:
    """Each name, or what stands for it and its likes."""
    alike: dict[str, set[str]] = {}
    for name in names:
        alike.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "*", name), set()).add(name)
    return {n: pattern if len(found) >= SEVERAL else n for pattern, found in alike.items() for n in found}


def duties(graph: fx.GraphModule, mesh: MeshSpec) -> Duties:
    """Who reduces what: a row for each parameter, axis and use."""
    found = Duties()
    for parameter in graph.graph.find_nodes(op="placeholder"):
        if parameter.meta.get("role") != "parameter" or not parameter.meta["grad"]:
            continue
        for *moves, use in _ways(parameter, ()):
            found += [_duty(parameter, moves, use, axis, mesh) for axis in mesh.names]
    return found


def _duty(parameter: fx.Node, moves: list[fx.Node], use: fx.Node, axis: str, mesh: MeshSpec) -> Duty:
    on_axis = [m for m in moves if axis in m.meta["move"].axes]
    mine = [m for m in on_axis if _backward(m) in REDUCING]
    handed = any(m.meta["move"].source == R for m in on_axis)  # R→I gives the gradient to one rank alone
    last = moves[-1] if moves else parameter
    return Duty(
        parameter.meta["name"], axis, f"%{use.name}", P() if handed else last.meta["layout"].on(axis).dual,
        tuple(_backward(m) for m in mine), mine[0].meta["backward_dtype"] if mine else None,
        sum(_bytes(m, mesh) for m in mine), use.meta.get("source"),
    )  # fmt: skip


def _backward(conversion: fx.Node) -> str:
    return str(conversion.meta["move"].conversion.backward)


def _bytes(conversion: fx.Node, mesh: MeshSpec) -> int:
    """Of the gradient on a rank before it is reduced, in the dtype of the reduction."""
    layout, dtype = conversion.meta["layout"], conversion.meta["backward_dtype"]
    shards = mesh.size(*(a for axes in layout.dims for a in axes))
    width = dtype.itemsize / conversion.meta["dtype"].itemsize if dtype else 1
    return int(conversion.meta["nbytes"] * width) // shards


def _ways(node: fx.Node, path: tuple[fx.Node, ...]) -> list[tuple[fx.Node, ...]]:
    found: list[tuple[fx.Node, ...]] = []
    for user in node.users:
        found += _ways(user, (*path, user)) if "move" in user.meta else [(*path, user)]
    return found
