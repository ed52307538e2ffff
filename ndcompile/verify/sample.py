"""Random parameters, inputs and cotangents on which a program and its reference are compared."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from ndcompile.axes import data_axes, data_ranks
from ndcompile.errors import CompileError
from ndcompile.labels import MOST_NUMBERS
from ndcompile.mesh import MeshSpec
from ndcompile.program import Program
from ndcompile.rules.registry import arguments, op_name
from ndcompile.runtime.manifest import as_dtype, holds
from ndcompile.verify.domain import Domain

LONGEST, TRIED = 8192, 8192
"""Up to which length sequences are tried, and how many lengths, or sets of lengths where there are several."""


@dataclass
class Sample:
    """Whole tensors by name; `batches` are the global microbatches of a step, in the order of `inputs`."""

    parameters: dict[str, Tensor]
    trained: frozenset[str]
    aliases: Mapping[str, str]
    buffers: dict[str, Tensor]
    inputs: list[str]
    batches: list[list[Tensor]]
    key: Tensor
    steps: int = 2
    drawn: dict[int, list[Tensor | None]] = field(default_factory=dict)
    """The cotangents of the results, by microbatch."""

    def leaves(self, place: Callable[[str, Tensor], Tensor]) -> dict[str, Tensor]:
        """Copies of the parameters, or of the parts of them that `place` gives, ready to take gradients."""
        made = {name: place(name, whole).clone() for name, whole in self.parameters.items()}
        return {name: x.requires_grad_(name in self.trained) for name, x in made.items()}

    def with_own_buffers(self) -> Sample:
        """The same sample with copies of the buffers, since a forward may write to them."""
        return replace(self, buffers={name: buffer.clone() for name, buffer in self.buffers.items()})

    def named(self) -> dict[str, Tensor]:
        """All of its tensors, by names."""
        groups: dict[str, Mapping[str, Tensor | None]] = dict(parameter=self.parameters, buffer=self.buffers)
        for n, batch in enumerate(self.batches):
            groups[f"microbatch {n}"] = dict(zip(self.inputs, batch, strict=True))
        for n, drawn in self.drawn.items():
            groups[f"cotangents of microbatch {n}"] = {str(i): x for i, x in enumerate(drawn)}
        found = {f"{group} {name}": x for group, held in groups.items() for name, x in held.items() if x is not None}
        return found | {"key": self.key}

    def to(self, device: torch.device) -> Sample:
        """The same sample on a device."""
        return replace(
            self,
            parameters={name: x.to(device) for name, x in self.parameters.items()},
            buffers={name: x.to(device) for name, x in self.buffers.items()},
            batches=[[x.to(device) for x in batch] for batch in self.batches],
            key=self.key.to(device),
        )

    def placeholder(self, node: fx.Node, leaves: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> Tensor:
        """What a placeholder of the reference graph stands for."""
        role, name = node.meta["role"], node.meta.get("name", "")
        if role == "parameter":
            return leaves[self.aliases.get(name, name)]
        if role in ("buffer", "constant"):
            return self.buffers[name]
        return self.key if role == "key" else given[name]

    def cotangents(self, found: Sequence[Any], number: int, domain: Domain) -> list[Tensor | None]:
        if number not in self.drawn:
            self.drawn[number] = [
                domain.stored(domain.draw(y.shape), y.dtype) if isinstance(y, Tensor) and y.requires_grad else None
                for y in found
            ]
        return self.drawn[number]


def draw(
    program: Program, domain: Domain, model: nn.Module | None = None, microbatches: int = 1, steps: int = 2,
    times: int = 1,
) -> Sample:  # fmt: skip
    """A sample at the smallest sizes that the program takes, or with `times` as many samples.

    Whole numbers in buffers are the model's own: the program has those that it could keep, of others it must be given.
    """
    manifest = program.manifest
    placeholders = {n.meta["name"]: n for n in program.reference.graph.find_nodes(op="placeholder") if "name" in n.meta}
    sizes = symbol_sizes(program)
    sizes["b"] *= times
    buffers = {name: _buffer(name, node, domain, model) for name, node in placeholders.items()
               if node.meta["role"] in ("buffer", "constant")}  # fmt: skip
    numbers = {name: numbers_of(program.reference, placeholders[name]) for name in manifest.inputs}
    batches = [
        [_input(placeholders[name], sizes, numbers[name], domain) for name in manifest.inputs]
        for _ in range(microbatches)
    ]
    return Sample(
        {name: domain.stored(domain.draw(p.shape), as_dtype(p.dtype)) for name, p in manifest.parameters.items()},
        frozenset(name for name, plan in manifest.parameters.items() if plan.requires_grad),
        manifest.aliases, buffers, list(manifest.inputs), batches,
        torch.tensor(int(torch.randint(1 << 62, (), generator=domain.generator))), steps,
    ).to(domain.device)  # fmt: skip


def symbol_sizes(program: Program) -> dict[str, int]:
    """A size for each symbol: `_samples` for each data rank, and the shortest sequences that all axes divide and for
    which the program's conditions hold. (The batch is as small as the mesh lets it be, whatever was asked of it.)
    """
    halves = 2 if program.manifest.halves else 1
    batch = {"b": _samples(program.mesh) * data_ranks(program.mesh) * halves}
    symbols = sorted({d for plan in program.manifest.input_plans for d in plan.dims if isinstance(d, str)} - {"b"})
    conditions = [text for text in program.manifest.conditions if not re.search(r"\bb\b", text)]
    units = [math.lcm(*program.manifest.multiples.get(symbol, {}).values(), 1) for symbol in symbols]
    least = [unit * max(1, -(-(6 + number) // unit)) for number, unit in enumerate(units)]
    for lengths in _upwards(least, units):
        found = dict(zip(symbols, lengths, strict=True))
        if all(holds(condition, found) for condition in conditions):
            return batch | found
    raise CompileError(
        f"no lengths up to {LONGEST} were found for which the program holds",
        why="; ".join(conditions),
        tries="example inputs for which other answers are given",
    )


def _upwards(least: Sequence[int], units: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Lengths from these on, by their sum; of several sequences fewer each. Shorter ones stand last."""
    yield tuple(least)
    count = round(TRIED ** (1 / max(1, len(least))))
    longer = [range(first, LONGEST + 1, unit)[:count] for first, unit in zip(least, units, strict=True)]
    yield from sorted(itertools.product(*longer), key=lambda lengths: (sum(lengths), lengths))
    yield from itertools.product(*(range(unit, first, unit) for first, unit in zip(least, units, strict=True)))


