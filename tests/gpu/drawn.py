"""Attention over ranks on drawn shapes, masks and dtypes: result and gradients beside float64 on one device.

    python -m torch.distributed.run --nproc-per-node 2 -m tests.gpu.drawn --cases 200

NCCL where each rank has a GPU, else gloo and small sizes. All ranks draw the same cases. Each must hold, for the
result and the gradients of queries, keys and values, what `tests.gpu.context` says of errors. The last line, a JSON
one of rank 0, has the number of cases, the largest ratio of the two sides without the 4 and where; a case that fails
is shrunk, and told by every rank.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

from ndcompile.mesh import MeshSpec
from ndcompile.runtime import Mesh, Ranks, heads_divide
from ndcompile.verify.error_model import ALLOWED
from tests.gpu.context import WAYS, compare
from tests.torchrun import join

DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.float32, torch.bfloat16, torch.float16)}
LONGEST = {"cpu": 9, "cuda": 700}
"""The longest chunk, in tokens: on a GPU longer than the 512 queries that are done at a time."""


@dataclass(frozen=True)
class Case:
    """Queries `[b, heads, length, d]`, keys `[b, kv_heads, length, d]`, values `[b, kv_heads, length, e]`."""

    how: str
    dtype: torch.dtype
    balanced: bool
    b: int
    heads: int
    kv_heads: int
    length: int
    d: int
    e: int
    mask: tuple[str, ...]
    number: int

    def tensors(self, device: torch.device) -> list[Tensor]:
        """Queries, keys, values and the gradient of the result: the same on every rank, whatever its device."""
        torch.manual_seed(self.number)
        shapes = [(self.heads, self.d), (self.kv_heads, self.d), (self.kv_heads, self.e), (self.heads, self.e)]
        return [torch.randn(self.b, h, self.length, n).to(device, self.dtype) for h, n in shapes]

    def named(self, device: torch.device) -> dict[str, Any]:
        """The parts of the mask; some rows of padding are all padding."""
        random = torch.Generator().manual_seed(self.number)
        rows = torch.rand(self.b, self.length, generator=random)
        reach = int(torch.randint(1, self.length + 1, (), generator=random))
        made: dict[str, Any] = dict(
            causal=True, window=reach, chunk=reach, prefix=(rows < 0.2).long(), padding=(rows < 0.7).long(),
            documents=(rows < 3 / self.length).cumsum(1),
        )  # fmt: skip
        found = {name: made[name] for name in self.mask}
        return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in found.items()}


MASKS = (
    (), ("causal",), ("causal", "window"), ("window",), ("causal", "chunk"), ("causal", "prefix"), ("padding",),
    ("causal", "padding"), ("causal", "documents"), ("documents",), ("causal", "window", "documents", "padding"),
)  # fmt: skip


@st.composite
def cases(draw: st.DrawFn, ranks: int, device: str) -> Case:
    how, balanced = draw(st.sampled_from(WAYS)), draw(st.booleans())
    kv_heads, group = draw(st.sampled_from([1, 2, ranks])), draw(st.sampled_from([1, 2, 4]))
    heads = kv_heads * group * (ranks if how == "heads" and kv_heads * group % ranks else 1)
    how = how if heads_divide(heads, kv_heads, ranks) else "ring"
    length = draw(st.integers(1, LONGEST[device])) * ranks * (2 if balanced else 1)
    d = 8 * draw(st.sampled_from([1, 2, 8, 16] if device == "cuda" else [1, 2]))
    e = draw(st.sampled_from([d, d, 16]))
    dtype, mask = draw(st.sampled_from(DTYPES[device])), draw(st.sampled_from(MASKS))
    return Case(
        how, dtype, balanced, draw(st.integers(1, 2)), heads, kv_heads, length, d, e, mask, draw(st.integers(0, 99))
    )


@dataclass
class Found:
    """How many cases ran, and the largest ratio."""

    count: int = 0
    worst: float = 0.0
    where: list[str] = field(default_factory=list)


def check(axis: Ranks, device: torch.device, number: int) -> Found:
    """So many cases on every rank. Raises `AssertionError` where one does not hold."""
    found = Found()

    def hold(case: Case) -> None:
        measured = compare(case.how, case.named(device), case.tensors(device), axis, case.balanced)
        ratio = max(measured["ratios"].values(), default=0.0)
        found.count += 1
        if ratio > found.worst:
            found.worst, found.where = ratio, [str(case)]
        assert measured["correct"], f"{case}: {measured['ratios']}, {ALLOWED} is allowed"

    options = settings(
        max_examples=number, deadline=None, database=None, derandomize=False, suppress_health_check=list(HealthCheck)
    )
    seed(0)(options(given(cases(axis.size, device.type))(hold)))()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100)
    arguments = parser.parse_args()
    device, start = join(120), time.perf_counter()
    axis = Mesh.bound(MeshSpec.parse(f"cp={dist.get_world_size()}"))["cp"]
    found = check(axis, device, arguments.cases)
    if dist.get_rank() == 0:
        told = {"cases": found.count, "worst": found.worst, "where": found.where, "device": device.type}
        print(json.dumps(told | {"seconds": round(time.perf_counter() - start, 1)}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
