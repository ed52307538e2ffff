"""What a model itself checkpoints (`torch.utils.checkpoint`), seen while it is traced."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from ndcompile.errors import CompileError
from ndcompile.runtime import private


@dataclass
class _Part:
    """A call of a block, or of checkpoint, that is going on: the blocks and checkpoints in it, and its own ops."""

    block: str = ""
    blocks: list[str] = field(default_factory=list)
    checkpoints: int = 0
    ops: int = 0


@dataclass
class Checkpoints:
    """The blocks that are checkpointed whole, from outside or from inside; and why another checkpoint is refused."""

    in_blocks: bool = True
    """Whether the model has blocks."""
    blocks: set[str] = field(default_factory=set)
    refused: CompileError | None = None
    _inside: set[str] = field(default_factory=set)
    _open: list[_Part] = field(default_factory=list)

    @contextmanager
    def seen(self) -> Iterator[None]:
        """While it holds, calls of checkpoint are calls of the function, and are noted."""
        with private.checkpoint_calls(self._checkpoint):
            yield

    def op(self, function: Any) -> None:
        """A function of torch's is called; what only asks for a tensor's form computes nothing."""
        asks = function in FORMS or getattr(function, "__name__", "") == "__get__"
        if self._open and not asks and getattr(function, "namespace", "") != "ndcompile":
            self._open[-1].ops += 1

    @contextmanager
    def block(self, path: str) -> Iterator[None]:
        """A block is called."""
        part = _Part(path)
        if self._open:
            self._open[-1].blocks.append(path)
        with self._within(part):
            yield
        if part.checkpoints == 1 and not part.ops:
            self._inside.add(path)
            self.blocks.add(path)
        elif part.checkpoints:
            self._refuse(f"on a part of block '{path}'")

    def again(self, path: str, like: str) -> None:
        """A block is called of which all is known from the call of another one."""
        if self._open:
            self._open[-1].blocks.append(path)
        if like in self._inside:
            self._inside.add(path)
            self.blocks.add(path)

    @contextmanager
    def _checkpoint(self, selective: bool) -> Iterator[None]:
        part = _Part()
        with self._within(part):
            yield
        if selective:
            self._refuse("with a policy of its own", ("linear", "attention"))
        elif self._open and self._open[-1].block and not part.blocks and not part.checkpoints:
            self._open[-1].checkpoints += 1
        elif len(part.blocks) == 1 and not part.ops and not part.checkpoints and not self._open:
            self.blocks.add(part.blocks[0])
        elif len(part.blocks) > 1:
            self._refuse(f"on {len(part.blocks)} blocks at once")
        else:
            self._refuse("on what is not one block")

    @contextmanager
    def _within(self, part: _Part) -> Iterator[None]:
        self._open.append(part)
        try:
            yield
        finally:
            self._open.pop()

    def _refuse(self, what: str, instead: str | tuple[str, ...] = "block") -> None:
        place = "which takes the place of the model's own checkpoints"
        other = f"remat={instead!r}, {place}" if self.in_blocks else "an nn.ModuleList of what is to be recomputed"
        self.refused = self.refused or CompileError(
            f"the model calls torch.utils.checkpoint {what}",
            source=_caller(),
            why="backward recomputes whole blocks (children of an nn.ModuleList), by the option remat",
            tries=(other, "remat='none', to recompute nothing"),
        )


FORMS = frozenset({Tensor.size, Tensor.dim, Tensor.stride, Tensor.numel, Tensor.is_contiguous, Tensor.detach})


def _caller() -> str | None:
    """The line of the model that is being traced."""
    here = Path(__file__).parent
    for frame in reversed(traceback.extract_stack()):
        if not any(part in frame.filename for part in ("/torch/", "contextlib", str(here))):
            return f"{Path(frame.filename).name}:{frame.lineno}   {frame.line or ''}"
    return None
