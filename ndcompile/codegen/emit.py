"""The emitted module: one class a distinct block, one for the root, a table of sizes, and no rank in the text."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import fx

from ndcompile.codegen.loops import LoopWriter
from ndcompile.codegen.names import (
    MEMBERS,
    RESERVED,
    RUNTIME,
    block_range,
    block_table,
    fresh,
    identifier,
    value_name,
)
from ndcompile.codegen.ops import KEEPS_NAME, Writer
from ndcompile.codegen.segments import Loop, Segment, batch_dim, segments, statements
from ndcompile.codegen.sizes import SizeFacts, SizeNames, axis_name
from ndcompile.codegen.symbols import Symbols, ways
from ndcompile.codegen.weights import bucket_comments, weight_lines, weight_names
from ndcompile.codegen.wrap import commented, indented, wrapped
from ndcompile.mesh import MeshSpec
from ndcompile.placement import COLLECTIVES, I, R
from ndcompile.rules.registry import model_results, op_name, operands, signature, updates


@dataclass
class Emitted:
    """The source, the name of its root class, the axes whose flattened groups it uses, and what its sizes mean."""

    source: str
    root: str
    flattened: list[tuple[str, ...]]
    sizes: SizeFacts


@dataclass
class Names:
    """What the emitted module takes over from the model: class names by module path, and its config's numbers."""

    classes: Mapping[str, str]
    config: Mapping[str, Any]


def emit(graph: fx.GraphModule, mesh: MeshSpec, names: Names, title: str) -> Emitted:
    """Write the parallel graph as Python. Reads `layout`, `move`, `segment`, `block`, `kind`."""
    return _Emitter(graph, mesh, names, title).emit()


