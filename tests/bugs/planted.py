"""A reported bug, planted: the program of a small model, what the types say of its graph, what sees it in its text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ndcompile as nd
from ndcompile import runtime
from ndcompile.errors import CheckError
from ndcompile.verify.graph_mutants import check_types, graph_mutants
from ndcompile.verify.mutants import Mutant
from ndcompile.verify.report import Report
from ndcompile.verify.score import Judge


@dataclass(frozen=True)
class Situation:
    """A model that has the situation of a report, compiled in float64 mode."""

    program: nd.Program
    judge: Judge

    def assert_equal(self) -> None:
        """The program as it is computes what one device computes."""
        assert [claim.held for claim in self.report.claims] == [True] * 4, self.report

    @cached_property
    def report(self) -> Report:
        return nd.verify(self.program, self.judge.model, seeds=1, microbatches=1)

    def types_say(self, change: str, at: str) -> str:
        """The complaint of the types where the conversion at a place of the graph is changed."""
        found = [m for m in graph_mutants(self.program) if m.operator.endswith(change) and at in m.place]
        assert found, [str(m) for m in graph_mutants(self.program)]
        with pytest.raises(CheckError) as caught:
            check_types(found[0].graph, self.program.mesh)
        return str(caught.value)

    def way(self, parameter: str) -> str:
        """The name of the conversion I→R on a parameter's way to its use."""
        nodes = self.program.folded.graph.nodes
        own = [n for n in nodes if n.meta.get("parameter") == parameter and n.target is runtime.replicate]
        return f"%{own[0].name} "

    def line(self, start: str) -> str:
        """The one line of the text that starts so, without its comment."""
        lines = [line.partition("  #")[0].strip() for line in str(self.program).splitlines()]
        found = [line for line in lines if line.startswith(start)]
        assert len(found) == 1, f"{found} start with {start!r} in\n{self.program}"
        return found[0]

    def seen_by(self, right: str, wrong: str) -> str:
        """What sees the text with one piece replaced: `field`, `float64`, `collectives`, …"""
        text = str(self.program)
        assert text.count(right) == 1, f"{right!r} stands {text.count(right)} times in\n{text}"
        imports = "import torch; from ndcompile import runtime; from ndcompile.verify import wrong\n"
        text = text.replace(right, wrong).replace("import torch\n", imports, 1)
        return self.judge(Mutant("", 0, right, wrong, text))


@cache
def situation(
    model: Callable[[], nn.Module], inputs: Callable[[], dict[str, Tensor]], mesh: str, **options: Any
) -> Situation:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    made = model()
    pins = {name: {"tp": placement} for name, placement in options.pop("pins", ())}
    program = nd.compile(made, mesh, inputs(), float64=True, placements=pins, **options)
    return Situation(program, Judge(program, made))
