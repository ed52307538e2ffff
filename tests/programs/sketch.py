"""A small model as data, with the mesh and the pins that it is compiled for; it prints as the Python that runs."""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

HEAD = """\
import math

import torch
from torch import nn
from torch.nn import functional as F

import ndcompile as nd
"""


@dataclass(frozen=True)
class Statement:
    """Lines of a forward, and the names that they make or change."""

    targets: tuple[str, ...]
    text: str

    @property
    def uses(self) -> frozenset[str]:
        """Every name that is read."""
        return frozenset(node.id for node in ast.walk(ast.parse(self.text)) if isinstance(node, ast.Name))


@dataclass(frozen=True)
class Body:
    """A module's class: the lines of its `__init__`, those of its `forward`, and what it returns."""

    name: str
    arguments: tuple[str, ...]
    setup: tuple[str, ...]
    statements: tuple[Statement, ...]
    result: str

    def __str__(self) -> str:
        lines = [f"class {self.name}(nn.Module):", "    def __init__(self):", "        super().__init__()"]
        lines += [f"        {line}" for line in self.setup]
        lines += ["", f"    def forward(self, {', '.join(self.arguments)}):"]
        lines += [f"        {line}" for statement in self.statements for line in statement.text.splitlines()]
        return "\n".join([*lines, f"        return {self.result}", ""])

    @property
    def text(self) -> str:
        """All that refers to members."""
        return "\n".join([*(s.text for s in self.statements), self.result])

    def needed(self) -> Body:
        """Without the members that nothing refers to, and the statements that only give unused sizes names."""
        used = frozenset(n.id for n in ast.walk(ast.parse(self.result)) if isinstance(n, ast.Name))
        used = used.union(*(s.uses for s in self.statements if s.targets != SIZES))
        statements = tuple(s for s in self.statements if s.targets != SIZES or used & set(SIZES))
        body = Body(self.name, self.arguments, self.setup, statements, self.result)
        return Body(self.name, self.arguments, tuple(_needed(self.setup, members(body.text))), statements, self.result)

    def with_arguments(self, names: tuple[str, ...]) -> Body:
        return replace(self, arguments=names)


SIZES = ("b", "s")
"""The names of the batch's and the sequence's size in a forward."""


@dataclass(frozen=True)
class Input:
    """A tensor argument: its dims (numbers, `b`, `s`), and below which number its integers are; 0: floats, 1: bools."""

    name: str
    dims: tuple[int | str, ...]
    high: int = 0

    def tensor(self, sizes: dict[str, int]) -> Tensor:
        shape = tuple(int(sizes.get(str(d), d)) for d in self.dims)
        if self.high == 1:
            return torch.rand(shape) < 0.5
        return torch.randint(self.high, shape) if self.high else torch.randn(shape)

    def text(self, sizes: dict[str, int]) -> str:
        shape = ", ".join(str(sizes.get(str(d), d)) for d in self.dims)
        if self.high == 1:
            return f"torch.rand({shape}) < 0.5"
        return f"torch.randint({self.high}, ({shape},))" if self.high else f"torch.randn({shape})"

    @property
    def symbols(self) -> dict[int, str]:
        return {number: dim for number, dim in enumerate(self.dims) if isinstance(dim, str)}


@dataclass(frozen=True)
class Sketch:
    """A model (its own class last, those of its parts before), its inputs, and how it is compiled."""

    bodies: tuple[Body, ...]
    inputs: tuple[Input, ...]
    mesh: str
    pins: tuple[tuple[str, str, str], ...] = ()
    """Name or wildcard, axis, placement."""
    batch: int = 4
    length: int = 6
    training: bool = True

    @property
    def source(self) -> str:
        return "\n\n".join([HEAD, *(str(body) for body in self.bodies)])

    @property
    def sizes(self) -> dict[str, int]:
        return {"b": self.batch, "s": self.length}

    @property
    def dynamic_dims(self) -> dict[str, dict[int, str]]:
        return {given.name: given.symbols for given in self.inputs}

    def with_pins(self, pins: tuple[tuple[str, str, str], ...]) -> Sketch:
        return replace(self, pins=pins)

    def __str__(self) -> str:
        """A file that compiles and verifies it."""
        pins = ", ".join(f'"{name}": {{"{axis}": {placement}}}' for name, axis, placement in self.pins)
        inputs = ", ".join(f"{given.name}={given.text(self.sizes)}" for given in self.inputs)
        return "\n".join(
            [
                self.source, "", "torch.manual_seed(0)", f"model = Model(){'' if self.training else '.eval()'}",
                f"inputs = dict({inputs})",
                f"program = nd.compile(model, {self.mesh!r}, inputs, dynamic_dims={self.dynamic_dims},",
                f"                     placements={{{pins}}})", "print(nd.verify(program, model, seeds=1))", "",
            ]
        )  # fmt: skip


_FILES = iter(range(1 << 62))


def load(source: str) -> dict[str, Any]:
    """What the source defines; tracebacks and the compiler's errors show its lines."""
    name = f"sketch_{next(_FILES)}.py"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    found: dict[str, Any] = {"__name__": "sketch"}
    exec(compile(source, name, "exec"), found)
    return found


def build(sketch: Sketch, seed: int = 0) -> nn.Module:
    """The model with seeded weights."""
    torch.manual_seed(seed)
    model: nn.Module = load(sketch.source)["Model"]()
    return model.train(sketch.training)


def inputs(sketch: Sketch, sizes: dict[str, int], seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {given.name: given.tensor(sizes) for given in sketch.inputs}


def members(text: str) -> set[str]:
    """The members that a text refers to."""
    return set(re.findall(r"self\.(\w+)", text))


def placement(text: str) -> Any:
    """A pin's placement from its text."""
    import ndcompile as nd

    return eval(text, {"nd": nd, **_torch_placements()})


def _torch_placements() -> dict[str, Any]:
    from torch.distributed.tensor import Replicate, Shard

    return {"Shard": Shard, "Replicate": Replicate}


def _needed(setup: tuple[str, ...], used: set[str]) -> Iterator[str]:
    """The lines that make members that are used, or that those need; `unused…` are kept on purpose."""
    lines = [(line, re.search(r"self\.(?:register_buffer\(\")?(\w+)", line)) for line in setup]
    owners = [(line, found[1]) for line, found in lines if found]
    while True:
        more = {m for line, owner in owners if owner in used for m in members(line)} - used
        if not more:
            return (line for line, owner in owners if owner in used or owner.startswith("unused"))
        used = used | more


def names_in(texts: Iterable[str]) -> set[str]:
    """All names in some lines."""
    return {node.id for text in texts for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
