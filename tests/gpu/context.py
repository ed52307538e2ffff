"""Attention over ranks on real devices: each way, mask and kernel beside float64 on one device; and how long they take.

    python -m torch.distributed.run --nproc-per-node 2 -m tests.gpu.context

NCCL where each rank has a GPU, else gloo and small sizes. A JSON line for each case from rank 0. Correct is, for the
result and the gradients of queries, keys and values in bfloat16,

    ‖ranks − float64‖ ≤ 4 · max(‖one device − float64‖, u · ‖float64‖)        u = 2⁻⁸, that of the dtype

where one device is torch's `scaled_dot_product_attention`. Times are of forward and backward, the median of `--times`,
of the slowest rank; `speedup` is over one GPU that does the whole. `--compile` compiles them too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ndcompile.mesh import MeshSpec
from ndcompile.runtime import Mask, Mesh, Ranks, context_attention, heads_divide, positions
from ndcompile.runtime.kernels import kernel_for
from ndcompile.verify.error_model import ALLOWED, unit
from tests.torchrun import join

WAYS = ("gather", "ring", "heads")
KERNELS = {
    "default": None,
    "flash": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    "plain": [SDPBackend.MATH],
}
ZERO = 1e-6
"""What is zero, of the largest of a case's results."""

Tensors = list[Tensor]
Parts = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """Queries `[b, heads, length, dim]`, keys and values `[b, kv_heads, length, dim]`."""

    b: int
    heads: int
    kv_heads: int
    length: int
    dim: int

    def draw(self, device: torch.device) -> Tensors:
        """Queries, keys, values and the gradient of the result: the same on every rank."""
        torch.manual_seed(self.length)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        return [torch.randn(self.b, h, self.length, self.dim, device=device).bfloat16() for h in heads]


