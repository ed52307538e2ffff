"""A ring of attention is one attention: the lemma, and programs in which it is taken as proven.

A ring merges what each block of keys gives by the log-sum-exp of its scores, which needs exp(a + b) = exp(a) · exp(b).
Of a random function that does not hold. So where a whole program runs in the prime field, a ring is done as one
attention to gathered keys; and by the lemma each of its rings, forward and backward, is the attention of one device.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ndcompile.mesh import MeshSpec
from ndcompile.runtime import context_attention
from ndcompile.runtime.masks import Mask
from ndcompile.runtime.mesh import Ranks
from ndcompile.runtime.plain import scale_of
from ndcompile.verify.domain import FAILURES, NotInDomain, ZeroDenominator
from ndcompile.verify.exponents import Exponents
from ndcompile.verify.lockstep import mesh_of, run_one, run_ranks
from ndcompile.verify.places import Lies, part
from ndcompile.verify.report import Claim

KIND = "equal over F_p (rings)"
CALLED = 'how="ring"'
ATTEMPTS = 20


@dataclass(frozen=True)
class Ring:
    """A call with `how="ring"`: the shapes of one rank's q, k and v, the order, the scale, and the mask."""

    ranks: int
    shapes: tuple[tuple[int, ...], ...]
    balanced: bool
    scale: float
    mask: Mask

    @property
    def key(self) -> tuple[Any, ...]:
        """What two calls have in common that are one case of the lemma: the entries of a mask may differ."""
        plain = {name: None if isinstance(x, Tensor) else x for name, x in self.mask.parts.items()}
        return self.ranks, self.shapes, self.balanced, self.scale, tuple(sorted(plain.items()))

    def __str__(self) -> str:
        (_, heads, length, _), (_, groups, others, _), _ = self.shapes
        tokens = f"{self.ranks * length} tokens"
        tokens += "" if length == others else f" to {self.ranks * others}"
        of = "" if heads == groups else f" of {groups}"
        return f"{', '.join(sorted(self.mask.names)) or 'all'}, {heads} heads{of}, {tokens} on {self.ranks} ranks"


_notes: list[dict[Any, Ring]] = []
"""Where rings are noted, by what tells them apart: of all blocks of `met` that are open, on whatever thread."""


@contextmanager
def met() -> Iterator[dict[Any, Ring]]:
    """The rings of texts by `as_one` that run inside the block, on all threads: one of each case."""
    found: dict[Any, Ring] = {}
    _notes.append(found)
    try:
        yield found
    finally:
        del _notes[next(i for i, note in enumerate(_notes) if note is found)]


def as_one(text: str) -> str:
    """The emitted text with its rings as one attention; no line gets another number."""
    if CALLED not in text:
        return text
    one = ("context_attention(", "rings.attention(")
    lines = [line.replace(*one) if CALLED in line else line for line in text.split("\n")]
    lines[lines.index("import torch")] = "import torch; from ndcompile.verify import rings"
    return "\n".join(lines)


def attention(q: Tensor, k: Tensor, v: Tensor, axis: Ranks, *, how: str, **options: Any) -> Tensor:
    """`context_attention` with keys gathered in place of a ring, which is noted."""
    names = {name: options[name] for name in Mask().__dataclass_fields__ if name in options}
    shapes = tuple(tuple(x.shape) for x in (q, k, v))
    scale = scale_of(q, options.get("scale"))
    if how == "ring" and axis.size > 1 and not options.get("dropout_p"):
        ring = Ring(axis.size, shapes, options.get("balanced", True), scale, Mask(**names))
        for found in _notes:
            found.setdefault(ring.key, ring)
    return context_attention(q, k, v, axis, **options, how="gather" if how == "ring" else how)


# ---- the lemma -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compared:
    """What of a ring is not as on one device (empty: nothing), of how many elements, and an estimate of the degree."""

    difference: str
    elements: int = 0
    degree: int = 0


