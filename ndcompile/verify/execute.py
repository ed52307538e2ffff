"""The emitted text on all ranks, and the reference graph on one device: two optimizer steps of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from ndcompile.axes import data_axes
from ndcompile.bind import code_of, execute
from ndcompile.fold import unfold
from ndcompile.mesh import MeshSpec
from ndcompile.placement import Layout
from ndcompile.program import Program
from ndcompile.reference import walk
from ndcompile.rules.registry import results, updates
from ndcompile.runtime import Mesh, Root, private
from ndcompile.runtime.manifest import ParameterPlan
from ndcompile.runtime.transport import Transport
from ndcompile.verify import rings
from ndcompile.verify.domain import Domain
from ndcompile.verify.lockstep import mesh_of, run_one, run_ranks
from ndcompile.verify.numbered import Numbered
from ndcompile.verify.places import norm, part
from ndcompile.verify.round_trip import difference
from ndcompile.verify.sample import Sample, size_at
from ndcompile.verify.shrink import Small, shortened

STEPS = 2
CLIP = 0.1
LEARNING_RATE = 1e-2

_CODE = lru_cache(maxsize=2)(code_of)
"""One process runs a text for all ranks, and nothing compiles it: it is read once."""


@dataclass
class Step:
    """What one optimizer step shows: results of each microbatch, gradients, their norm, and the parameters after."""

    results: list[list[Any]] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    norm: Tensor = field(default_factory=lambda: torch.zeros(()))
    parameters: dict[str, Tensor] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """All that holds floating numbers, by the names that differences are told with."""
        results = {result(n, i): y for n, found in enumerate(self.results) for i, y in enumerate(found)}
        gradients = {f"gradient of {name}": g for name, g in self.gradients.items()}
        parameters = {f"{name} after it": p for name, p in self.parameters.items()}
        found = {**results, **gradients, "gradient norm": self.norm, **parameters}
        return {what: x for what, x in found.items() if isinstance(x, Tensor) and x.is_floating_point()}

    @cached_property
    def norms(self) -> dict[str, float]:
        """Of `tensors`, once the step is over."""
        return {what: norm(x) for what, x in self.tensors().items()}


def result(microbatch: int, number: int) -> str:
    return f"result {number} of microbatch {microbatch}"


Forward = Callable[[Sequence[Tensor]], Sequence[Any]]
Backward = Callable[[Sequence[Any], int], None]
Norm = Callable[[Mapping[str, Tensor]], Tensor]


def on_one_device(program: Program, sample: Sample, domain: Domain) -> list[Step]:
    """The reference graph; draws the cotangents of its results into the sample."""

    def made(leaves: dict[str, Tensor], own: Sample) -> Forward:
        if isinstance(program, Small):
            return alone(program, leaves, own)

        def forward(inputs: Sequence[Tensor]) -> Sequence[Any]:
            given = dict(zip(own.inputs, inputs, strict=True))
            found = walk(
                program.reference, lambda node: _as_compiled(own.placeholder(node, leaves, given), node, domain)
            )
            names = program.manifest.updates
            own.buffers.update(zip(names, found[len(found) - len(names) :], strict=True))
            return found

        return forward

    return trained_alone(program, sample, domain, made)


def trained_alone(
    program: Program, sample: Sample, domain: Domain, made: Callable[[dict[str, Tensor], Sample], Forward]
) -> list[Step]:
    """The steps on one device of the forward that is made of parameters and of a sample with buffers of its own."""

    def run() -> list[Step]:
        leaves, own = sample.leaves(lambda name, whole: whole), sample.with_own_buffers()
        scales = [1 / n for n in cotangent_scales(program)]

        def backward(found: Sequence[Any], number: int) -> None:
            cotangents = sample.cotangents(found, number, domain)
            pairs = [(y, g * s) for y, g, s in zip(found, cotangents, scales, strict=True) if g is not None]
            _backward(pairs)

        return _train(leaves, made(leaves, own), backward, sample, _norm, domain)

    with sdpa_kernel(SDPBackend.MATH):
        return run_one(domain, run)


def _as_compiled(value: Tensor, node: fx.Node, domain: Domain) -> Tensor:
    """A parameter in the dtype that the program casts it to, where dtypes count."""
    cast = not domain.widens and node.meta["role"] == "parameter"
    return value.to(node.meta["dtype"]) if cast else value


Look = Callable[[int, int, Sequence[Any]], None]
"""Is shown a rank, a microbatch's number and what the rank's first step gives for it, before anything goes back."""


def on_ranks(
    program: Program, sample: Sample, domain: Domain, source: str | None = None, look: Look | None = None,
    numbered: Numbered | None = None,
) -> list[list[Step]]:  # fmt: skip
    """The emitted text (or another one) on every rank of the program's mesh."""

    def own(rank: int) -> list[Step]:
        return on_rank(program, sample, domain, rank, source=source, look=look)

    with sdpa_kernel(SDPBackend.MATH):
        return run_ranks(program.mesh, domain, own, numbered)


