"""Give dense attention masks their names: causal, window, chunk, prefix, padding, documents, and several of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_
from typing import Any

import torch
from torch import Tensor, fx

from ndcompile import runtime
from ndcompile.rules.registry import arguments, updates
from ndcompile.runtime.masks import Mask
from ndcompile.samples import ROWS, draw
from ndcompile.subgraph import COMPARING, NotSmall, Subgraph, base_name, value_of

aten = torch.ops.aten
ATTENTION = aten.scaled_dot_product_attention.default

SIZES = (1, 2, 3, 5, 8, 13)
"""Sequence lengths at which every mask is computed; those around each number of its own computation come on top."""

SMALL = 16
"""Larger numbers that are only compared or added have stand-ins, so that lengths beyond them are short."""

STAND_INS = (23, 38)
"""A name has to hold with each of the two in the place of a large number."""

OPEN = 10**8
"""A larger number is no position: a fill value, or an open end."""

LONGEST = 4096
"""The longest sequence at which a mask is computed."""

MOST = 24
"""More numbers are a table, not a mask."""

MANY = 256
"""Beyond this length two rows are drawn, not one of each kind."""


def recognise_masks(graph: fx.GraphModule, buffers: Mapping[str, Tensor] | None = None) -> fx.GraphModule:
    """Name the masks that equal a named one wherever they are computed: at lengths around each of their numbers and
    beyond, on rows of all kinds of padding, documents and positions (`samples.ROWS`).

    `buffers` are values of the model's buffers; those that a name rests on are in the attention's
    `meta["assumes"]`. Causal and full masks are dropped, with others attention becomes
    `runtime.attention`. A mask that has queries and keys and gets no name stays a tensor; its attention's
    `meta["dense_mask"]` says why.
    """
    held = {name: value for name, value in (buffers or {}).items() if name not in updates(graph)}
    for node, name in _names(graph, held).items():
        given = arguments(node)
        mask = given["attn_mask"]
        if isinstance(name, Mask):
            node.meta["assumes"] = _buffers_of(mask)
        if isinstance(name, Mask) and name.names <= {"causal"}:
            kept = {k: given[k] for k in ("scale", "enable_gqa") if given[k]}
            node.args = (given["query"], given["key"], given["value"], None, given["dropout_p"], name.causal)
            node.kwargs = kept
        elif isinstance(name, Mask) and len(given["query"].meta["sizes"]) == 4:
            _replace(graph, node, given, name)
        elif len(mask.meta["sizes"]) > 1 and mask.meta["sizes"][-2] != 1:
            node.meta["dense_mask"] = name if isinstance(name, str) else "attention is not of [b, h, s, d]"
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _names(graph: fx.GraphModule, held: Mapping[str, Tensor]) -> dict[fx.Node, Mask | str]:
    """The name of the mask of each attention that has one, or why it has none; each mask is looked at once."""
    known: dict[tuple[Any, ...], Mask | str] = {}
    found: dict[fx.Node, Mask | str] = {}
    for node in graph.graph.find_nodes(op="call_function", target=ATTENTION):
        given = arguments(node)
        mask = given["attn_mask"]
        if isinstance(mask, fx.Node) and not given["is_causal"]:
            lengths = tuple(given[name].meta["sizes"][-2] for name in ("query", "key"))
            if (mask, *lengths) not in known:
                known[mask, *lengths] = name_of(mask, lengths, held)
            found[node] = known[mask, *lengths]
    return found


def _buffers_of(mask: fx.Node) -> tuple[str, ...]:
    buffers = [node for node in Subgraph.of(mask).inputs if node.meta["role"] == "buffer"]
    return tuple(name for node in buffers for name in node.meta.get("stands_for", (node.meta["name"],)))


def _replace(graph: fx.GraphModule, node: fx.Node, given: Mapping[str, Any], name: Mask) -> None:
    options = {k: given[k] for k in ("scale", "dropout_p") if given[k]}
    with graph.graph.inserting_before(node):
        tensors = (given["query"], given["key"], given["value"])
        new = graph.graph.call_function(runtime.attention, tensors, name.parts | options)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    graph.graph.erase_node(node)


def name_of(mask: fx.Node, lengths: Sequence[Any], buffers: Mapping[str, Tensor]) -> Mask | str:
    """The mask's name, or why it has none; `lengths` are the sizes of queries and keys."""
    try:
        subgraph = Subgraph.of(mask)
        held = {node: _held(node, buffers) for node in subgraph.inputs if node.meta["role"] != "input"}
        found = [_Search(subgraph, lengths, held, numbers).name() for numbers in _numberings(subgraph, held)]
    except NotSmall as error:
        return str(error)
    return found[0] if all(name == found[0] for name in found) else "its name depends on its numbers"


