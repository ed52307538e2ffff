"""What emitted classes derive from: `Block` for repeated blocks, `Root` for what stands between them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from ndcompile.runtime import private
from ndcompile.runtime.harvest import Forward, Harvest
from ndcompile.runtime.lane import Lane
from ndcompile.runtime.mesh import Mesh
from ndcompile.runtime.schedule import compile_options
from ndcompile.runtime.transport import Collectives, Transport
from ndcompile.runtime.way import Weight
from ndcompile.runtime.weights import Bucket


@dataclass
class State:
    """What the emitted classes of one program share: parameters and buffers by full name, and how they are cast.

    `shapes` are the parameters' shapes, whole along gathered axes and local along all others. Blocks in `without` are
    left out, and loops run over the others (verification runs a few rounds of many). While `accumulating`, gradients
    are not summed over the axes on which parameters are whole. Weights and gradients travel by `transport`.
    """

    mesh: Mesh
    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    shapes: Mapping[str, tuple[int, ...]]
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    order: list[Bucket] = field(default_factory=list)
    without: frozenset[str] = frozenset()
    accumulating: bool = False
    transport: Transport = field(default_factory=Collectives)
    _forward: Forward | None = None
    _ordered: bool = False

    def __post_init__(self) -> None:
        held = [private.local(p) for p in self.parameters.values()]
        self.device = held[0].device if held else torch.device("cpu")
        self.lane = Lane(self.device)

    def bucket(self, weights: Mapping[str, Weight], prefix: str) -> Bucket:
        """The bucket of a segment; names starting with `/` are full ones, others stand below `prefix`."""
        full = {
            key: w._replace(name=w.name[1:] if w.name[0] == "/" else f"{prefix}.{w.name}") for key, w in weights.items()
        }
        return Bucket(
            self.mesh, full, self.parameters, self.shapes, self.compute, self.reduce, self.lane, self.transport
        )  # fmt: skip

    @contextmanager
    def forward(self, leaves: Mapping[str, Tensor] | None = None) -> Iterator[None]:
        """One call of the program: all gradients that its backward brings are one harvest, of the parameters or of
        `leaves` in their place.
        """
        ends = self.parameters if leaves is None else leaves
        for bucket in self.order:
            bucket.release()  # a backward that raised may have left what it had started
        self._forward = Forward.of(Harvest(ends, self.lane, None if self.accumulating else self._flush))
        try:
            yield
        finally:
            self._forward = None
            self._ordered = True

    def settle(self) -> None:
        """Drop what was started ahead, and wait for all that moves."""
        for bucket in self.order:
            bucket.release()
        self.lane.join_all()

    def drop_deferred(self) -> None:
        """Forget the gradients that microbatches have held back."""
        for bucket in self.order:
            bucket.defer({})

    def _flush(self, harvest: Harvest) -> None:
        for bucket in self.order:
            bucket.flush(harvest)

    @contextmanager
    def gathered(self, bucket: Bucket, reshard: bool) -> Iterator[tuple[Tensor, ...]]:
        """The bucket's weights; the first pass learns the order of buckets, so that later ones gather ahead."""
        if bucket not in self.order:
            if self.order:
                self.order[-1].next, bucket.previous = bucket, self.order[-1]
            self.order.append(bucket)
        soon = self._ordered and bucket is self.order[-1]  # backward asks for it at once
        with bucket.gathered(self._forward, soon or not reshard, self.accumulating) as weights:
            yield weights


class Uncompiled:
    """A context whose two ends `torch.compile` leaves as they are; what stands inside may be compiled."""

    def __init__(self, inner: AbstractContextManager[Any]) -> None:
        self._inner = inner

    @torch.compiler.disable
    def __enter__(self) -> Any:
        return self._inner.__enter__()

    @torch.compiler.disable
    def __exit__(self, *raised: Any) -> bool | None:
        return self._inner.__exit__(*raised)


