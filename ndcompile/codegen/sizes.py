"""Names for sizes: dims that an op ties together are one class, and a class has one name in the emitted text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
from torch import fx

from ndcompile.codegen.made_sizes import Texts, made_sizes
from ndcompile.codegen.names import value_name
from ndcompile.codegen.reached import POSITIONS, SLICES, is_input, reached
from ndcompile.codegen.written import written
from ndcompile.mesh import MeshSpec
from ndcompile.rules.notation import Signature
from ndcompile.rules.registry import arguments, op_name, operands
from ndcompile.size import ONE, Size

Element = tuple[str, int | str]
"""A dim of a node, or a factor of its rule."""

HINTS = {
    "scaled_dot_product_attention": {1: "heads", 3: "head_dim"},
    "attention": {1: "heads", 3: "head_dim"},
    "attention_with_dropout": {1: "heads", 3: "head_dim"},
}
CONFIG = {
    "hidden_size": "hidden", "n_embd": "hidden", "d_model": "hidden", "intermediate_size": "ffn", "d_ff": "ffn",
    "vocab_size": "vocab", "num_key_value_heads": "kv_heads", "max_position_embeddings": "positions",
}  # fmt: skip
"""What transformers' configs call the sizes that get a name of their own."""


@dataclass(frozen=True)
class SizeFacts:
    """The numbers behind the names; of each value its dims' texts (None where a dim is symbolic); and which texts are
    equal whatever the numbers are."""

    table: dict[str, int]
    dims: dict[str, tuple[str | None, ...]]
    equal: list[tuple[str, str]]
    least: list[tuple[str, int]]
    """Below which number a text may not be, since a place in the dim is written as one."""
    places: list[tuple[str, str]]
    """Names of places in a dim, with the dim's text."""
    full: list[tuple[str, tuple[str, ...]]]
    """Texts of factors that have one element on each rank of these axes, since what is minor to them is sharded too."""


