"""The symbolic sizes of a model's inputs in a function's text: which it names, and which dim it takes each from."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from ndcompile.codegen.segments import Segment
from ndcompile.codegen.sizes import axis_name
from ndcompile.mesh import MeshSpec


class Symbols:
    """`b`, `s` and other sizes, in the order of the inputs."""

    def __init__(self, graph: fx.GraphModule, mesh: MeshSpec) -> None:
        self._mesh = mesh
        self.inputs = [n for n in graph.graph.find_nodes(op="placeholder") if n.meta["role"] == "input"]
        sizes = (size for node in self.inputs for size in node.meta["shape"])
        self.names = list(dict.fromkeys(name for size in sizes for name in size.symbols))

    def wanted(self, body: Sequence[str]) -> list[str]:
        """Those that a body names."""
        code = "\n".join(line.split("  # ")[0] for line in body)
        return [symbol for symbol in self.names if re.search(rf"(?<![\w.]){symbol}(?![\w(])", code)]

    def measure(self, values: Sequence[fx.Node], names: Mapping[fx.Node, str], symbol: str) -> str:
        """From a value's dim of that size, or of a multiple of it: this rank's batch, and whole sequences."""
        times, value, dim = min(ways(values, symbol), key=lambda way: way[0])
        axes = value.meta["layout"].dims[dim]
        data = [a.name for a in self._mesh.axes if a.kind.startswith("dp_")]
        text, less = f"{names[value]}.shape[{dim}]", [str(times)] if times > 1 else []
        if symbol == "b":
            less += [f"{axis_name((a,))}.size" for a in data if a not in axes]
            return " // ".join([text, *less])
        return " // ".join([" * ".join([text, *(f"{axis_name((a,))}.size" for a in axes)]), *less])

    def lend(self, symbol: str, part: Segment, segments: Sequence[Segment]) -> None:
        """A size that no input has, as `s` where all have `s // 2`: all of this text take an input of the model too."""
        lender = next((node for node in self.inputs if ways([node], symbol)), None)
        assert lender is not None, f"segment {part.number} needs the size {symbol}, which no input of the model has"
        owner = next(s for s in segments if any(own is part for own in s.parts))
        at = next(i for i, own in enumerate(owner.parts) if own is part)
        for other in (s for s in segments if s.text == owner.text):
            for taker in (other, other.parts[at]):
                if lender not in taker.inputs:
                    taker.inputs.append(lender)


def ways(values: Sequence[fx.Node], symbol: str) -> list[tuple[int, fx.Node, int]]:
    """The dims whose size is a multiple of a symbol: how often, of which value, which dim."""
    dims = ((value, dim, size) for value in values for dim, size in enumerate(value.meta["sizes"]))
    return [(times, value, dim) for value, dim, size in dims if (times := _times(size, symbol))]


def _times(size: Any, symbol: str) -> int:
    """How often a size is a symbol; 0 if it is no multiple of it."""
    if isinstance(size, int) or [str(s) for s in size.free_symbols] != [symbol]:
        return 0
    rest = size / next(iter(size.free_symbols))
    return int(rest) if rest.is_Integer else 0