class Block:
    """One repeated block, at one place of the model: `forward` gathers its weights, `compute` is pure."""

    weights: ClassVar[Mapping[str, Weight]] = {}
    compute: Any
    forward: Any

    def __init_subclass__(cls) -> None:
        cls.forward = torch.compiler.disable(cls.forward, recursive=False)

    def __init__(self, state: State, path: str) -> None:
        self._state, self._path = state, path
        self._bucket = state.bucket(self.weights, path)

    def __call__(self, *args: Tensor) -> Any:
        return self.forward(*args)

    @torch.compiler.disable
    def gathered(self, reshard: bool = True) -> Uncompiled:
        """The block's weights, for the length of a with-block; with `reshard=False` backward finds them there still."""
        return Uncompiled(self._state.gathered(self._bucket, reshard))

    def buffer(self, name: str) -> Tensor:
        """The block's own buffer of that name."""
        return self._state.buffers[f"{self._path}.{name}"]


class Root:
    """The whole model: its stretches between blocks are pure functions, its `forward` is the order of all."""

    weights: ClassVar[Mapping[str, Mapping[str, Weight]]] = {}
    blocks: ClassVar[Mapping[str, type[Block] | tuple[type[Block], ...]]] = {}
    """By place; of a block that is called in several ways (without a gradient, say) a class for each."""
    forward: Any

    def __init_subclass__(cls) -> None:
        cls.forward = torch.compiler.disable(cls.forward, recursive=False)

    def __init__(self, state: State) -> None:
        self._state = state
        self._buckets = {title: state.bucket(weights, "") for title, weights in self.weights.items()}
        self._blocks = {
            path: {kind: kind(state, path) for kind in kinds}
            for text, kinds in self.classes().items()
            for path in paths(text)
            if path not in state.without
        }

    @classmethod
    def classes(cls) -> dict[str, tuple[type[Block], ...]]:
        """The classes of the blocks, by place."""
        return {text: kind if isinstance(kind, tuple) else (kind,) for text, kind in cls.blocks.items()}

    @torch.compiler.disable
    def gathered(self, title: str, reshard: bool = True) -> Uncompiled:
        """The weights of one stretch of the root, for the length of a with-block; see `Block.gathered`."""
        return Uncompiled(self._state.gathered(self._buckets[title], reshard))

    @torch.compiler.disable(recursive=False)
    def __call__(self, *inputs: Tensor) -> Any:
        with Uncompiled(self._state.forward()):
            return self.forward(*inputs)

    def block(self, path: str, kind: type[Block] | None = None) -> Block:
        """The block of a place; `kind` says which, where it is called in several ways."""
        found = self._blocks[path]
        return found[kind] if kind else next(iter(found.values()))

    def list(
        self, path: str, start: int = 0, stop: int | None = None, step: int = 1, kind: type[Block] | None = None
    ) -> list[Block]:
        """The blocks of a list, in order; with numbers those of a slice, with `kind` those that are called so."""
        found = [place for place, kinds in self._blocks.items() if kind is None or kind in kinds]
        numbers = sorted(int(place.rpartition(".")[2]) for place in found if place.rpartition(".")[0] == path)
        return [self.block(f"{path}.{n}", kind) for n in numbers if stop is None or n in range(start, stop, step)]

    def buffer(self, name: str) -> Tensor:
        return self._state.buffers[name]

    @torch.compiler.disable
    def update(self, values: Mapping[str, Tensor]) -> None:
        """Write the buffers' new values, which are equal on every rank."""
        with torch.no_grad():
            for name, value in values.items():
                self._state.buffers[name].copy_(value)

    @classmethod
    def compile(cls, copies: bool, **options: Any) -> None:
        """Put `torch.compile(…, **options)` around every pure function, once for all equal blocks. `copies` tells that
        activations are exchanged so."""
        for owner in {cls, *itertools.chain(*cls.classes().values())}:
            for name, function in list(vars(owner).items()):
                if isinstance(function, staticmethod):
                    given = compile_options(options, hasattr(function.__func__, "halved"), copies)
                    setattr(owner, name, staticmethod(torch.compile(function.__func__, **given)))


def paths(text: str) -> list[str]:
    """`layers[0:2]` is `layers.0` and `layers.1`."""
    path, _, numbers = text.rstrip("]").partition("[")
    return [f"{path}.{n}" for n in range(*(int(n) for n in numbers.split(":")))]