def masks(shape: Shape, device: torch.device) -> dict[str, Parts]:
    """By name; the second sample has padding, the first of a document is seen by all of it."""
    at = torch.arange(shape.length, device=device)
    rows = at.expand(shape.b, -1)
    padding = (at < torch.tensor([[shape.length]] + [[2 * shape.length // 3]] * (shape.b - 1), device=device)).long()
    return {
        "full": {},
        "causal": dict(causal=True),
        "window": dict(causal=True, window=shape.length // 5),
        "chunk": dict(causal=True, chunk=shape.length // 3),
        "prefix": dict(causal=True, prefix=shape.length // 7),
        "padding": dict(padding=padding),
        "documents": dict(causal=True, documents=rows // (shape.length // 5)),
        "all padding": dict(
            causal=True, padding=padding * (rows[:, :1] == torch.arange(shape.b, device=device)[:, None])
        ),
    }


def own(x: Tensor, axis: Ranks, balanced: bool = True) -> Tensor:
    return x.index_select(2, positions(x.shape[2], axis, balanced=balanced, device=x.device))


def results(attend: Callable[..., Tensor], tensors: Tensors) -> Tensors:
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, tensors[3])]


def far(a: Tensor, b: Tensor, axis: Ranks) -> float:
    """The distance of two tensors whose parts the ranks hold."""
    square = (a.double() - b.double()).square().sum()
    dist.all_reduce(square)
    return float(square.sqrt())


def compare(how: str, named: Parts, tensors: Tensors, axis: Ranks, balanced: bool = True) -> dict[str, Any]:
    """The ratio of the two sides of the model of errors, without the 4; not of what is zero by mathematics: the
    gradients of queries that see one key.
    """
    least_of_all = unit(tensors[0].dtype)
    length = tensors[0].shape[2]
    dense = Mask(**named).allowed((0, length), (0, length), tensors[0].device)

    def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dense, enable_gqa=True)

    with sdpa_kernel(SDPBackend.MATH):
        right = [own(x, axis, balanced) for x in results(whole, [x.double() for x in tensors])]
    low = [own(x, axis, balanced) for x in results(whole, tensors)]
    parts = [own(x, axis, balanced) for x in tensors]
    ours = results(lambda q, k, v: context_attention(q, k, v, axis, **named, how=how, balanced=balanced), parts)
    ratios, sizes = {}, [far(x, torch.zeros_like(x), axis) for x in right]
    for name, size, a, b, c in zip(("out", "q", "k", "v"), sizes, ours, low, right, strict=True):
        error, rounding = far(a, c, axis), far(b, c, axis)
        if size >= ZERO * max(sizes):
            allowed = max(rounding if math.isfinite(rounding) else 0.0, least_of_all * size)
            ratios[name] = round(error / allowed if allowed else math.inf, 3) if error else 0.0
    return {"ratios": ratios, "correct": all(ratio <= ALLOWED for ratio in ratios.values())}


@contextlib.contextmanager
def allowing(kernels: list[SDPBackend] | None) -> Iterator[None]:
    with sdpa_kernel(kernels) if kernels else contextlib.nullcontext():
        yield


def seconds(function: Callable[[], object], times: int, device: torch.device) -> float:
    """The median of the slowest rank."""
    found = []
    for i in range(times + 2):
        dist.barrier()
        synchronize(device)
        start = time.perf_counter()
        function()
        synchronize(device)
        if i >= 2:
            found.append(time.perf_counter() - start)
    slowest = torch.tensor(statistics.median(found), device=device, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(shape: Shape, axis: Ranks, device: torch.device, times: int, compiled: bool) -> Iterator[dict[str, Any]]:
    """Forward and backward under a causal mask."""
    tensors = shape.draw(device)

    def single(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shape.heads != shape.kv_heads)

    alone = seconds(lambda: results(single, tensors), times, device)
    yield {"how": "one device", "ms": round(1e3 * alone, 3), **memory(lambda: results(single, tensors), device)}
    parts = [own(x, axis).contiguous() for x in tensors]
    for kernels in ("default", "flash"):
        for how in WAYS if kernels == "default" else WAYS[:2]:
            for dtype in (None, torch.float32) if how == "gather" else (None,):

                def attend(q: Tensor, k: Tensor, v: Tensor, how: str = how, dtype: Any = dtype) -> Tensor:
                    return context_attention(q, k, v, axis, causal=True, how=how, dtype=dtype)

                with allowing(KERNELS[kernels]):
                    function = torch.compile(attend, fullgraph=True) if compiled else attend
                    took = seconds(lambda f=function: results(f, parts), times, device)  # type: ignore[misc]
                    peak = memory(lambda f=function: results(f, parts), device)  # type: ignore[misc]
                    kernel = kernel_for(parts[0], parts[1], parts[2], None).name
                yield {
                    "how": how, "kernel": kernel, "sum": str(dtype or parts[1].dtype)[6:], "compiled": compiled,
                    "ms": round(1e3 * took, 3), "speedup": round(alone / took, 3), **peak,
                }  # fmt: skip


def memory(function: Callable[[], object], device: torch.device) -> dict[str, float]:
    """The most that was allocated beyond what was there."""
    if device.type != "cuda":
        return {}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return {"peak_mb": round((torch.cuda.max_memory_allocated() - before) / 1e6, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=10, help="timed rounds of each case")
    parser.add_argument("--compile", action="store_true", help="time compiled code too (minutes)")
    arguments = parser.parse_args()
    device = join(120)
    gpu = device.type == "cuda"
    axis = Mesh.bound(MeshSpec.parse(f"tp={dist.get_world_size()}"))["tp"]

    def tell(line: dict[str, Any]) -> None:
        if dist.get_rank() == 0:
            print(json.dumps(line), flush=True)

    start, correct = time.perf_counter(), True
    ranks = axis.size
    small = Shape(2, 2 * ranks, ranks, 512 * ranks if gpu else 24 * ranks, 64 if gpu else 16)
    for kernel in KERNELS if gpu else ("default", "plain"):
        for how in WAYS:
            for mask, named in masks(small, device).items():
                assert heads_divide(small.heads, small.kv_heads, ranks), "the small shape has heads for each rank"
                with allowing(KERNELS[kernel]):
                    found = compare(how, named, small.draw(device), axis)
                correct = correct and found["correct"]
                tell({"mask": mask, "how": how, "kernels": kernel, "heads": [small.heads, small.kv_heads], **found})
    tell({"correct": correct, "seconds": round(time.perf_counter() - start, 1)})
    large = [Shape(4, 16, 16, 4096, 128), Shape(4, 16, 4, 4096, 128), Shape(1, 32, 8, 32768, 128)]
    for shape in large if gpu else [small]:
        for compiled in (False, True) if arguments.compile else (False,):
            for line in measure(shape, axis, device, arguments.times, compiled):
                tell({"shape": list(vars(shape).values()), **line})
    tell({"seconds": round(time.perf_counter() - start, 1)})
    dist.destroy_process_group()
    sys.exit(not correct)


if __name__ == "__main__":
    main()