def _samples(mesh: MeshSpec) -> int:
    """How many a data rank has: two, or the next number that is no product of data axes' ranks. Where a program forgot
    to count these ranks, one sample would be left, which broadcasts. Three for one rank: of 2 the square is the double.
    """
    sizes = [mesh.size(axis) for axis in data_axes(mesh)]
    ranks = {math.prod(some) for count in range(len(sizes) + 1) for some in itertools.combinations(sizes, count)}
    return next(n for n in itertools.count(2 if ranks > {1} else 3) if n not in ranks)


def _input(node: fx.Node, sizes: Mapping[str, int], numbers: Numbers, domain: Domain) -> Tensor:
    shape = [int(d) if isinstance(d, int) else size_at(d, sizes) for d in node.meta["sizes"]]
    dtype, generator = node.meta["dtype"], domain.generator
    if dtype.is_floating_point:
        return domain.stored(domain.draw(shape), dtype)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    low = int(not shape and numbers.high > 1)  # one number is a count, by which a model may divide
    ids = torch.randint(low, numbers.high, shape, generator=generator, dtype=dtype)
    for ignored in numbers.ignored:
        for number, labels in enumerate(ids.flatten(1) if ids.dim() > 1 else ids.unsqueeze(1)):
            labels[_masked(number, len(ids), len(labels), generator)] = ignored
    return _with_ends(ids, numbers, generator)