def on_rank(
    program: Program, sample: Sample, domain: Domain, rank: int, source: str | None = None, look: Look | None = None,
    transport: Transport | None = None,
) -> list[Step]:  # fmt: skip
    """The emitted text as one rank runs it; a group is named by its axes. Whoever calls this does the ops."""
    mesh, layouts = program.mesh, result_layouts(program)
    leaves = sample.leaves(lambda name, whole: part(whole, program.manifest.parameters[name].dims, mesh, rank))
    own = sample.with_own_buffers()
    root = emitted(program, source, rank, leaves, own, domain, transport)

    def forward(inputs: Sequence[Tensor]) -> Sequence[Any]:
        return forward_of(root, program, own, inputs, rank)

    first_step = set(range(len(sample.batches)))

    def backward(found: Sequence[Any], number: int) -> None:
        if look is not None and number in first_step:
            first_step.remove(number)
            with private.undispatched():
                look(rank, number, found)
        wholes = sample.drawn[number]
        pairs = [
            (y, part(g, layout.dims, mesh, rank))
            for y, g, layout in zip(found, wholes, layouts, strict=True)
            if g is not None and layout is not None
        ]
        _backward(pairs)

    return _train(leaves, forward, backward, sample, lambda grads: _sharded_norm(grads, program, rank), domain)


def emitted(
    program: Program, source: str | None, rank: int, leaves: Mapping[str, Tensor], sample: Sample, domain: Domain,
    transport: Transport | None = None,
) -> Root:  # fmt: skip
    """The text's root on a rank; in an exact arithmetic with each ring as one attention."""
    without: frozenset[str] = frozenset()
    if isinstance(program, Small):
        source, without = program.renumbered(source) if source else None, program.without
    mesh = mesh_of(program.mesh, rank)
    text = source or str(program)
    text = rings.as_one(text) if domain.exact else text
    return execute(text, program.manifest, mesh, leaves, sample.buffers, without, transport, _CODE)


def _alone(program: Program, leaves: Mapping[str, Tensor], sample: Sample) -> Root | None:
    """At small sizes the text for one device, since the numbers in the reference graph are the large ones."""
    if not isinstance(program, Small):
        return None
    plans, compute = program.manifest.parameters, program.manifest.compute
    return _one_rank(program.one_rank, program, plans, leaves, sample.buffers, program.without, compute)


def _one_rank(
    text: str,
    program: Program,
    plans: Mapping[str, ParameterPlan],
    leaves: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    without: frozenset[str],
    compute: str | None = None,
) -> Root:
    """The root of a text for one device, in the dtypes of its parameters unless they are cast to `compute`."""
    whole = {n: replace(p, dims=((),) * len(p.shape)) for n, p in plans.items()}
    manifest = replace(program.manifest, mesh="one rank", parameters=whole, compute=compute, reduce=None)
    return execute(text, manifest, Mesh(MeshSpec(())), leaves, buffers, without, code=_CODE)


def _without_memory(node: fx.Node, sizes: Mapping[str, int]) -> Tensor:
    shape = [n if isinstance(n, int) else size_at(n, sizes) for n in node.meta["sizes"]]
    return torch.empty(shape, dtype=node.meta["dtype"], device="meta")


def forward_of(root: Root, program: Program, own: Sample, inputs: Sequence[Tensor], rank: int) -> list[Any]:
    """What the text returns for this rank's part of the inputs, and what it makes of the rank's own buffers."""
    mine = [part(x, d, program.mesh, rank) for x, d in zip(inputs, input_dims(program), strict=True)]
    found = root(*mine, *([own.key] if program.manifest.random else []))
    return [*found, *(own.buffers[name].clone() for name in program.manifest.updates)]


def alone(program: Small, leaves: Mapping[str, Tensor], own: Sample) -> Forward:
    """The text for one device at small sizes: what it returns, and what it makes of the buffers."""
    root = _alone(program, leaves, own)
    assert root is not None, "a small program has a text for one device"

    def forward(inputs: Sequence[Tensor]) -> Sequence[Any]:
        found = root(*inputs, *([own.key] if program.manifest.random else []))
        return [*found, *(own.buffers[name].clone() for name in program.manifest.updates)]

    return forward


def result_layouts(program: Program) -> list[Layout | None]:
    return [v.meta["layout"] if isinstance(v, fx.Node) else None for v in results(program.graph)]


def input_dims(program: Program) -> list[tuple[tuple[str, ...], ...]]:
    """How each input is sharded when it comes in: over the data axes, by the contract."""
    placeholders = {n.meta["name"]: n for n in program.graph.graph.find_nodes(op="placeholder")}
    return [placeholders[name].meta["layout"].dims for name in program.manifest.inputs]


def cotangent_scales(program: Program) -> list[int]:
    """A result with a batch takes gradients as the mean of the data ranks; a scalar is the same on all."""
    mesh = program.mesh
    data = data_axes(mesh)
    layouts = result_layouts(program)
    return [mesh.size(*data) if y and any(a in axes for axes in y.dims for a in data) else 1 for y in layouts]


