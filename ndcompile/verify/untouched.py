"""Is the reference graph the model? The model's own modules run beside it on one device, by torch's autograd."""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ndcompile.program import Program
from ndcompile.runtime.leaves import call_of
from ndcompile.twin import choose_experts, copy_with
from ndcompile.verify.compare import compare_wholes
from ndcompile.verify.domain import FAILURES, Float64, NotInDomain
from ndcompile.verify.execute import Forward, Step, on_one_device, trained_alone
from ndcompile.verify.report import Claim
from ndcompile.verify.same_draws import AsDrawn, SameDraws
from ndcompile.verify.sample import Sample, draw
from ndcompile.verify.shrink import ELEMENTS, Small

KIND = "same model (float64)"


def claim(program: Program, model: nn.Module, microbatches: int, device: torch.device | str) -> Claim:
    """Two clipped steps in float64 of the model, and of the reference graph on the same numbers."""
    begin = time.perf_counter()

    def told(held: bool | None, text: str) -> Claim:
        return Claim(KIND, held, [text], time.perf_counter() - begin)

    if isinstance(program, Small):
        return told(None, f"the model has more than {ELEMENTS:,} parameters; a smaller one of its classes says it")
    domain = Float64(0, device)
    sample = draw(program, domain, model, microbatches)
    found, draws = on_one_device(program, sample, domain), SameDraws(program, sample.key)
    try:
        right = _of_modules(program, model, sample, draws, device)
    except (NotInDomain, *FAILURES) as error:
        return told(None, f"it does not run beside the graph: {type(error).__name__}: {_first_line(error)}")
    comparison = compare_wholes(program, sample, right, found, domain)
    if comparison.differences and draws.unpaired:
        return told(None, "it draws more often than the graph, and which its draws are is not known")
    if comparison.differences:
        return told(False, f"the reference graph is not the model: {comparison.differences[0]}")
    return told(True, f"the reference graph is the model: the furthest of {comparison.tensors:,} tensors is "
                f"{comparison.worst:.1e} away; 1e-10 would fail")  # fmt: skip


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]


def _of_modules(
    program: Program, model: nn.Module, sample: Sample, draws: SameDraws, device: torch.device | str
) -> list[Step]:
    """The steps of a copy of the model that holds the sample's parameters and buffers."""
    domain = AsDrawn(draws, device)

    def made(leaves: dict[str, Tensor], own: Sample) -> Forward:
        held = {name: nn.Parameter(x.detach(), requires_grad=x.requires_grad) for name, x in leaves.items()}
        leaves.update(held)
        drawn = {name: x for name, x in own.buffers.items() if name not in program.manifest.assumed}
        twin = _holding(model, drawn | held, domain)
        if twin.training != program.manifest.training:
            twin.train(program.manifest.training)
        signature, buffers = inspect.signature(model.forward), dict(twin.named_buffers(remove_duplicate=False))

        def forward(inputs: Sequence[Tensor]) -> Sequence[Any]:
            draws.begin()
            args, kwargs = call_of(signature, dict(zip(own.inputs, inputs, strict=True)) | program.manifest.constants)
            found = pytree.tree_leaves(twin(*args, **kwargs))
            draws.end()
            return [*found, *(buffers[name].clone() for name in program.manifest.updates)]

        return forward

    return trained_alone(program, sample, domain, made)


def _holding(model: nn.Module, tensors: dict[str, Tensor], domain: Float64) -> nn.Module:
    """A copy with these parameters and buffers; other tensors that it has are widened."""
    named = {id(x): name for name, x in [*model.named_parameters(), *model.named_buffers()]}

    def made(tensor: Tensor) -> Tensor:
        name = named.get(id(tensor), "")
        return tensors[name] if name in tensors else domain.encode(tensor.detach().to(domain.device, copy=True))

    twin = copy_with(model, made)[0]
    choose_experts(twin, "eager")
    return twin