def compared(ring: Ring, seed: int) -> Compared:
    """The result and the gradients of queries, keys and values, on every rank, with those of one device."""
    for attempt in range(ATTEMPTS):
        try:
            return _compared(ring, Exponents(seed + 1000 * attempt))
        except ZeroDenominator:
            continue
    return Compared(f"{ATTEMPTS} samples gave a sum of weights that is 0, of a ring: {ring}")


NAMES = ("the result", "the gradient of queries", "the gradient of keys", "the gradient of values")


def _compared(ring: Ring, d: Exponents) -> Compared:
    wholes = [(b, h, ring.ranks * t, e) for b, h, t, e in ring.shapes]
    inputs = d.draw_exponents(wholes[0]), d.draw_exponents(wholes[1]), d.draw(wholes[2])
    gradient = d.draw([*wholes[0][:3], wholes[2][3]])
    right = run_one(d, lambda: _on_one_device(ring, inputs, gradient))
    degree = d.degree
    spec = MeshSpec.parse(f"cp={ring.ranks}")
    lies = {(2, "cp"): Lies(head_tail=ring.balanced)}

    def own(x: Tensor, rank: int) -> Tensor:
        return part(x, ((), (), ("cp",), ()), spec, rank, lies)

    def on_rank(rank: int) -> Sequence[Tensor]:
        axis, leaves = mesh_of(spec, rank)["cp"], [own(x, rank).clone().requires_grad_() for x in inputs]
        options: dict[str, Any] = ring.mask.parts | dict(scale=ring.scale, how="ring", balanced=ring.balanced)
        q, k, v = leaves
        out = context_attention(q, k, v, axis, **options)
        return out.detach(), *torch.autograd.grad(out, leaves, own(gradient, rank))

    for rank, found in enumerate(run_ranks(spec, d, on_rank)):
        for what, mine, whole in zip(NAMES, found, right, strict=True):
            if not torch.equal(mine, own(whole, rank)):
                return Compared(f"{what} is another on rank {rank}, of a ring: {ring}")
    return Compared("", sum(x.numel() for x in right), degree)


def _on_one_device(ring: Ring, inputs: Sequence[Tensor], gradient: Tensor) -> Sequence[Tensor]:
    """torch's attention under the dense mask."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    q, k, v = leaves
    allowed = ring.mask.allowed((0, q.shape[2]), (0, k.shape[2]), q.device)
    if allowed is not None:
        allowed = allowed[(None,) * (4 - allowed.dim())]
    with sdpa_kernel(SDPBackend.MATH):
        out = F.scaled_dot_product_attention(q, k, v, allowed, scale=ring.scale, enable_gqa=True)
    return out.detach(), *torch.autograd.grad(out, leaves, gradient)


AS_ONE = "each ring is taken as one attention"


def claim(rings: Sequence[Ring], seeds: int) -> Claim:
    """Each of a program's rings by the lemma."""
    begin, elements, degree = time.perf_counter(), 0, 0
    for ring, seed in itertools.product(rings, range(seeds)):
        try:
            found = compared(_on_the_cpu(ring), seed)
        except NotInDomain as error:
            return Claim(KIND, None, [str(error)], time.perf_counter() - begin)
        except FAILURES as error:
            found = Compared(f"a ring does not run: {ring}: {type(error).__name__}: {error}")
        if found.difference:
            return Claim(KIND, False, [found.difference], time.perf_counter() - begin)
        elements, degree = elements + found.elements, max(degree, found.degree)
    p, chance = Exponents.prime, min(1.0, 2 * degree / Exponents.prime)
    evidence = [
        f"{seeds} seeds; {'; '.join(map(str, rings))}: result and gradients are those of one device's attention, "
        f"{elements:,} elements, the difference is 0",
        f"exp maps sums modulo p − 1 to products modulo p = {p}; by chance at most about {chance**seeds:.0e}",
    ]
    return Claim(KIND, True, evidence, time.perf_counter() - begin)


def _on_the_cpu(ring: Ring) -> Ring:
    rows: dict[str, Any] = {n: x.cpu() for n, x in ring.mask.parts.items() if isinstance(x, Tensor)}
    return replace(ring, mask=replace(ring.mask, **rows))