def _with_ends(ids: Tensor, numbers: Numbers, generator: torch.Generator) -> Tensor:
    """The least number and the largest stand somewhere: of many a sample may lack them, and 0 is what a mask tells."""
    flat, ends = ids.flatten(), torch.tensor([0, numbers.high - 1], dtype=ids.dtype)
    counted = torch.isin(flat, torch.tensor(numbers.ignored, dtype=ids.dtype), invert=True).nonzero().flatten()
    if numbers.high > 2 and len(counted) > len(ends):
        flat[counted[torch.randperm(len(counted), generator=generator)[: len(ends)]]] = ends
    return flat.view_as(ids)


def _masked(number: int, samples: int, length: int, generator: torch.Generator) -> Tensor:
    """Which labels of a sample are ignored, at random places, never all of several. The more, the later the sample, so
    that the ranks of no data axis count the same: of one label a sample those of the second, fifth and sixth.
    """
    if length == 1:
        return torch.zeros(int(number in (1, 4, 5)), dtype=torch.int64)
    count = 1 + number * max(0, length - 2) // samples
    return torch.randperm(length, generator=generator)[:count]


def size_at(size: Any, sizes: Mapping[str, int]) -> int:
    return int(size.subs({symbol: sizes[str(symbol)] for symbol in size.free_symbols}))


def _buffer(name: str, node: fx.Node, domain: Domain, model: nn.Module | None) -> Tensor:
    held = dict(model.named_buffers()) if model is not None else {}
    value = node.meta.get("value", held.get(name))
    if node.meta["role"] == "constant" and isinstance(value, Tensor):
        return domain.encode(value)
    if node.meta["dtype"].is_floating_point:
        return domain.stored(domain.draw([int(d) for d in node.meta["sizes"]], positive=True), node.meta["dtype"])
    if not isinstance(value, Tensor) or value.is_meta:
        raise CompileError(
            f"verify needs the values of buffer '{name}'",
            why="it holds whole numbers, which stand for positions or choices, so that random ones would not do; the "
            f"program keeps up to {MOST_NUMBERS:,} that were known when it was compiled",
            tries="nd.verify(program, model) with a model that is not on the meta device",
        )
    return value[tuple(slice(int(n)) for n in node.meta["sizes"])]


@dataclass(frozen=True)
class Numbers:
    """What an integer input may hold: numbers below `high`, and those that some loss ignores and no use refuses."""

    high: int
    ignored: tuple[int, ...] = ()


def numbers_of(graph: fx.GraphModule, node: fx.Node) -> Numbers:
    """What an integer input may hold, from all of its uses.

    A use as ids of a table takes numbers below the table's rows, one as targets those below the classes and the one
    that it ignores. Without such a use they are 0 and 1, and one number by itself is from 1 to 9.
    """
    uses: list[Numbers] = []
    seen, front = {node}, [node]
    while front:
        value = front.pop()
        for user in value.users:
            name = op_name(user.target) if user.op == "call_function" else ""
            if name == "aten.embedding.default" and arguments(user)["indices"] is value:
                uses.append(Numbers(int(arguments(user)["weight"].meta["sizes"][0])))
            elif name == "runtime.cross_entropy" and arguments(user)["target"] is value:
                classes = int(arguments(user)["logits"].meta["sizes"][1])
                uses.append(Numbers(classes, (arguments(user)["ignore_index"],)))
            elif user not in seen and "dtype" in user.meta and name.split(".")[-2:-1] and _keeps(name):
                seen.add(user)
                front.append(user)
    high = min((use.high for use in uses), default=2 if node.meta["sizes"] else 10)
    ignored = dict.fromkeys(number for use in uses for number in use.ignored)
    return Numbers(high, tuple(n for n in ignored if all(n in use.ignored or 0 <= n < use.high for use in uses)))


def _keeps(name: str) -> bool:
    """Whether an op hands numbers on as they are, or keeps them in a range."""
    return (
        name.split(".")[1]
        in (
            "view reshape flatten unsqueeze squeeze alias slice to expand transpose contiguous clone cat pad "
            "constant_pad_nd select permute _to_copy detach clamp clamp_min remainder"
        ).split()
    )