def _backward(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    flows = [(y, g) for y, g in pairs if isinstance(y, Tensor) and y.requires_grad]
    if flows:
        torch.autograd.backward([y for y, _ in flows], [g for _, g in flows])


def _train(
    leaves: Mapping[str, Tensor], forward: Forward, backward: Backward, sample: Sample, norm: Norm, domain: Domain
) -> list[Step]:
    trained = {name: p for name, p in leaves.items() if p.requires_grad}
    optimizer = _FlatAdamW(trained, domain.eps)
    steps = []
    for _ in range(sample.steps if domain.optimizes else 1):
        step = Step()
        for number, inputs in enumerate(sample.batches):
            found = forward(inputs)
            backward(found, number)
            step.results.append([y.detach() if isinstance(y, Tensor) else y for y in found])
        step.gradients = {name: None if p.grad is None else p.grad.clone() for name, p in trained.items()}
        degree = domain.degree
        with torch.no_grad():
            if domain.optimizes:
                step.norm = norm({name: g for name, g in step.gradients.items() if g is not None})
                optimizer.step(torch.clamp(CLIP / (step.norm + 1e-6), max=1.0))
        domain.degree = degree  # a parameter's own quotient adds nothing to a gradient's
        step.parameters = {name: p.detach().clone() for name, p in leaves.items()}
        steps.append(step)
    return steps


class _FlatAdamW:
    """torch's AdamW on all parameters as one vector: it goes element by element, and one vector is faster than many."""

    def __init__(self, parameters: Mapping[str, Tensor], eps: float) -> None:
        self._parameters, self._eps = parameters, eps
        self._optimizers: dict[tuple[str, ...], torch.optim.AdamW] = {}

    def step(self, scale: Tensor) -> None:
        """One step with all gradients times `scale`; a parameter without a gradient stays as it is."""
        moved = {name: p for name, p in self._parameters.items() if p.grad is not None}
        if not moved:
            return
        flat = torch.cat([p.flatten() for p in moved.values()]).requires_grad_()
        flat.grad = torch.cat([p.grad.flatten() for p in moved.values() if p.grad is not None]) * scale
        optimizer = self._optimizers.setdefault(
            tuple(moved), torch.optim.AdamW([flat], lr=LEARNING_RATE, eps=self._eps, foreach=False)
        )
        (held,) = optimizer.param_groups[0]["params"]
        held.copy_(flat)
        held.grad = flat.grad
        optimizer.step()
        for p, piece in zip(moved.values(), held.split([p.numel() for p in moved.values()]), strict=True):
            p.copy_(piece.view(p.shape))
            p.grad = None


def _norm(gradients: Mapping[str, Tensor]) -> Tensor:
    return _squares(list(gradients.values())).sqrt()


def _squares(tensors: Sequence[Tensor]) -> Tensor:
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    flat = torch.cat([x.flatten() for x in tensors])
    return (flat * flat).sum()


def _sharded_norm(gradients: Mapping[str, Tensor], program: Program, rank: int) -> Tensor:
    """The norm with every parameter once: sums of squares are added over the axes that shard a parameter, as DTensor
    adds them."""
    groups: dict[tuple[str, ...], list[Tensor]] = {}
    for name, gradient in gradients.items():
        dims = program.parameters[name].layout.dims
        axes = tuple(a for a in program.mesh.names if any(a in shards for shards in dims))
        groups.setdefault(axes, []).append(gradient)
    whole = torch.zeros((), dtype=torch.float64)
    for axes in sorted(groups):
        total = _squares(groups[axes])
        if axes:
            total = private.wait(private.start_all_reduce(total, "sum", ",".join(axes)))
        whole = whole + total
    return whole.sqrt()


def round_trip(small: Small, sizes: Mapping[str, int]) -> tuple[int, str]:
    """Whether a large program's text for one device does the ops of its reference graph, on tensors without memory."""
    large = small.large
    assert large is not None, "a small program knows the large one"
    graph = unfold(shortened(large.folded_reference))
    placeholders = {n.meta["name"]: n for n in graph.graph.find_nodes(op="placeholder")}
    tensors = {name: _without_memory(node, sizes) for name, node in placeholders.items()}
    parameters = {n: t for n, t in tensors.items() if placeholders[n].meta["role"] == "parameter"}
    buffers = {n: t for n, t in tensors.items() if placeholders[n].meta["role"] in ("buffer", "constant")}
    inputs = [tensors[name] for name in large.manifest.inputs]
    plans = {n: p for n, p in large.manifest.parameters.items() if n in parameters}
    root = _one_rank(small.large_text, large, plans, parameters, buffers, small.without)

    def of_graph() -> Any:
        found = walk(graph, lambda node: tensors[node.meta["name"]])
        written = list(updates(graph))
        for name, value in zip(written, found[len(found) - len(written) :], strict=True):
            tensors[name].copy_(value)

    def of_text() -> Any:
        return root(*inputs, *([tensors["key"]] if large.manifest.random else []))

    return difference(of_graph, of_text, tensors)
