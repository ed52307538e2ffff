"""What `compile` returns: the emitted source, and all that can be asked of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ndcompile.choose import Problem
from ndcompile.codegen.emit import Emitted, Names
from ndcompile.dense import DenseMask, dense_masks
from ndcompile.duties import Duties, duties
from ndcompile.errors import CompileError
from ndcompile.explain import explain
from ndcompile.fold import unfold
from ndcompile.listing import Collective, collectives
from ndcompile.mesh import MeshSpec
from ndcompile.passes.localize_sizes import localize_sizes
from ndcompile.placement import Layout
from ndcompile.reference import Reference
from ndcompile.remat import Policy
from ndcompile.runtime.manifest import Manifest, ParameterPlan

if TYPE_CHECKING:
    from ndcompile.footprint import Memory


@dataclass(frozen=True)
class Parameter:
    """A parameter of the program: its whole shape, its dtype, and where it lies between steps."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout

    def local_shape(self, mesh: MeshSpec, rank: int = 0) -> tuple[int, ...]:
        """The shape of a rank's part, by torch.chunk's convention, axis after axis from major to minor."""
        place, shape = mesh.coordinate(rank), list(self.shape)
        for dim, axes in enumerate(self.layout.dims):
            for axis in axes:
                step = -(-shape[dim] // mesh.size(axis))
                shape[dim] = max(0, min(step, shape[dim] - place[axis] * step))
        return tuple(shape)

    def local_bytes(self, mesh: MeshSpec, rank: int = 0) -> int:
        """Bytes on a rank."""
        count = 1
        for size in self.local_shape(mesh, rank):
            count *= size
        return count * self.dtype.itemsize


@dataclass
class Program:
    """A compiled model, bound to no process: `str(program)` is the emitted source.

    `folded` is the parallel graph that was checked, in which two rounds of a run of equal blocks stand for all.
    """

    source: str
    manifest: Manifest
    mesh: MeshSpec
    folded: fx.GraphModule
    folded_reference: fx.GraphModule
    parameters: dict[str, Parameter]
    problems: Mapping[str, Problem] = field(repr=False)
    times: dict[str, float] = field(default_factory=dict)
    """Seconds of each step of the pipeline."""
    emitted: Emitted | None = field(default=None, repr=False)
    names: Names | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return self.source

    @cached_property
    def graph(self) -> fx.GraphModule:
        """The parallel graph, whole, with global sizes."""
        return unfold(self.folded)

    @cached_property
    def local_graph(self) -> fx.GraphModule:
        """The parallel graph with one rank's sizes: it runs on a rank."""
        return localize_sizes(unfold(self.folded), self.mesh)

    @cached_property
    def reference(self) -> fx.GraphModule:
        """The one-device graph that the parallel one came from."""
        return unfold(self.folded_reference)

    @property
    def layouts(self) -> dict[str, Layout]:
        """The layout of every value of `graph`, by node name."""
        return {n.name: n.meta["layout"] for n in self.graph.graph.nodes if "layout" in n.meta}

    def collectives(self) -> list[Collective]:
        """Every collective, in order of the forward: bytes are at the nominal sizes of `ndcompile.cost.NOMINAL`."""
        return collectives(self.graph, self.mesh)

    def dense_masks(self) -> list[DenseMask]:
        """The masks of attention that have no name: tensors of queries by keys."""
        return dense_masks(self.graph, self.mesh)

    def duties(self) -> Duties:
        """Who reduces what: a row for each parameter, axis and use, with the dtype and bytes; `print` shows a table."""
        return duties(self.graph, self.mesh)

    def explain(self, name: str) -> str:
        """Why a parameter or module has its placement: each alternative, and what the program would cost with it."""
        return explain(self.graph, self.problems, name)

    def memory(
        self,
        sizes: Mapping[str, int] | None = None,
        *,
        remat: Policy | None = None,
        reshard_after_forward: bool | None = None,
    ) -> Memory:
        """What a training step needs of rank 0's memory, in bytes; nothing runs, and nothing is allocated.

        `sizes` are those of the symbols, by default the nominal ones of `ndcompile.cost`: `b` of a data-parallel rank's
        batch, `s` of the whole sequence. `remat` and `reshard_after_forward` ask about another choice than the
        program's, for all blocks alike.

        >>> import ndcompile as nd
        >>> program = nd.compile(torch.nn.Linear(4, 6), "dp_shard=2", torch.randn(2, 4))
        >>> program.memory({"b": 8}).optimizer  # twice 3 × 4 and twice 3 numbers; each has at least 512 bytes
        2048
        """
        from ndcompile.footprint import memory

        return memory(self, sizes, remat=remat, reshard_after_forward=reshard_after_forward)

    def one_device(self, model: torch.nn.Module) -> Reference:
        """The reference graph as a module on one device, with the model's own parameters: what is compared against."""
        return Reference(self.reference, self.manifest, model)

    def save(self, path: str | Path) -> None:
        """Write the source to `path`, and what is needed to bind it to `path` with the suffix `.json`."""
        path = Path(path)
        if not self.manifest.output_text:
            raise CompileError(
                "the program's results are of a class that cannot be written down",
                why="loading would have to find the class again",
                tries="torch.export.register_dataclass(TheClass, serialized_type_name=…), or a dict",
            )
        path.write_text(self.source)
        path.with_suffix(".json").write_text(json.dumps(self.manifest.to_json(), indent=1))


def parameter_plans(parameters: Mapping[str, Parameter], trainable: Mapping[str, bool]) -> dict[str, ParameterPlan]:
    """The parameters as plain data."""
    return {
        name: ParameterPlan(p.shape, str(p.dtype), p.layout.dims, trainable[name]) for name, p in parameters.items()
    }


def load_manifest(path: str | Path) -> tuple[str, Manifest]:
    """What `Program.save` wrote."""
    path = Path(path)
    for file in (path, path.with_suffix(".json")):
        if not file.is_file():
            raise CompileError(f"there is no file {file}", tries="the path that program.save was given")
    data: dict[str, Any] = json.loads(path.with_suffix(".json").read_text())
    return path.read_text(), Manifest.from_json(data)