# ---- numbers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Numbers:
    """The numbers of a subgraph, and those that stand in their place while it is computed."""

    own: frozenset[int]
    stands: Mapping[int, int]

    def put(self, node: fx.Node, value: Any) -> Any:
        """The number to compute with; it keeps its sign and its type."""
        if base_name(node) not in COMPARING or abs(value) not in self.stands:
            return value
        return type(value)(self.stands[int(abs(value))] * (1 if value > 0 else -1))

    @property
    def used(self) -> list[int]:
        return sorted({self.stands.get(n, n) for n in self.own})

    def back(self, number: int) -> int:
        """The number of the graph, or the neighbour of one, that `number` stands for."""
        for real, stand in self.stands.items():
            if abs(number - stand) <= 1:
                return real + number - stand
        return number


def _numberings(subgraph: Subgraph, held: Mapping[fx.Node, Tensor]) -> list[Numbers]:
    """With each of the stand-ins, if there are numbers that need one; of a tensor of numbers the largest counts."""
    uses: dict[int, set[str]] = {}
    every = [*subgraph.numbers(), *(("", _largest(value)) for value in held.values())]
    for base, value in every:
        if 0 < abs(value) < OPEN:
            uses.setdefault(abs(value), set()).add(base)
    free = subgraph.symbols - {"b"} and not held
    large = sorted(n for n, bases in uses.items() if free and n > SMALL and bases <= COMPARING)
    if not large:
        return [Numbers(frozenset(uses), {})]
    return [Numbers(frozenset(uses), _stands(large, base)) for base in STAND_INS]


def _stands(large: Sequence[int], base: int) -> dict[int, int]:
    """Neighbours stay neighbours, and the order stays."""
    found: dict[int, int] = {}
    first, stand = large[0], base
    for number in large:
        if number - first > 2:
            first, stand = number, stand + base
        found[number] = stand + number - first
    return found


def _largest(tensor: Tensor) -> int:
    """The largest number in it that can be a position."""
    if tensor.dtype == torch.bool or not tensor.numel():
        return 0
    numbers = tensor.abs()
    return int(torch.where(numbers < OPEN, numbers, 0).max())


# ---- the search ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sample:
    """A mask at some sizes: bool `[b or 1, 1, s or 1, t]`, and the values that it was computed from."""

    allowed: Tensor
    values: Mapping[fx.Node, Any]
    queries: int
    keys: int

    def of(self, part: Mask) -> Tensor:
        """What a part of a mask lets through here."""
        rows = {k: self.values[v] for k, v in part.parts.items() if isinstance(v, fx.Node)}
        allowed = replace(part, **rows).allowed((0, self.queries), (0, self.keys), torch.device("cpu"))
        assert allowed is not None, "a part is given"
        return allowed


