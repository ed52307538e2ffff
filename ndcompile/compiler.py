"""From a model to its program: capture, the passes in order, and what binding needs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ndcompile import pipeline, planning
from ndcompile.capture import capture
from ndcompile.codegen.emit import Names
from ndcompile.dtypes import one_dtype
from ndcompile.pins import pinned_names
from ndcompile.program import Made, Program
from ndcompile.request import Request, ambient_autocast


def compiled(request: Request, dump: str | Path | None = None) -> Program:
    """The program, made anew; `dump` is a folder for every pass's graph."""
    model, asked = request.model, request.asked
    begin = time.perf_counter()
    autocast, names = ambient_autocast(model), pinned_names(model, request.pins)
    captured = capture(
        model, request.example, precision=asked.precision, float64=asked.float64, dynamic_dims=asked.dynamic_dims,
        autocast=autocast, pinned=names, remat=asked.remat, reshard=asked.reshard,
    )  # fmt: skip
    one_dtype(captured.graph)
    times = {"capture": time.perf_counter() - begin}
    modules = dict(model.named_modules())
    lists = frozenset(name for name, module in modules.items() if isinstance(module, nn.ModuleList))
    job = pipeline.Job(
        captured.graph, request.mesh, asked.precision, request.pins, {**names, **captured.kept.marks()}, lists,
        _names(model, modules), type(model).__name__, captured.conditions, dict(model.named_buffers()),
        asked.local_outputs, not request.of_other_mode, asked.cp_attention, asked.pad_inputs, asked.halves,
        captured.kept, times=times,
    )  # fmt: skip
    pipeline.run(job, None if dump is None else Path(dump))
    assert job.reference and job.emitted, "the pipeline has run all its steps"
    parameters = planning.parameters(model, job.graph, job.mesh)
    manifest = planning.manifest(model, captured, job, parameters, autocast)
    made = Made(job.graph, job.reference, job.problems, job.emitted, job.names)
    return Program(job.emitted.source, manifest, job.mesh, parameters, made, times)


def _names(model: nn.Module, modules: Mapping[str, nn.Module]) -> Names:
    config: Any = getattr(model, "config", None)
    numbers = config.to_dict() if hasattr(config, "to_dict") else {}
    return Names({name: type(module).__name__ for name, module in modules.items()}, numbers)
