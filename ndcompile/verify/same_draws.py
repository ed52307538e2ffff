"""A model's draws, one after the other, with the numbers that the reference graph draws in their place."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ndcompile.program import Program
from ndcompile.rules.registry import BY_INDEX, arguments, op_name
from ndcompile.runtime.random import fold, keep_mask, uniform
from ndcompile.verify.domain import Float64, NotInDomain, Op, base_name
from ndcompile.verify.sample import size_at, symbol_sizes


@dataclass(frozen=True)
class _Draw:
    """A draw of the graph: dropout's probability, or none; uniform numbers' count and dtype; the key and the site."""

    p: float | None
    count: int
    dtype: torch.dtype
    key: Tensor
    site: int

    def stands_for(self, name: str, args: tuple[Any, ...], count: int) -> bool:
        """Whether a draw of the model's, of so many numbers, may be this one."""
        if self.p is None:
            return name in FORMULAS and count == self.count
        share = args[1] if len(args) > 1 else 0.5
        return name == "bernoulli_" and isinstance(share, float) and abs(1 - self.p - share) < 1e-6


class SameDraws:
    """Torch's functions and the graph's, paired in order. What the graph has no use for, it does not draw: the model is
    given other numbers there, which are counted. Raises `NotInDomain` where the two do not draw alike.
    """

    def __init__(self, program: Program, key: Tensor) -> None:
        nodes = [n for n in program.reference.graph.nodes if op_name(n.target) in BY_INDEX]
        sizes = symbol_sizes(program) if nodes else {}
        draws = [_draw_of(node, key, sizes) for node in nodes]
        self._draws = [draw for draw in draws if draw.p is None or 0 < draw.p < 1]
        self._left: deque[_Draw] = deque()
        self.unpaired = 0

    def begin(self) -> None:
        """A forward begins."""
        self._left = deque(self._draws)

    def end(self) -> None:
        """A forward is over."""
        if self._left:
            raise NotInDomain("it draws otherwise than the graph")

    def drawn(self, op: Op, args: tuple[Any, ...]) -> Tensor:
        """What `op` draws, in float64 where it is no truth."""
        name, shape = base_name(op), _shape(args)
        if not self._left or not self._left[0].stands_for(name, args, math.prod(shape)):
            self.unpaired += 1
            return torch.full(shape, 0.5)
        draw = self._left.popleft()
        if draw.p is not None:
            return keep_mask(shape, draw.p, draw.key, draw.site)
        return FORMULAS[name](_Uniform(draw, self._left), *args)


def _shape(args: tuple[Any, ...]) -> Sequence[int]:
    """Of what is drawn: a factory is told it, others follow their operands."""
    return torch.broadcast_shapes(*(x.shape if isinstance(x, Tensor) else x for x in args if _has_shape(x)))


def _has_shape(x: Any) -> bool:
    return isinstance(x, (Tensor, list, tuple))


def _draw_of(node: fx.Node, key: Tensor, sizes: Mapping[str, int]) -> _Draw:
    given = arguments(node)
    count = math.prod(size if isinstance(size, int) else size_at(size, sizes) for size in node.meta["sizes"])
    folded = fold(key, given["key"].args[1])
    return _Draw(given.get("p"), count, given.get("dtype", torch.float32), folded, given["site"])


@dataclass
class _Uniform:
    """The uniform numbers of a draw, and where it takes more of them those of the next."""

    draw: _Draw
    left: deque[_Draw]

    def __call__(self, shape: Sequence[int]) -> Tensor:
        return uniform(shape, self.draw.key, self.draw.site, self.draw.dtype).double()

    def next(self) -> _Uniform:
        if not self.left or self.left[0].p is not None:
            raise NotInDomain("it draws otherwise than the graph")
        return _Uniform(self.left.popleft(), self.left)


def _between(u: _Uniform, x: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    return u(x.shape) * (high - low) + low


def _happens(u: _Uniform, x: Tensor, p: float | Tensor | None = None) -> Tensor:
    return u(x.shape) < (x if p is None else p)


def _happens_in_place(u: _Uniform, x: Tensor, p: float | Tensor = 0.5) -> Tensor:
    return u(x.shape) < p


def _exponential(u: _Uniform, x: Tensor, rate: float = 1.0) -> Tensor:
    least = torch.finfo(u.draw.dtype).eps / 4
    return -torch.log1p(-u(x.shape)).clamp_max(-least) / rate


def _standard(u: _Uniform, shape: Sequence[int]) -> Tensor:
    return torch.sqrt(-2 * torch.log1p(-u(shape))) * torch.cos(2 * math.pi * u.next()(shape))


def _normal(u: _Uniform, mean: float | Tensor, std: float | Tensor = 1.0) -> Tensor:
    shapes = [x.shape for x in (mean, std) if isinstance(x, Tensor)]
    return _standard(u, torch.broadcast_shapes(*shapes)) * std + mean


FORMULAS: dict[str, Callable[..., Tensor]] = {
    "rand": lambda u, shape: u(shape),
    "rand_like": lambda u, x: u(x.shape),
    "uniform_": _between,
    "bernoulli": _happens,
    "bernoulli_": _happens_in_place,
    "exponential_": _exponential,
    "randn": _standard,
    "randn_like": lambda u, x: _standard(u, x.shape),
    "normal": _normal,
    "normal_": lambda u, x, mean=0.0, std=1.0: _standard(u, x.shape) * std + mean,
}
"""What torch's draws are of uniform numbers; written here again, so that the compiler's own formulas are tested."""


class AsDrawn(Float64):
    """Float64, in which a model draws the graph's numbers."""

    def __init__(self, draws: SameDraws, device: torch.device | str) -> None:
        super().__init__(0, device)
        self._draws = draws

    def run(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.Tag.nondeterministic_seeded not in op.tags:
            return super().run(op, args, kwargs)
        made = self._draws.drawn(op, args)
        return args[0].copy_(made) if base_name(op).endswith("_") else made.double()
