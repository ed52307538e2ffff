"""The passes in order, each with the checks that hold after it. The runner times, dumps and checks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, fx

from ndcompile import checks
from ndcompile.choose import Problem
from ndcompile.codegen.emit import Emitted, Names, emit
from ndcompile.dense import dense_masks
from ndcompile.fold import unfold
from ndcompile.lengths import multiples
from ndcompile.mesh import MeshSpec
from ndcompile.passes.choose_attention import choose_attention
from ndcompile.passes.cut_in_halves import cut_in_halves
from ndcompile.passes.cut_linears import cut_linears
from ndcompile.passes.drop_noops import drop_noops
from ndcompile.passes.follow_device import follow_device
from ndcompile.passes.insert_collectives import insert_collectives
from ndcompile.passes.localize_sizes import localize_sizes
from ndcompile.passes.lower_draws import lower_draws
from ndcompile.passes.lower_losses import lower_losses
from ndcompile.passes.lower_recurrent import lower_recurrent
from ndcompile.passes.mark_blocks import mark_blocks
from ndcompile.passes.mark_recomputed import mark_recomputed
from ndcompile.passes.measure_values import measure_values
from ndcompile.passes.pad_inputs import pad_inputs
from ndcompile.passes.propagate_layouts import propagate_layouts
from ndcompile.passes.recognise_experts import recognise_experts
from ndcompile.passes.recognise_masks import recognise_masks
from ndcompile.passes.replace_random import replace_random
from ndcompile.passes.share_keys import share_keys
from ndcompile.passes.share_sequences import share_sequences
from ndcompile.passes.split_axes import split_axes
from ndcompile.pins import Pins
from ndcompile.precision import Precision
from ndcompile.remat import Kept
from ndcompile.rules.registry import signature

Check = Callable[[fx.GraphModule, MeshSpec], None]


@dataclass
class Job:
    """What the steps of one compilation share."""

    graph: fx.GraphModule
    mesh: MeshSpec
    precision: Precision
    pins: Pins
    pinned_names: dict[str, str]
    lists: frozenset[str]
    names: Names
    title: str
    conditions: Sequence[str] = ()
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    local_outputs: bool = False
    all_pins_match: bool = True
    cp_attention: str | None = None
    pad_inputs: bool = False
    halves: bool = False
    kept: Kept = field(default_factory=lambda: Kept({}))
    reference: fx.GraphModule | None = None
    emitted: Emitted | None = None
    problems: dict[str, Problem] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """One pass, and what holds after it."""

    name: str
    run: Callable[[Job], Any]
    ensures: tuple[Check, ...] = ()


def _propagate(job: Job) -> None:
    job.problems = propagate_layouts(job.graph, job.mesh, job.pins, job.local_outputs, job.all_pins_match)


def _by_rules(check: Callable[..., None]) -> Check:
    """A check that asks the rules what an op may take."""

    @wraps(check)
    def asked(graph: fx.GraphModule, mesh: MeshSpec) -> None:
        check(graph, mesh, signature)

    return asked


def _pad_inputs(job: Job) -> None:
    if job.pad_inputs:
        pad_inputs(job.graph, frozenset(multiples(job.graph, job.mesh)))


def _cut_in_halves(job: Job) -> None:
    if job.halves:
        cut_in_halves(job.graph, job.mesh, required=job.all_pins_match)


def _split_axes(job: Job) -> None:
    job.mesh = split_axes(job.graph, job.mesh)


def _emit(job: Job) -> None:
    title = [f"{job.title} on {job.mesh}: emitted by ndcompile."]
    title += [f"It holds while {', '.join(job.conditions)}."] if job.conditions else []
    title += map(str, dense_masks(job.graph, job.mesh))
    whole = job.graph.graph.output_node().meta.get("whole", {})
    title += [f"{blocks}: not computed in halves, since {why}" for blocks, why in whole.items()]
    job.emitted = emit(job.graph, job.mesh, job.names, "\n\n".join(title))


def _keep_reference(job: Job) -> None:
    job.reference = copied(job.graph)


def copied(graph: fx.GraphModule) -> fx.GraphModule:
    """A graph of its own with the same nodes and what is known of them."""
    new, nodes = fx.Graph(), dict[fx.Node, fx.Node]()
    output = new.graph_copy(graph.graph, nodes)
    new.output(output).meta = dict(graph.graph.output_node().meta)
    for node, twin in nodes.items():
        twin.meta = dict(node.meta)
        twin.name = node.name  # fx would give an `input` another one, as it does whatever is a name of Python's own
    return fx.GraphModule(graph, new)


PIPELINE: tuple[Step, ...] = (
    Step("drop_noops", lambda job: drop_noops(job.graph), (checks.no_noops,)),
    Step("recognise_masks", lambda job: recognise_masks(job.graph, job.buffers)),
    Step("share_keys", lambda job: share_keys(job.graph, job.mesh, job.precision.compute)),
    Step("share_sequences", lambda job: share_sequences(job.graph, job.mesh)),
    Step("recognise_experts", lambda job: recognise_experts(job.graph)),
    Step("lower_recurrent", lambda job: lower_recurrent(job.graph)),
    Step("lower_draws", lambda job: lower_draws(job.graph)),
    Step("lower_losses", lambda job: lower_losses(job.graph)),
    Step("follow_device", lambda job: follow_device(job.graph), (checks.no_fixed_device,)),
    Step("mark_blocks", lambda job: mark_blocks(job.graph, job.lists, job.pinned_names), (checks.rounds_are_equal,)),
    Step("replace_random", lambda job: replace_random(job.graph), (checks.no_hidden_randomness,)),
    Step("keep_reference", _keep_reference),
    Step("cut_linears", lambda job: cut_linears(job.graph, job.mesh, job.pins)),
    Step("measure_values", lambda job: measure_values(job.graph, job.mesh)),
    Step("split_axes", _split_axes),
    Step("propagate_layouts", _propagate, (checks.every_value_placed, checks.parameters_lie_where_they_are_used)),
    Step("pad_inputs", _pad_inputs),
    Step(
        "insert_collectives",
        lambda job: insert_collectives(job.graph, job.mesh, job.precision),
        (
            checks.no_implicit_communication,
            checks.conversions_are_rows,
            checks.reductions_state_their_dtype,
            checks.reduced_exactly_once,
            checks.same_collectives_on_every_rank,
            checks.waited_before_use,
            _by_rules(checks.ops_are_legal),
        ),
    ),
    Step("choose_attention", lambda job: choose_attention(job.graph, job.mesh, job.cp_attention)),
    Step("cut_in_halves", _cut_in_halves, (_by_rules(checks.halves_are_apart),)),
    Step("mark_recomputed", lambda job: mark_recomputed(job.graph, job.kept)),
    Step("codegen", _emit),
)


def run(job: Job, dump: Path | None = None) -> Job:
    """Run every step; raise where a check does not hold; write each step's output to `dump` as Python.

    The graphs that are written are whole, and the last one, by `localize_sizes`, is what a rank runs.
    """
    if dump is not None:
        dump.mkdir(parents=True, exist_ok=True)
        _write_graph(dump / "00_capture.py", "capture", job.times.get("capture", 0.0), unfold(job.graph), job.mesh)
    for number, step in enumerate(PIPELINE, 1):
        begin = time.perf_counter()
        step.run(job)
        job.times[step.name] = time.perf_counter() - begin
        begin = time.perf_counter()
        for check in step.ensures:
            check(job.graph, job.mesh)
        job.times["checks"] = job.times.get("checks", 0.0) + time.perf_counter() - begin
        if dump is not None:
            _dump(dump / f"{number:02}_{step.name}.py", step, job)
    if dump is not None:
        begin = time.perf_counter()
        local = localize_sizes(unfold(job.graph), job.mesh)
        path = dump / f"{len(PIPELINE) + 1:02}_localize_sizes.py"
        _write_graph(path, "localize_sizes", time.perf_counter() - begin, local, job.mesh)
    return job


def _dump(path: Path, step: Step, job: Job) -> None:
    seconds = job.times[step.name]
    if step.run is _emit and job.emitted is not None:
        path.write_text(f"# {step.name}, which took {seconds * 1e3:.1f} ms\n{job.emitted.source}")
    else:
        _write_graph(path, step.name, seconds, unfold(job.graph), job.mesh)


def _write_graph(path: Path, name: str, seconds: float, graph: fx.GraphModule, mesh: MeshSpec) -> None:
    path.write_text(graph_text(name, seconds, graph, mesh))


def graph_text(name: str, seconds: float, graph: fx.GraphModule, mesh: MeshSpec) -> str:
    """One graph as Python, headed by the pass that made it and its time: `forward` takes its placeholders.

    Up to `propagate_layouts` it runs on one device, after `localize_sizes` on each rank of the mesh.
    """
    code = graph.graph.python_code("self", verbose=False)
    layouts = [f"# {n.name:<40} {n.meta['layout']}" for n in graph.graph.nodes if n.meta.get("layout") is not None]
    head = [f'"""The graph after {name}, which took {seconds * 1e3:.1f} ms."""']
    head += ["import torch", "from torch import device"]
    head += ["from ndcompile.runtime import current", f'MESH = current("{mesh}")']
    head += [f"{key} = {_import_text(value)}" for key, value in code.globals.items() if key not in ("torch", "device")]
    return "\n".join([*head, code.src, *(["# layouts", *layouts] if layouts else [])]) + "\n"


def _import_text(value: Any) -> str:
    if isinstance(value, ModuleType):
        return f"__import__({value.__name__!r}, fromlist=['*'])"
    if isinstance(value, float):
        return f"float({str(value)!r})"
    if value is type(None):
        return "type(None)"
    if isinstance(value, torch._ops.OpOverload):
        return f"torch.ops.{value}"
    module, name = getattr(value, "__module__", None), getattr(value, "__name__", None)
    if module and name:
        return f"__import__({module!r}, fromlist=[{name!r}]).{name}"
    return repr(value)