@dataclass
class SizeNames:
    """Gives each dim of each node a text, and collects the table of numbers behind the names."""

    mesh: MeshSpec
    config: Mapping[str, Any]
    parent: dict[Element, Element] = field(default_factory=dict)
    number: dict[Element, int] = field(default_factory=dict)
    names: dict[Element, str] = field(default_factory=dict)
    factors: dict[str, Signature] = field(default_factory=dict)
    table: dict[str, int] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    values: set[str] = field(default_factory=set)
    """What values are called, and so no size may be: a layer may be called `hidden`, or `n2`."""

    def learn(self, graph: fx.GraphModule, signatures: Mapping[fx.Node, Signature]) -> None:
        """Tie dims together along every op, then name the classes that have a usual name."""
        self.values = {value_name(node) for node in graph.graph.nodes if "shape" in node.meta}
        for node in graph.graph.nodes:
            for dim, size in enumerate(node.meta.get("shape", ())):
                if size.constant and size != ONE:
                    self.number[self.root((node.name, dim))] = size.coefficient
        for node, signature in signatures.items():
            self._tie(node, signature)
        for node in graph.graph.nodes:
            if "move" in node.meta:
                for dim in range(len(node.meta["shape"])):
                    self._union((node.name, dim), (node.args[0].name, dim))
        self._hint(graph)

    def root(self, element: Element) -> Element:
        path = []
        while self.parent.setdefault(element, element) != element:
            path.append(element)
            element = self.parent[element]
        for passed in path:
            self.parent[passed] = element
        return element

    def _union(self, a: Element, b: Element) -> None:
        a, b = self.root(a), self.root(b)
        if a != b:
            self.parent[b] = a
            self.number.setdefault(a, self.number.get(b, 0))

    def _tie(self, node: fx.Node, signature: Signature) -> None:
        self.factors[node.name] = signature
        tensors = [*zip(operands(node), signature.operands, strict=True), (node, signature.output)]
        for factor, size in signature.sizes.items():
            if size.constant and size != ONE:
                self.number[self.root((node.name, factor))] = size.coefficient
        for tensor, dims in tensors:
            for dim, factors in enumerate(dims):
                if len(factors) == 1 and tensor.meta["shape"][dim] == signature.sizes[factors[0]]:
                    self._union((node.name, factors[0]), (tensor.name, dim))

    def _hint(self, graph: fx.GraphModule) -> None:
        for node in graph.graph.nodes:
            base = op_name(node.target).split(".")[1] if node.op == "call_function" else ""
            for dim, name in HINTS.get(base, {}).items():
                for tensor in (node, operands(node)[0]):
                    self._name((tensor.name, dim), name)
        for node in graph.graph.nodes:
            if node.op == "call_function" and op_name(node.target) == "aten.embedding.default":
                table, indices = operands(node)[:2]
                self._name((table.name, 0), "vocab" if is_input(indices) else "positions")
                self._name((table.name, 1), "hidden")
        known = [(self.config[key], name) for key, name in CONFIG.items() if isinstance(self.config.get(key), int)]
        values = [value for value, _ in known]
        by_value = {value: name for value, name in known if values.count(value) == 1}
        for element, value in list(self.number.items()):
            root = self.root(element)
            if value in by_value and root not in self.names and self.table.get(by_value[value], value) == value:
                self._name(root, by_value[value])

    def _name(self, element: Element, name: str) -> str:
        root = self.root(element)
        if root in self.names:
            return self.names[root]
        value = self.number.get(root, 0)
        if not value:
            return ""
        while name in self.values or self.table.setdefault(name, value) != value:
            name += "_"
        self.names[root] = name
        return name

    def whole(self, node: fx.Node, dim: int) -> str:
        """The global size of a dim."""
        dim %= len(node.meta["sizes"])
        size = node.meta["sizes"][dim]
        if not isinstance(size, int):
            return self.expression(size)
        if size in (0, 1):
            return str(size)
        factors = self.factors[node.name].output[dim] if node.name in self.factors else ()
        if len(factors) > 1:
            return " * ".join(self._factor(node, f) for f in factors)
        return self._name((node.name, dim), f"n{size}")

    def _factor(self, node: fx.Node, factor: str) -> str:
        size = self.factors[node.name].sizes[factor]
        return self._name((node.name, factor), f"n{size.coefficient}") if size.constant else str(size)

    def place(self, node: fx.Node, dim: int, number: int, name: str) -> str:
        """A place in a dim: a number, or where that is large a name in the table."""
        if number < POSITIONS:
            return str(number)
        while name in self.values or self.table.setdefault(name, number) != number:
            name += "_"
        self.places[name] = self.whole(node, dim)
        return name

    def facts(self, graph: fx.GraphModule) -> SizeFacts:
        """What holds between the names, for whoever chooses other numbers for them."""
        dims, equal = dict[str, tuple[str | None, ...]](), set[tuple[str, str]]()
        for node in graph.graph.nodes:
            if "sizes" in node.meta:
                sizes = enumerate(node.meta["sizes"])
                dims[node.name] = tuple(self.whole(node, d) if isinstance(n, int) else None for d, n in sizes)
        for node in graph.graph.nodes:
            for value, dim, text in self._products(node):
                equal.add((str(dims[value.name][dim]), text))
            for dim, name in enumerate(dims.get(node.name, ())):
                also = self.names.get(self.root((node.name, dim)))
                if name is not None and also is not None:
                    equal.add((also, name))
            equal |= set(self._sums(node, dims)) | set(self._beside_symbols(node))
        least = [found for node in graph.graph.nodes for found in reached(node, self.whole, self.fraction)]
        full = sorted({found for node in graph.graph.nodes for found in self._full(node)})
        pairs = sorted(pair for pair in equal if pair[0] != pair[1])
        return SizeFacts(dict(self.table), dims, pairs, least, list(self.places.items()), full)

    def _full(self, node: fx.Node) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Of dims made of several factors: those which axes fill, while others shard a factor behind them."""
        signature = self.factors.get(node.name)
        if signature is None:
            return
        for value, dims in zip([*operands(node), node], [*signature.operands, signature.output], strict=True):
            layout = value.meta["layout"]
            for factors, axes in zip(dims, layout.dims, strict=True):
                left = [a for a in axes if not layout.on(a).within]
                for factor in factors if len(factors) > 1 else ():
                    size = signature.sizes[factor]
                    ends = [i for i in range(1, len(left)) if size == Size(self.mesh.size(*left[:i]))]
                    if ends:
                        yield self._factor(node, factor), tuple(left[: ends[0]])
                        left = left[ends[0] :]
                    elif size != ONE:
                        break

    def _products(self, node: fx.Node) -> Iterator[tuple[fx.Node, int, str]]:
        """Operands' dims that an op takes as products of others."""
        signature = self.factors.get(node.name)
        if signature is None:
            return
        for value, factors in zip(operands(node), signature.operands, strict=True):
            for dim, several in enumerate(factors):
                if len(several) > 1 and isinstance(value.meta["sizes"][dim], int):
                    yield value, dim, " * ".join(self._factor(node, f) for f in several)

    def _beside_symbols(self, node: fx.Node) -> Iterator[tuple[str, str]]:
        """A factor of a dim that has a symbol too is written as a number: `16*b` rows."""
        signature = self.factors.get(node.name)
        if signature is None or op_name(node.target) not in WRITTEN_SHAPES:
            return
        for dim, factors in enumerate(signature.output):
            if not isinstance(node.meta["sizes"][dim], int):
                constant = [f for f in factors if signature.sizes[f].constant and signature.sizes[f] != ONE]
                yield from ((self._factor(node, f), str(signature.sizes[f])) for f in constant)

    def _sums(self, node: fx.Node, dims: Mapping[str, Texts]) -> Iterator[tuple[str, str]]:
        """Dims that are put together from others, or cut from them."""
        name = op_name(node.target) if node.op == "call_function" else ""
        yield from made_sizes(node, dims)
        if "sizes" not in node.meta:
            return
        if name == "_operator.getitem":
            yield from self._pieces(node, dims)
        elif name == "aten.cat.default":
            dim = arguments(node)["dim"] % len(node.meta["sizes"])
            if isinstance(node.meta["sizes"][dim], int):
                yield str(dims[node.name][dim]), " + ".join(str(dims[v.name][dim]) for v in operands(node))
        elif name in SLICES:
            yield from self._slices(node, dims)

    def _pieces(self, node: fx.Node, dims: Mapping[str, Texts]) -> Iterator[tuple[str, str]]:
        """A piece of a dim that was cut, or one of its entries."""
        (cut,) = operands(node)
        source, given, name = operands(cut)[0], arguments(cut), op_name(cut.target)
        if name == "aten.unbind.int":
            left = list(dims[source.name])
            left.pop(given["dim"])
            pairs = zip(dims[node.name], left, strict=True)
            yield from ((one, two) for one, two in pairs if one is not None and two is not None)
        if name not in IN_PIECES:
            return
        for dim, size in enumerate(node.meta["sizes"]):
            if isinstance(size, int):
                yield str(dims[node.name][dim]), self.fraction(source, dim, size)
        listed, at = given.get("split_sizes", ()), given["dim"] % len(node.meta["sizes"])
        if listed and isinstance(source.meta["sizes"][at], int):
            yield str(dims[source.name][at]), " + ".join(self.fraction(source, at, n) for n in listed)

    def _slices(self, node: fx.Node, dims: Mapping[str, Texts]) -> Iterator[tuple[str, str]]:
        """A part of a dim that is taken, or written over."""
        source, part = operands(node)[0], (*operands(node)[1:], node)[0]
        given = arguments(node)
        dim = given["dim"] % len(node.meta["sizes"])
        size, text = part.meta["sizes"][dim], str(dims[part.name][dim])
        if isinstance(size, int) and not isinstance(source.meta["sizes"][dim], int):
            yield text, str(size)
        elif isinstance(size, int) and not isinstance(given["end"], fx.Node):
            yield text, self._length(source, dim, given)

    def _length(self, source: fx.Node, dim: int, given: Mapping[str, Any]) -> str:
        size = source.meta["sizes"][dim]
        ends = [given["start"] or 0, size if given["end"] is None else min(given["end"], size)]
        whole = self.whole(source, dim)
        start, end = (self.fraction(source, dim, n) if n >= 0 else f"{whole} - {-n}" for n in ends)
        step = given["step"]
        return f"{end} - ({start})" if step == 1 else f"-(-({end} - ({start})) // {step})"

    def expression(self, size: Any) -> str:
        """A global size in `b` (this rank's batch) and `s` (the whole sequence)."""
        ranks = [f"{axis_name((a.name,))}.size" for a in self.mesh.axes if a.kind.startswith("dp_")]
        size = sympy.factor(size)
        batch = next((symbol for symbol in size.free_symbols if str(symbol) == "b"), None)
        if batch is None or not ranks:
            return written(size)
        if "b" not in {str(symbol) for symbol in (size / batch).free_symbols} and not size.is_Add:
            return " * ".join([written(size), *ranks])
        whole = sympy.Symbol(f"({' * '.join(['b', *ranks])})", positive=True, integer=True)
        return written(size.subs(batch, whole))

    def local(self, node: fx.Node, dim: int) -> str:
        """The size of a dim on this rank, by the node's layout."""
        axes, size = node.meta["layout"].dims[dim], node.meta["shape"][dim]
        if not axes:
            return self.whole(node, dim)
        if not size.divides_by(self.mesh.size(*axes)):
            return f"{axis_name((axes[0],))}.part({self.whole(node, dim)})"
        data = {a.name for a in self.mesh.axes if a.kind.startswith("dp_")}
        if size.symbols.count("b") == 1 and data <= set(axes):
            text, axes = written(node.meta["sizes"][dim]), tuple(a for a in axes if a not in data)
        else:
            text = self.whole(node, dim)
        return " // ".join(
            [text if " " not in text or not axes else f"({text})", *(f"{axis_name((axis,))}.size" for axis in axes)]
        )

    def fraction(self, node: fx.Node, dim: int, value: int) -> str:
        """A position inside a dim: a part of its size where it is one (`head_dim // 2`), else the number."""
        size = node.meta["shape"][dim]
        if not size.constant or value <= 1 or value >= 1 << 62:
            return str(value)
        total = size.coefficient
        if value == total:
            return self.whole(node, dim)
        common = math.gcd(value, total)
        times, parts = value // common, total // common
        if parts > PARTS and times > 1:
            return str(value)
        return f"{'' if times == 1 else f'{times} * '}{self.whole(node, dim)} // {parts}"


IN_PIECES = ("aten.split.Tensor", "aten.split_with_sizes.default", "aten.chunk.default")
"""Ops that cut a dim into pieces, each a part of it."""

WRITTEN_SHAPES = ("aten.reshape.default", "aten.view.default", "aten._unsafe_view.default")
"""Ops whose whole shape stands in the text."""

PARTS = 16
"""In how many parts a dim may be for a place in it to be written as so many of them."""


def axis_name(names: tuple[str, ...]) -> str:
    if len(names) == 1:
        return names[0].replace(".", "_")
    return "data" if names == ("dp_replicate", "dp_shard") else "_".join(n.replace(".", "_") for n in names)