class _Search:
    """Looks for parts that all hold of the mask wherever it is computed, and together are it."""

    def __init__(
        self, subgraph: Subgraph, lengths: Sequence[Any], held: Mapping[fx.Node, Tensor], numbers: Numbers
    ) -> None:
        self.subgraph, self.lengths, self.held, self.numbers = subgraph, lengths, held, numbers
        self.sequences = sorted(subgraph.symbols - {"b"})
        if len(numbers.own) > MOST:
            raise NotSmall(f"it has more than {MOST} numbers in it")

    def name(self) -> Mask:
        """Raises `NotSmall` with the reason where there is none."""
        samples = list(self._samples())
        found = _equal(samples, self._parts())
        if found is None:
            found = _equal(samples, [*self._prefixes(), *self._parts()])
        if found is None:
            raise NotSmall("no named masks together are equal to it")
        found = [self._real(part) for part in found]
        names = [name for part in found for name in part.names]
        if len(set(names)) < len(names):
            raise NotSmall("it has two masks of one kind in it")
        return Mask(**{name: value for part in found for name, value in part.parts.items()})

    def _real(self, part: Mask) -> Mask:
        wide: dict[str, Any] = {k: self.numbers.back(v) for k, v in part.parts.items() if type(v) is int}
        return replace(part, **wide)

    def _parts(self) -> list[Mask]:
        """In the order in which they are wanted."""
        rows = self._rows()
        padding = [Mask(padding=node) for node in rows]
        if self.lengths[0] != self.lengths[1]:
            return padding
        near = sorted({m for n in self.numbers.used for m in (n - 1, n, n + 1) if m > 0})
        windows, chunks = [Mask(window=n) for n in near], [Mask(chunk=n) for n in near if n > 1]
        return [Mask(causal=True), *windows, *chunks, *padding, *(Mask(documents=node) for node in rows)]

    def _prefixes(self) -> list[Mask]:
        if self.lengths[0] != self.lengths[1]:
            return []
        numbers = sorted({m for n in self.numbers.used for m in (n - 1, n, n + 1) if m > 0})
        return [Mask(causal=True, prefix=given) for given in (*numbers, *self._rows())]

    def _rows(self) -> list[fx.Node]:
        """The `[b, t]` of integers or truth values that the mask is made of, the model's inputs first."""
        found = [
            node
            for node in self.subgraph.nodes
            if tuple(map(str, node.meta.get("sizes", ()))) == ("b", str(self.lengths[1]))
            and not node.meta["dtype"].is_floating_point
        ]
        return sorted(found, key=lambda node: node.op != "placeholder")

    # ---- samples -----------------------------------------------------------------------------------------------------

    def _samples(self) -> Iterator[_Sample]:
        """The mask at every length that the model can have."""
        generator = torch.Generator().manual_seed(0)
        missed: list[int] = []
        count = 0
        for length in self._lengths():
            sizes = {symbol: length + 3 * i for i, symbol in enumerate(self.sequences)}
            sizes["b"] = len(ROWS) if self._drawn and length <= MANY else 2
            for _ in range(self._times(length)):
                sample = self._sample(sizes, count, generator)
                if sample is None:
                    missed.append(length)
                    break
                if missed:
                    raise NotSmall(f"it cannot be computed at a length of {missed[0]}")
                count += 1
                yield sample
        if count == 0:
            raise NotSmall("it cannot be computed on its own")

    @property
    def _drawn(self) -> bool:
        return any(node.meta["role"] == "input" for node in self.subgraph.inputs)

    def _lengths(self) -> list[int]:
        if not self.sequences:
            return [2]
        ends = [int(n) for node in self.subgraph.inputs for n in node.meta["sizes"] if str(n).isdigit()]
        around = {m for n in self.numbers.used for m in (n - 1, n, n + 1, 2 * n + 3)}
        found = sorted(n for n in {*SIZES, *around, *ends} if n > 0)
        if found[-1] > LONGEST:
            raise NotSmall(f"its numbers ask for lengths beyond {LONGEST}")
        return found

    def _times(self, length: int) -> int:
        """How often to draw: each time another kind of row of one input meets one of another."""
        return 1 if not self._drawn or length > MANY else 2

    def _sample(self, sizes: Mapping[str, int], shift: int, generator: torch.Generator) -> _Sample | None:
        """None where the model itself has no such length: a buffer ends before."""
        try:
            given = {node: self._given(node, i, sizes, shift, generator) for i, node in enumerate(self.subgraph.inputs)}
            values = self.subgraph.run(sizes, given, self.numbers.put)
        except (RuntimeError, IndexError):
            return None
        mask = values[self.subgraph.root]
        if tuple(mask.shape) != tuple(value_of(size, sizes) for size in self.subgraph.root.meta["sizes"]):
            return None
        queries, keys = (value_of(size, sizes) for size in self.lengths)
        return _Sample(_allowed(mask, queries), values, queries, keys)

    def _given(
        self, node: fx.Node, number: int, sizes: Mapping[str, int], shift: int, generator: torch.Generator
    ) -> Tensor:
        if node in self.held:
            return self.held[node]
        near = {m for n in self.numbers.used for m in (n - 1, n, n + 1)}
        pool = sorted({-1, 0, 1, 2} | near | set(sizes.values()))
        shape = [value_of(size, sizes) for size in node.meta["sizes"]]
        return draw(shape, node.meta["dtype"], pool, number * (2 * shift + 1) + shift, generator)


def _held(node: fx.Node, buffers: Mapping[str, Tensor]) -> Tensor:
    """The value of a buffer; one that stands for those of other blocks has theirs."""
    value = buffers.get(node.meta["name"])
    if value is None or value.is_meta:
        raise NotSmall(f"the values of buffer '{node.meta['name']}' are not known")
    return value.detach().cpu().to(node.meta["dtype"])


def _allowed(mask: Tensor, queries: int) -> Tensor:
    """The mask as truth values, one for all heads."""
    mask = mask[(None,) * (4 - mask.dim())]
    if mask.shape[1] > 1 and not bool((mask == mask[:, :1]).all()):
        raise NotSmall("heads have masks of their own")
    mask = mask[:, :1]
    if mask.dtype == torch.bool:
        return mask
    low = max(-1e30, torch.finfo(mask.dtype).min / 2)
    allowed = mask == 0
    if not bool((allowed | (mask <= low)).all()):
        raise NotSmall("it adds other numbers than 0 and the lowest")
    if not bool(allowed.any(-1).all()) and bool((~allowed & mask.isfinite()).any()):
        raise NotSmall("where a row lets nothing through, what it adds is finite: attention is uniform there")
    return allowed


def _equal(samples: Sequence[_Sample], parts: Sequence[Mask]) -> list[Mask] | None:
    """As few of the parts as together are the mask on every sample, the first ones kept where there is a choice."""
    implied = list(parts)
    for sample in samples:
        implied = [part for part in implied if not bool((sample.allowed & ~sample.of(part)).any())]
    cut = [{part: sample.of(part) for part in implied} for sample in samples]

    def equal(chosen: Sequence[Mask]) -> bool:
        for sample, of in zip(samples, cut, strict=True):
            together = reduce(and_, (of[part] for part in chosen), torch.ones((), dtype=torch.bool))
            if not bool((together == sample.allowed).all()):
                return False
        return True

    if not equal(implied):
        return None
    chosen = implied
    for part in reversed(implied):
        rest = [other for other in chosen if other is not part]
        if equal(rest):
            chosen = rest
    return chosen