class _Emitter:
    def __init__(self, graph: fx.GraphModule, mesh: MeshSpec, names: Names, title: str) -> None:
        self.graph, self.mesh, self.names, self.title = graph, mesh, names, title
        self.sizes = SizeNames(mesh, names.config)
        self.symbols = Symbols(graph, mesh)
        ops = [n for n in graph.graph.nodes if n.op == "call_function" and "shape" in n.meta]
        plain = [n for n in ops if "move" not in n.meta and op_name(n.target) not in UNSIGNED]
        self.sizes.learn(graph, {n: signature(n) for n in plain})
        self.segments = segments(graph)
        self.statements = statements(self.segments)
        self.axes: set[tuple[str, ...]] = {(name,) for name in mesh.names}
        self.runtime: set[str] = set()
        self.root = identifier(names.classes.get("", "Model"))
        self.functions: dict[int, str] = {}
        self.class_names: dict[Any, str] = {}
        self.titles: dict[tuple[str, str, int], str] = {}

    def emit(self) -> Emitted:
        classes = self._classes()
        root = self._root()
        flattened = sorted(axes for axes in self.axes if len(axes) > 1)
        source = "\n".join(wrapped([*self._head(), *classes, *root])) + "\n"
        return Emitted(source, self.root, flattened, self.sizes.facts(self.graph))

    # ---- the head ------------------------------------------------------------------------------------------------

    def _head(self) -> list[str]:
        flattened = sorted(axes for axes in self.axes if len(axes) > 1)
        extra = "".join(f", {axes!r}" for axes in flattened)
        imports = sorted({"Block", "Root", "current", "weight"} | self.runtime)
        lines = [f'"""{self.title}"""', "", "import torch", "import torch.nn.functional as F", ""]
        lines += _wrapped("from ndcompile.runtime import (", imports, ")")
        lines += ["", f'MESH = current("{"" if str(self.mesh) == "one rank" else self.mesh}"{extra})']
        lines += [f"{axis_name(axes)} = MESH{list(axes)}".replace("'", '"') for axes in sorted(self.axes)]
        if self.sizes.table:
            rows = [f"{name} = {value}" for name, value in self.sizes.table.items()]
            lines += ["", "# sizes, of whole dims", *rows]
        return lines

    # ---- blocks --------------------------------------------------------------------------------------------------

    def _classes(self) -> list[str]:
        lines: list[str] = []
        done: set[int | None] = set()
        for segment in self.segments:
            if not segment.block or segment.kind in done:
                continue
            done.add(segment.kind)
            name = self._class_name(segment)
            blocks = [block for s in self.segments if s.kind == segment.kind for block in s.blocks]
            functions = [self._function(part) for part in segment.parts]
            lines += ["", "", f"class {name}(Block):  # {block_range(blocks)}", "    weights = dict("]
            lines += weight_lines(segment, self.mesh, "        ")
            lines += ["    )", ""]
            given, body = self._block_forward(segment)
            lines += [f"    def forward(self{', ' + given if given else ''}):"]
            lines += [f"        # {text}" for text in bucket_comments(segment, self.mesh)]
            lines += [f"        with self.gathered({'reshard=False' if segment.gathered else ''}) as w:"]
            lines += indented(body, 12)
            for part, (parameters, inner, result) in zip(segment.parts, functions, strict=True):
                passed = ", ".join(["w", *parameters])
                lines += ["", "    @staticmethod", *self._recomputed(segment), *self._in_halves(part, parameters)]
                lines += [f"    def {self._title(segment, part)}({passed}):"]
                lines += [*indented(inner, 8), f"        return {result}"]
        return lines

    def _block_forward(self, segment: Segment) -> tuple[str, list[str]]:
        """What a block's `forward` takes, and what stands under its weights."""
        names: dict[fx.Node, str] = {}
        used = set(RESERVED) | self._global_names()
        for value in segment.inputs:
            names[value] = self._parameter(value, used)
        given = ", ".join(names.values())
        if len(segment.parts) == 1:
            return given, [f"return self.compute({', '.join(['w', *names.values()])})"]
        body = self._calls(segment, names, used)
        return given, [*body, f"return {', '.join(names[value] for value in segment.outputs)}"]

    def _calls(self, segment: Segment, names: dict[fx.Node, str], used: set[str]) -> list[str]:
        """A segment's functions in order, one a line; names what it makes and has no name."""
        lines = []
        for part in segment.functions:
            for value in part.outputs:
                if value not in names:
                    names[value] = fresh(value_name(value), used)
            targets = ", ".join(names[value] for value in part.outputs)
            given = ["w"] if part.entries or part.block else []
            given += [names[value] for value in part.inputs]
            text = f"self.{self._title(segment, part)}({', '.join(given)})"
            lines.append(f"{targets} = {text}" if targets else text)
        return lines

    def _title(self, segment: Segment, part: Segment) -> str:
        """The name of a function: that of a result; a stretch's first and a block's last have their own."""
        at = next(i for i, own in enumerate(segment.parts) if own is part)
        base = "compute" if segment.block else self._segment_title(segment)
        if at == (len(segment.parts) - 1 if segment.block else 0):
            return base
        owner = self._class_name(segment) if segment.block else self.root
        if (owner, base, at) not in self.titles:
            taken = {name for (other, *_), name in self.titles.items() if other == owner}
            roots = {self._segment_title(s) for s in self.segments if not s.block}
            used = taken | MEMBERS | (set() if segment.block else roots)
            given = [value for value in part.outputs if value in segment.outputs] or part.outputs
            self.titles[owner, base, at] = fresh(value_name(given[0]), used)
        return self.titles[owner, base, at]

    def _recomputed(self, segment: Segment) -> list[str]:
        """What stands over a block's `compute` where backward recomputes it."""
        if segment.saved is None:
            return []
        self.runtime.add("recomputed")
        return [f"    @recomputed(save={segment.saved!r})".replace("'", '"') if segment.saved else "    @recomputed"]

    def _in_halves(self, segment: Segment, parameters: list[str]) -> list[str]:
        """What stands over a `compute` that yields: on which dims its results and arguments are cut."""
        if not segment.halved or not any(node.meta.get("sent") or node.meta.get("turn") for node in segment.nodes):
            return []
        self.runtime.add("in_halves")
        cut = zip(parameters, map(batch_dim, segment.inputs), strict=True)
        given = [f"{name}={dim}" for name, dim in cut if dim is not None]
        results = tuple(node.meta["cut"] for node in segment.outputs)
        return [f"    @in_halves({', '.join([repr(results), *given])})"]

    def _class_name(self, segment: Segment) -> str:
        if segment.kind not in self.class_names:
            base = name = identifier(self.names.classes.get(segment.block, "Block"))
            taken, number = {*self.class_names.values(), self.root}, 2
            while name in taken:
                name, number = f"{base}{number}", number + 1
            self.class_names[segment.kind] = name
        return self.class_names[segment.kind]

    @cached_property
    def ways(self) -> dict[str, list[str]]:
        """The classes of each block: one for each way in which it is called."""
        found: dict[str, dict[str, None]] = {}
        for segment in self.segments:
            for path in segment.blocks:
                found.setdefault(path, {})[self._class_name(segment)] = None
        return {path: list(names) for path, names in found.items()}

    def way(self, segment: Segment) -> str:
        """The class that the text has to name, since the segment's block is called in another way too; or nothing."""
        several = any(len(self.ways[path]) > 1 for path in segment.blocks)
        return self._class_name(segment) if several else ""

    def block(self, segment: Segment, path: str) -> str:
        """The text that stands for one block."""
        named = f", {self.way(segment)}" if self.way(segment) else ""
        return f'self.block("{path}"{named})'

    # ---- one function --------------------------------------------------------------------------------------------

    def _function(self, segment: Segment) -> tuple[list[str], list[str], str]:
        """Parameter names (without `w`), body lines, and the returned expression."""
        entries = weight_names(segment)
        names: dict[fx.Node, str] = {e.node: f"w.{n}" for e, n in zip(segment.entries, entries, strict=True)}
        used = set(RESERVED) | self._global_names()
        parameters = []
        for value in segment.inputs:
            own = "role" not in value.meta and value.meta["segment"] == segment.number
            names[value] = fresh(value_name(value), used) if own else self._parameter(value, used)
            parameters.append(names[value])
        names |= {port: names[value] for port, value in segment.ports.items()}
        device = next((f"{names[v]}.device" for v in [*segment.inputs, *(e.node for e in segment.entries)]), '"cpu"')
        writer = Writer(names, self.sizes, device)
        nodes = segment.nodes
        last = {v: i for i, node in enumerate(nodes) for v in operands(node)}
        last |= {p: max((i for i, n in enumerate(nodes) if p in operands(n)), default=-1) for p in segment.ports}
        last |= {v: len(nodes) for v in segment.outputs}
        body = [line for i, node in enumerate(nodes) for line in self._statement(writer, node, i, last, used)]
        self.axes |= writer.axes
        result = ", ".join(names[v] for v in segment.outputs) or "None"
        wanted = self.symbols.wanted(body)
        if missing := [symbol for symbol in wanted if not ways(segment.inputs, symbol)]:
            self.symbols.lend(missing[0], segment, self.segments)
            return self._function(segment)
        measures = [f"{symbol} = {self.symbols.measure(segment.inputs, names, symbol)}" for symbol in wanted]
        return parameters, measures + body, result

    def _global_names(self) -> set[str]:
        return {axis_name((a,)) for a in self.mesh.names} | set(self.sizes.table) | {"data", *self.symbols.names}

    def _parameter(self, value: fx.Node, used: set[str]) -> str:
        name = self._input_name(value)
        return "rng" if name == "rng_" else fresh(name, used)

    def _input_name(self, value: fx.Node) -> str:
        if value.meta.get("role") in ("input", "key", "fold"):
            return "rng_" if value.meta["role"] != "input" else identifier(value.meta["name"])
        if value.meta.get("role") in ("buffer", "constant"):
            return identifier(value.meta["name"].split(".")[-1])
        carried = value.meta.get("block") or (value.meta["grad"] and len(value.meta["shape"]) > 2)
        return "x" if carried else value_name(value)

    def _statement(
        self, writer: Writer, node: fx.Node, at: int, last: Mapping[fx.Node, int], used: set[str]
    ) -> list[str]:
        text = writer.expression(node)
        name = op_name(node.target)
        self.runtime |= {w for w in re.findall(r"(?<![\w.])([a-z_]+)\(", text) if w in RUNTIME}
        base, values = name.split(".")[1] if "." in name else name, operands(node)
        keeps = base in KEEPS_NAME and values and last.get(values[0]) == at and values[0] in writer.names
        if keeps and not writer.names[values[0]].startswith("w."):
            writer.names[node] = writer.names[values[0]]
        else:
            writer.names[node] = fresh(value_name(node), used)
        if how := node.meta.get("sent"):
            self.runtime.add(how)
            text = f"yield {how}({text.replace('(', ', ', 1)}"
        turn = [commented("yield", "the other half goes on")] if node.meta.get("turn") else []
        return [*turn, commented(f"{writer.names[node]} = {text}", self._comment(node))]

    def _comment(self, node: fx.Node) -> str:
        move = node.meta.get("move")
        if move is not None:
            row = move.conversion
            used = (row.forward, row.backward if node.meta["grad"] else "")
            forward, backward = (p if p in COLLECTIVES else "–" for p in used)
            sides = f"{forward} ⇄ {backward}" if {forward, backward} != {"–"} else "no communication"
            return f"{move}   {sides}"
        if not op_name(node.target).split(".")[1].startswith(SHOWN):
            return ""
        layout = node.meta["layout"]
        quiet = [a.name for a in self.mesh.axes if layout.on(a.name) in (R, I) or a.kind.startswith("dp_")]
        shown = str(layout.without(quiet))
        source = (node.meta.get("source") or "").split("   ")[0]
        return "   ".join(part for part in (shown, source) if part)

    # ---- the root ------------------------------------------------------------------------------------------------

    def _root(self) -> list[str]:
        inputs = self.symbols.inputs
        names: dict[fx.Node, str] = {n: identifier(n.meta["name"]) for n in inputs}
        used = set(RESERVED) | set(names.values()) | self._global_names()
        given = "".join(f", {names[n]}" for n in inputs)
        keyed = [n for n in self.graph.graph.find_nodes(op="placeholder") if n.meta["role"] == "key"]
        names |= dict.fromkeys(keyed, "rng")
        body: list[str] = []
        functions: list[str] = []
        tables: list[str] = []
        written: set[str] = set()
        for segment in (s for s in self.segments if not s.block):
            title = self._segment_title(segment)
            if title in written:
                continue
            written.add(title)
            if segment.entries:
                tables += [f'        "{title}": dict(', *weight_lines(segment, self.mesh, "            "), "        ),"]
            for part in segment.functions:
                parameters, inner, result = self._function(part)
                passed = ", ".join((["w"] if part.entries else []) + parameters)
                functions += ["", "    @staticmethod", f"    def {self._title(segment, part)}({passed}):"]
                functions += [*indented(inner, 8), f"        return {result}"]
        for statement in self.statements:
            if isinstance(statement, Loop):
                body += LoopWriter(self).write(statement, names, used)
            else:
                segment = statement.segment
                taken = [self.argument(v, names) for v in segment.inputs]
                border = {node for part in segment.parts if part.border for node in part.nodes}
                targets = [self.target(v, names, used) for v in segment.outputs if v not in border]
                body += self.call(segment, self.block(segment, segment.block), taken, targets, names, used)
                body += [line for part in segment.parts if part.border for line in self._border(part, names, used)]
        returned = [names[v] if isinstance(v, fx.Node) else repr(v) for v in model_results(self.graph)]
        body += self._updates(names)
        lines = ["", "", f"class {self.root}(Root):"]
        lines += ["    weights = {", *tables, "    }"] if tables else []
        if self.ways:
            rows = {path: ways[0] if len(ways) == 1 else f"({', '.join(ways)})" for path, ways in self.ways.items()}
            lines += ["    blocks = {"]
            lines += [f'        "{path}": {names},' for path, names in block_table(rows)]
            lines += ["    }"]
        lines += ["", f"    def forward(self{given}{', rng' if keyed else ''}):", *indented(body, 8)]
        lines += [f"        return ({', '.join(returned)}{',' if len(returned) == 1 else ''})", *functions]
        if keyed:
            self.runtime.add("fold")
        return lines

    def _segment_title(self, segment: Segment) -> str:
        """The name of its function; a run's rounds have one."""
        roots = [s for s in self.segments if not s.block]
        if len(roots) == 1:
            return "compute"
        if segment is roots[0] and segment.run is None:
            return "begin"
        if segment is roots[-1] and segment.run is None:
            return "end"
        return f"between_{next(i for i, s in enumerate(roots) if s.text == segment.text)}"

    def target(self, value: fx.Node, names: dict[fx.Node, str], used: set[str]) -> str:
        enters = any(value in s.inputs for s in self.segments if s.block)
        base = "x" if enters and value.meta["grad"] and len(value.meta["shape"]) > 2 else value_name(value)
        names[value] = fresh(base, used)
        return names[value]

    def _updates(self, names: Mapping[fx.Node, str]) -> list[str]:
        """Every buffer that the forward changes is written at its end."""
        rows = [f'    "{name}": {self.argument(value, names)},' for name, value in updates(self.graph).items()]
        return ["self.update({", *rows, "})"] if rows else []

    def argument(self, value: fx.Node, names: Mapping[fx.Node, str]) -> str:
        if value in names:
            return names[value]
        if value.meta.get("role") == "fold":
            return f"fold(rng, {value.args[1]})"
        assert value.meta.get("role") in ("buffer", "constant"), f"%{value.name} reaches a segment from nowhere"
        read = f'self.buffer("{value.meta["name"]}")'
        kept = value.meta["name"] in updates(self.graph) and any(user.meta.get("grad") for user in value.users)
        return f"{read}.clone()" if kept else read  # backward may need what the update overwrites

    def call(
        self, segment: Segment, block: str, given: list[str], targets: list[str], names: dict[fx.Node, str],
        used: set[str],
    ) -> list[str]:  # fmt: skip
        """A segment's statements, with its weights around those of the root that take them."""
        if segment.block:
            target = f"{', '.join(targets)} = " if targets else ""
            return [f"{target}{block}({', '.join(given)})"]
        own = names | dict(zip(segment.inputs, given, strict=True))
        calls = self._calls(segment, own, used)
        names |= {value: own[value] for part in segment.functions for value in part.outputs}
        weighted = max((i + 1 for i, part in enumerate(segment.functions) if part.entries), default=0)
        lines = [*self._gathering(segment), *indented(calls[:weighted], 4)] if weighted else []
        return lines + calls[weighted:]

    def _border(self, part: Segment, names: dict[fx.Node, str], used: set[str]) -> list[str]:
        """What brings results into the user's layout, as statements of `forward`."""
        returned, writer = model_results(self.graph), Writer(names, self.sizes, "")
        last = {value: i for i, node in enumerate(part.nodes) for value in operands(node)}
        last |= {value: len(part.nodes) for value in returned if isinstance(value, fx.Node)}
        lines = [self._statement(writer, node, i, last, used) for i, node in enumerate(part.nodes)]
        self.axes |= writer.axes
        return list(itertools.chain(*lines))

    def _gathering(self, segment: Segment) -> list[str]:
        stays = ", reshard=False" if segment.gathered else ""
        comments = [f"# {text}" for text in bucket_comments(segment, self.mesh)]
        return [*comments, f'with self.gathered("{self._segment_title(segment)}"{stays}) as w:']


UNSIGNED = frozenset({"_operator.getitem", "runtime.scale_gradient"})
SHOWN = ("linear", "mm", "matmul", "embedding", "scaled_dot", "attention", "cross_entropy", "layer_norm", "addmm")


def _wrapped(head: str, items: list[str], tail: str) -> list[str]:
    lines, row = [head], "   "
    for item in items:
        if len(row) + len(item) > 110:
            lines.append(row)
            row = "   "
        row += f" {item},"
    return [*lines, row, tail]
