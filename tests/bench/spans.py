"""What a GPU did when: kernels by kind, communication that no computation covers, and idle time. Plain arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

KINDS = {
    "communication": ("nccl", "signal", "barrier"),
    "copy": ("memcpy",),
    "attention": ("flash", "fmha", "cudnn", "sdpa"),
    "matmul": ("nvjet", "gemm", "cutlass", "xmma", "cublas"),
    "optimizer": ("multi_tensor", "fusedadam"),
    "fused": ("triton",),
}
"""A kernel's kind, by what its name contains, tried in this order; all else is `other`."""
MOVING = ("communication", "copy")
MARKS = {
    "matmul": "M",
    "attention": "A",
    "fused": "f",
    "optimizer": "o",
    "other": "-",
    "communication": "c",
    "copy": "y",
}


class Kernel(NamedTuple):
    """A kernel, or a copy: from `start` to `end`, in nanoseconds."""

    name: str
    start: int
    end: int

    @property
    def kind(self) -> str:
        name = self.name.lower()
        return next((kind for kind, keys in KINDS.items() if any(key in name for key in keys)), "other")


Span = tuple[int, int]


def union(spans: Iterable[Span]) -> list[Span]:
    """The same time, as spans that do not meet, in order."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def without(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """What of `spans` none of `others` covers; both as `union` gives them."""
    found = []
    for start, end in spans:
        for low, high in others:
            if high <= start or low >= end:
                continue
            if low > start:
                found.append((start, low))
            start = max(start, high)
        if start < end:
            found.append((start, end))
    return found


def length(spans: Iterable[Span]) -> int:
    return sum(end - start for start, end in spans)


class Exposed(NamedTuple):
    """A stretch in which only communication ran, and the first computing kernel after it."""

    name: str
    nanoseconds: int
    before: str


class Step(NamedTuple):
    """Sums over kernels, in nanoseconds: computing is any kernel that does not move data between GPUs or buffers."""

    wall: int
    computing: int
    moving: int
    exposed: int
    idle: int
    kinds: dict[str, int]


def summary(kernels: Sequence[Kernel]) -> Step:
    computing, moving = _split(kernels)
    every = union([*computing, *moving])
    wall = every[-1][1] - every[0][0]
    kinds: dict[str, int] = {}
    for kernel in kernels:
        kinds[kernel.kind] = kinds.get(kernel.kind, 0) + kernel.end - kernel.start
    exposed = length(without(moving, computing))
    return Step(wall, length(computing), length(moving), exposed, wall - length(every), kinds)


def exposed(kernels: Sequence[Kernel]) -> list[Exposed]:
    """The stretches of communication that nothing covers, longest first."""
    computing, _ = _split(kernels)
    found = []
    works = sorted((k for k in kernels if k.kind not in MOVING), key=lambda k: k.start)
    for kernel in kernels:
        if kernel.kind in MOVING:
            for start, end in without([(kernel.start, kernel.end)], computing):
                after = next((k.name for k in works if k.start >= end), "the end")
                found.append(Exposed(kernel.name, end - start, after))
    return sorted(found, key=lambda each: -each.nanoseconds)


def strip(kernels: Sequence[Kernel], columns: int = 120) -> str:
    """The step as two lines of text, computing above moving: in each column the mark of what ran there longest."""
    begin, end = min(k.start for k in kernels), max(k.end for k in kernels)
    width = (end - begin) / columns
    rows = {True: [dict[str, float]() for _ in range(columns)], False: [dict[str, float]() for _ in range(columns)]}
    for kernel in kernels:
        first, last = int((kernel.start - begin) / width), min(int((kernel.end - begin) / width), columns - 1)
        for column in range(first, last + 1):
            low, high = begin + column * width, begin + (column + 1) * width
            shares, mark = rows[kernel.kind in MOVING][column], MARKS[kernel.kind]
            shares[mark] = shares.get(mark, 0) + min(kernel.end, high) - max(kernel.start, low)

    def line(shares: list[dict[str, float]]) -> str:
        return "".join(max(each, key=lambda m: each[m]) if sum(each.values()) > width / 4 else " " for each in shares)

    return f"computing {line(rows[False])}\nmoving    {line(rows[True])}"


def _split(kernels: Sequence[Kernel]) -> tuple[list[Span], list[Span]]:
    computing = union((k.start, k.end) for k in kernels if k.kind not in MOVING)
    moving = union((k.start, k.end) for k in kernels if k.kind in MOVING)
    return computing, moving
