"""What binding must know of a program: where its parameters lie, and the manifest."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import fx, nn
from torch.utils import _pytree as pytree

from ndcompile.autocast import Autocast
from ndcompile.axes import KINDS
from ndcompile.blocks import first_names
from ndcompile.capture import Captured
from ndcompile.lengths import multiples
from ndcompile.mesh import MeshSpec
from ndcompile.pipeline import Job
from ndcompile.placement import I, Layout
from ndcompile.program import Parameter, parameter_plans
from ndcompile.rules.registry import model_results, updates
from ndcompile.runtime.manifest import Argument, InputPlan, Manifest, digest


def parameters(model: nn.Module, graph: fx.GraphModule, mesh: MeshSpec) -> dict[str, Parameter]:
    """Every parameter of the model with its layout; one that the graph does not use is kept whole."""
    stored = {
        name: n.meta["stored"]
        for n in graph.graph.find_nodes(op="placeholder")
        if n.meta["role"] == "parameter"
        for name in n.meta.get("stands_for", (n.meta["name"],))
    }
    whole = dict.fromkeys(mesh.names, I)
    return {
        name: Parameter(name, tuple(p.shape), p.dtype, stored.get(name) or Layout.make(p.dim(), whole))
        for name, p in model.named_parameters()
    }


def manifest(
    model: nn.Module,
    captured: Captured,
    job: Job,
    found: Mapping[str, Parameter],
    autocast: Autocast | None,
) -> Manifest:
    """All that binding needs, as plain data."""
    assert job.emitted is not None, "the pipeline emits"
    tensors = dict(model.named_parameters(remove_duplicate=False))
    aliases = {name: first for name, first in first_names(tensors).items() if first != name}
    placeholders = {n.meta["name"]: n for n in captured.graph.graph.find_nodes(op="placeholder")}
    inputs = [_input_plan(name, placeholders[name]) for name in captured.inputs]
    ends = job.graph.graph.output_node().meta
    return Manifest(
        mesh=str(job.mesh),
        root=job.emitted.root,
        model=type(model).__name__,
        flattened=job.emitted.flattened,
        parameters=parameter_plans(found, {n: tensors[n].requires_grad for n in found}),
        aliases=aliases,
        buffers=[name for name, _ in model.named_buffers()],
        arguments=_arguments(model),
        input_plans=inputs,
        constants=captured.constants,
        outputs=[_output(v, job.mesh) for v in model_results(job.graph)],
        updates=list(updates(job.graph)),
        assumed={name: digest(job.buffers[name]) for n in job.graph.graph.nodes for name in n.meta.get("assumes", ())},
        output_text=_spec_text(captured.output_spec),
        multiples=multiples(job.graph, job.mesh),
        conditions=captured.conditions,
        compute=None if job.precision.compute is None else str(job.precision.compute),
        reduce=None if job.precision.reduce is None else str(job.precision.reduce),
        autocast_text=None if autocast is None else str(autocast.dtype),
        training=captured.training,
        pads={n.meta["name"]: n.meta["pad"] for n in placeholders.values() if "pad" in n.meta},
        limits={symbol: list(end) for symbol, end in ends.get("limits", {}).items()},
        ends=[[[dim, *end] for dim, end in found.items()] for found in ends.get("ends", [])],
        halves=any(n.meta.get("halved") for n in job.graph.graph.nodes),
        random=bool([n for n in placeholders.values() if n.meta["role"] == "key"]),
        _spec=captured.output_spec,
    )


def _spec_text(spec: pytree.TreeSpec) -> str:
    """The structure of the results as text; empty where a class in it has no name to be written by."""
    try:
        return pytree.treespec_dumps(spec)
    except NotImplementedError:
        return ""


def _arguments(model: nn.Module) -> list[Argument]:
    found = []
    for parameter in inspect.signature(model.forward).parameters.values():
        optional = parameter.default is not inspect.Parameter.empty
        found.append(Argument(parameter.name, int(parameter.kind), optional, parameter.default if optional else None))
    return found


def _input_plan(name: str, node: fx.Node) -> InputPlan:
    dims = tuple(size if isinstance(size, int) else str(size) for size in node.meta["sizes"])
    return InputPlan(name, str(node.meta["dtype"]), dims, node.meta["grad"])


def _output(value: Any, mesh: MeshSpec) -> dict[str, list[int]]:
    """The axes other than data axes that shard a result: axis → dim and whole size (0: equal parts)."""
    if not isinstance(value, fx.Node):
        return {}
    found = {}
    for dim, axes in enumerate(value.meta["layout"].dims):
        for axis in axes:
            if not KINDS[mesh[axis].kind].shards_batch:
                size = value.meta["shape"][dim]
                even = size.divides_by(mesh.size(*axes))
                found[axis] = [dim, 0 if even else int(size.coefficient)]
    return found
