"""What `compile` returns: the emitted source, and all that can be asked of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ndcompile.errors import CompileError
from ndcompile.mesh import MeshSpec
from ndcompile.placement import Layout
from ndcompile.remat import Policy
from ndcompile.runtime.manifest import Manifest, ParameterPlan

if TYPE_CHECKING:  # a program that was kept is bound without the compiler: what is asked of it loads then
    from ndcompile.choose import Problem
    from ndcompile.codegen.emit import Emitted, Names
    from ndcompile.dense import DenseMask
    from ndcompile.duties import Duties
    from ndcompile.footprint import Memory
    from ndcompile.listing import Collective
    from ndcompile.reference import Reference


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


@dataclass(frozen=True)
class Made:
    """What a compilation leaves beside the text: the graphs, what was chosen from, and the emitter's own tables.

    `folded` is the parallel graph that was checked, in which two rounds of a run of equal blocks stand for all.
    """

    folded: fx.GraphModule
    folded_reference: fx.GraphModule
    problems: Mapping[str, Problem]
    emitted: Emitted
    names: Names


@dataclass
class Program:
    """A compiled model, bound to no process: `str(program)` is the emitted source.

    One that was kept is made again where its graphs are asked for.
    """

    source: str
    manifest: Manifest
    mesh: MeshSpec
    parameters: dict[str, Parameter]
    _made: Made | Callable[[], Made] = field(repr=False)
    times: dict[str, float] = field(default_factory=dict)
    """Seconds of each step of the pipeline."""

    @property
    def made(self) -> Made:
        """The graphs, and what else a compilation leaves; they are not kept, so this may compile again."""
        if not isinstance(self._made, Made):
            self._made = self._made()
        return self._made

    @property
    def folded(self) -> fx.GraphModule:
        """The parallel graph that was checked, in which two rounds of a run of equal blocks stand for all."""
        return self.made.folded

    @property
    def folded_reference(self) -> fx.GraphModule:
        """The one-device graph that the parallel one came from, folded in the same way."""
        return self.made.folded_reference

    def __str__(self) -> str:
        return self.source

    @cached_property
    def graph(self) -> fx.GraphModule:
        """The parallel graph, whole, with global sizes."""
        from ndcompile.fold import unfold

        return unfold(self.folded)

    @cached_property
    def local_graph(self) -> fx.GraphModule:
        """The parallel graph with one rank's sizes: it runs on a rank."""
        from ndcompile.fold import unfold
        from ndcompile.passes.localize_sizes import localize_sizes

        return localize_sizes(unfold(self.folded), self.mesh)

    @cached_property
    def reference(self) -> fx.GraphModule:
        """The one-device graph that the parallel one came from."""
        from ndcompile.fold import unfold

        return unfold(self.folded_reference)

    @property
    def layouts(self) -> dict[str, Layout]:
        """The layout of every value of `graph`, by node name."""
        return {n.name: n.meta["layout"] for n in self.graph.graph.nodes if "layout" in n.meta}

    def collectives(self) -> list[Collective]:
        """Every collective, in order of the forward: bytes are at the nominal sizes of `ndcompile.cost.NOMINAL`."""
        from ndcompile.listing import collectives

        return collectives(self.graph, self.mesh)

    def dense_masks(self) -> list[DenseMask]:
        """The masks of attention that have no name: tensors of queries by keys."""
        from ndcompile.dense import dense_masks

        return dense_masks(self.graph, self.mesh)

    def duties(self) -> Duties:
        """Who reduces what: a row for each parameter, axis and use, with the dtype and bytes; `print` shows a table."""
        from ndcompile.duties import duties

        return duties(self.graph, self.mesh)

    def explain(self, name: str) -> str:
        """Why a parameter or module has its placement: each alternative, and what the program would cost with it."""
        from ndcompile.explain import explain

        return explain(self.graph, self.made.problems, name)

    def memory(
        self,
        sizes: Mapping[str, int] | None = None,
        *,
        remat: Policy | None = None,
        reshard_after_forward: bool | None = None,
        transport: str = "nccl",
    ) -> Memory:
        """What a training step needs of rank 0's memory, in bytes; nothing runs, and nothing is allocated.

        `sizes` are those of the symbols, by default the nominal ones of `ndcompile.cost`: `b` of a data-parallel rank's
        batch, `s` of the whole sequence. `remat` and `reshard_after_forward` ask about another choice than the
        program's, for all blocks alike; `transport` is `parallelize`'s, of which "symmetric" takes memory of its own.

        >>> import ndcompile as nd
        >>> program = nd.compile(torch.nn.Linear(4, 6), "dp_shard=2", torch.randn(2, 4))
        >>> program.memory({"b": 8}).optimizer  # twice 3 × 4 and twice 3 numbers; each has at least 512 bytes
        2048
        """
        from ndcompile.footprint import memory

        return memory(
            self, sizes, remat=remat, reshard_after_forward=reshard_after_forward, transport=transport
        )  # fmt: skip

    def one_device(self, model: torch.nn.Module) -> Reference:
        """The reference graph as a module on one device, with the model's own parameters: what is compared against."""
        from ndcompile.reference import Reference

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
