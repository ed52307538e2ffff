"""The graph that users inspect computes what the emitted text computes: the dump of `localize_sizes` runs on ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import ndcompile as nd
from ndcompile.mesh import MeshSpec
from ndcompile.runtime import Mesh, draw_key, private, use
from tests.equivalence.compare import Case, make, own_rows
from tests.ranks import run

CASES = [Case("mlp", "tp=2"), Case("gpt with dropout", "tp=2"), Case("llama", "tp=2"), Case("llama", "dp_shard=2")]


@pytest.mark.equivalence
def test_the_dumped_graph_computes_what_the_emitted_text_computes(tmp_path: Path) -> None:
    for number, case in enumerate(CASES):
        model, batch = make(case)
        nd.compile(model, case.mesh, batch, float64=True, dump=tmp_path / str(number))
    for measured in run(2, run_dumps, [tmp_path / str(number) for number in range(len(CASES))], timeout=120.0):
        assert measured == [0.0] * len(CASES)


def run_dumps(folders: list[Path]) -> list[float]:
    torch.set_num_threads(1)
    return [_largest_difference(case, folder) for case, folder in zip(CASES, folders, strict=True)]


def _largest_difference(case: Case, folder: Path) -> float:
    model, batch = make(case)
    rank, spec = torch.distributed.get_rank(), MeshSpec.parse(case.mesh)
    parallel = nd.parallelize(model, case.mesh, batch, float64=True)
    program = nd.compile(model, case.mesh, batch, float64=True)
    mine, namespace = own_rows(batch, spec, rank), dict[str, Any]()
    with use(Mesh.bound(spec, program.manifest.flattened)):
        exec(next(folder.glob("*_localize_sizes.py")).read_text(), namespace)
    torch.manual_seed(0)
    expected = parallel(**mine)
    torch.manual_seed(0)
    found = namespace["forward"](None, *_arguments(program.local_graph, parallel, mine))
    pairs = zip(found, dict(expected.items()).values(), strict=True)
    return max(float((a - private.local(b)).abs().max()) for a, b in pairs)


def _arguments(graph: fx.GraphModule, parallel: nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
    held = {name: private.local(p) for name, p in parallel.named_parameters()} | dict(parallel.named_buffers()) | batch
    placeholders = graph.graph.find_nodes(op="placeholder")
    return [draw_key() if n.meta["role"] == "key" else held[n.meta["name"]] for n in placeholders]
