"""The graph that users inspect computes what the emitted text computes: the dump of `localize_sizes` runs on ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ndcompile as nd
from ndcompile.capture import Captured
from ndcompile.mesh import MeshSpec
from ndcompile.runtime import Mesh, draw_key, private, use
from tests.equivalence.captures import captured_once
from tests.equivalence.compare import Case, make, own_rows
from tests.ranks import run

CASES = [
    Case("gpt with dropout", "tp=2"), Case("gpt with dropout", "cp=2"), Case("drop path", "dp_shard=2"),
    Case("drop path", "cp=2"), Case("drop path", "tp=2"), Case("llama", "tp=2"), Case("llama", "dp_shard=2"),
]  # fmt: skip


@dataclass(frozen=True)
class Dumped:
    """A program's file and its dumps in a folder; the roles and names of what the graph takes."""

    case: Case
    folder: Path
    flattened: list[tuple[str, ...]]
    takes: list[tuple[str, str]]


@pytest.mark.equivalence
def test_the_dumped_graph_computes_what_the_emitted_text_computes(tmp_path: Path) -> None:
    held = dict[Any, Captured]()
    dumps = [dumped(case, tmp_path / str(number), held) for number, case in enumerate(CASES)]
    for measured in run(2, largest_differences, dumps, timeout=120.0):
        assert measured == [0.0] * len(CASES)


def dumped(case: Case, folder: Path, held: dict[Any, Captured]) -> Dumped:
    model, batch = make(case)
    with captured_once(held, case.model):
        program = nd.compile(model, case.mesh, batch, float64=True, dump=folder)
    program.save(folder / "program.py")
    placeholders = program.local_graph.graph.find_nodes(op="placeholder")
    takes = [(n.meta["role"], n.meta.get("name", "")) for n in placeholders]
    return Dumped(case, folder, program.manifest.flattened, takes)


def largest_differences(dumps: list[Dumped]) -> list[float]:
    torch.set_num_threads(1)
    return [largest_difference(dump) for dump in dumps]


def largest_difference(dump: Dumped) -> float:
    model, batch = make(dump.case)
    rank, spec = torch.distributed.get_rank(), MeshSpec.parse(dump.case.mesh)
    parallel = nd.load(dump.folder / "program.py", model)
    mine, namespace = own_rows(batch, spec, rank), dict[str, Any]()
    with use(Mesh.bound(spec, dump.flattened)):
        exec(next(dump.folder.glob("*_localize_sizes.py")).read_text(), namespace)
    torch.manual_seed(0)
    expected = parallel(**mine)
    torch.manual_seed(0)
    found = namespace["forward"](None, *_arguments(dump.takes, parallel, mine))
    pairs = zip(found, dict(expected.items()).values(), strict=True)
    return max(float((a - private.local(b)).abs().max()) for a, b in pairs)


def _arguments(takes: list[tuple[str, str]], parallel: nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
    held = {name: private.local(p) for name, p in parallel.named_parameters()} | dict(parallel.named_buffers()) | batch
    return [draw_key() if role == "key" else held[name] for role, name in takes]
