"""Model → reference graph: what the model computes on one device, as ATen ops with symbols for batch and sequence."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from ndcompile.autocast import Autocast, casts
from ndcompile.blocks import blocks_of, first_names, tensors_of
from ndcompile.borders import Borders, spell_out
from ndcompile.counts import COUNTS, count_places
from ndcompile.errors import CompileError
from ndcompile.fold import NotFollowed, fold
from ndcompile.functional import make_functional, mark_views
from ndcompile.inputs import DynamicDims, Inputs, name_dims, traced_inputs
from ndcompile.literals import write_literals
from ndcompile.precision import Precision
from ndcompile.regions import inline_regions
from ndcompile.remat import Kept, Remat, Reshard, read_kept
from ndcompile.twin import (
    WhereInputsAre,
    around_forward,
    cast_inputs,
    cast_parameters,
    name_keywords,
    on_meta,
    refuse_hooks,
)
from ndcompile.withheld import Asked, Withheld

BATCH, SEQUENCE = sympy.Symbol("b", positive=True, integer=True), sympy.Symbol("s", positive=True, integer=True)


@dataclass
class Captured:
    """The reference graph and what is known of its edges."""

    graph: fx.GraphModule
    inputs: tuple[str, ...]
    """Names of the tensor inputs, in the order of the graph's input placeholders."""
    constants: dict[str, Any]
    """Inputs that are no tensors: the program is made for these values."""
    output_spec: pytree.TreeSpec
    training: bool
    kept: Kept
    """What the user, or else the model, asks to be recomputed in backward."""


AS_WRITTEN = Precision()


def capture(
    model: nn.Module,
    example: Inputs,
    *,
    precision: Precision = AS_WRITTEN,
    float64: bool = False,
    dynamic_dims: DynamicDims | None = None,
    autocast: Autocast | None = None,
    pinned: Mapping[str, str] | None = None,
    remat: Remat = None,
    reshard: Reshard = True,
) -> Captured:
    """Trace the model in its present mode on meta tensors; the model is left as it is.

    Equal blocks are traced once, and a run of them is in the graph as its first two rounds (`fold`); `pinned` names,
    with the pin's text, tell blocks apart.

    Placeholders carry `role` (parameter, buffer, constant, input) and `name`; every node carries `sizes` (sympy, in `b`
    and `s`), `dtype`, `module`, `source`. `precision` casts parameters before tracing, and inputs in the graph;
    `float64` makes every floating value a float64 one (tests and verify only); `autocast` is the one that capture
    stands under.
    """
    refuse_hooks(model)
    named = example.named(model)
    symbols = name_dims(named, dynamic_dims)
    traced = dict(traced_inputs(named, symbols, torch.float64 if float64 else None))
    casts = (torch.float64, None) if float64 else (precision.compute, precision.of_inputs)
    given = _Given(example, named, symbols, traced, *casts)
    options = _Options(autocast, pinned or {}, remat, reshard)
    exported, names, kept = _in_a_way(lambda way: _traced(model, options, given, way))
    graph = exported.graph_module
    count_places(graph)
    _refuse_values(graph)
    if float64:
        widen_casts(graph)
    _propagate_dtypes(graph, traced)
    _label_nodes(graph, _roles(graph, symbols))
    make_functional(graph)
    spec = exported.call_spec.out_spec
    assert spec is not None, "export returns the structure of its outputs"
    plain = {name: value for name, value in named.items() if not isinstance(value, Tensor)}
    return Captured(graph, names, plain, spec, model.training, kept)


@dataclass(frozen=True)
class _Given:
    """The example, its leaves by name, the symbols of their dims, and the leaves that are traced in their place."""

    example: Inputs
    named: Mapping[str, Any]
    symbols: Mapping[str, Mapping[int, str]]
    traced: Mapping[str, Any]
    parameters: torch.dtype | None
    """What they are cast to before."""
    inputs: torch.dtype | None
    """What floating ones are cast to in the graph."""


@dataclass(frozen=True)
class _Way:
    """How a model is traced: each distinct block once, and without the parameters of later equal ones."""

    once: bool
    withhold: bool


WAYS = (_Way(once=True, withhold=True), _Way(once=True, withhold=False), _Way(once=False, withhold=False))
"""From the quickest on."""


_Traced = tuple[torch.export.ExportedProgram, tuple[str, ...], Kept]


def _in_a_way(trace: Callable[[_Way], _Traced]) -> _Traced:
    """The trace of the first way that the model admits."""
    for way in WAYS[:-1]:
        with suppress(Asked, NotFollowed):
            return trace(way)
    return trace(WAYS[-1])


@dataclass(frozen=True)
class _Options:
    """Options that hold for blocks, and so tell them apart."""

    autocast: Autocast | None
    pinned: Mapping[str, str]
    remat: Remat
    reshard: Reshard

    def kept(self, borders: Borders) -> Kept:
        """Raises `CompileError` where the model checkpoints what is no block, and no option takes its place."""
        if self.remat is None and borders.checkpoints.refused:
            raise borders.checkpoints.refused
        return read_kept(self.remat, self.reshard, borders.blocks, borders.checkpoints.blocks)


def _traced(model: nn.Module, options: _Options, given: _Given, way: _Way) -> _Traced:
    """The graph with labelled placeholders, in which runs of equal blocks are folded; the tensor inputs' names; what is
    recomputed."""
    twin, constants = on_meta(model)
    if given.parameters is not None:
        cast_parameters(twin, given.parameters)
    if given.inputs is not None:
        cast_inputs(twin, given.inputs)
    blocks = blocks_of(twin)
    withheld = Withheld(twin, blocks if way.withhold else {})
    borders = Borders(twin, blocks, way.once, withheld)
    exported = _export(twin, given, borders, withheld)
    kept = options.kept(borders)
    graph = exported.graph_module
    _know_users(graph)
    tensors = dict(tensors_of(model))
    first = first_names(tensors)
    names = _label_placeholders(exported, tensors, first, list(given.named), constants)
    write_literals(graph)
    inline_regions(graph, options.autocast)
    spell_out(graph)
    plain = all(node.meta["autocast"] is None for node in graph.graph.nodes)  # casts may differ between rounds
    mark_views(graph)
    fold(graph, model, first, {**options.pinned, **kept.marks()}, drop=plain)
    return exported, names, kept


def _export(model: nn.Module, given: _Given, borders: Borders, withheld: Withheld) -> torch.export.ExportedProgram:
    """Every tensor in the place where the call has it, by the parameter of `forward` that takes it."""
    name_keywords(model, given.example.kwargs)
    bound = inspect.signature(model.forward).bind(*given.example.args, **given.example.kwargs)
    leaves, spec = pytree.tree_flatten(dict(bound.arguments), is_leaf=lambda v: v is None)
    assert len(leaves) == len(given.named), "each leaf has a name"
    dims = [
        dict.fromkeys(given.symbols[name], torch.export.Dim.AUTO) if isinstance(value, Tensor) else None
        for name, value in given.named.items()
    ]
    shapes = pytree.tree_unflatten(dims, spec)
    bound.arguments.update(pytree.tree_unflatten(list(given.traced.values()), spec))
    plain = torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False)
    seen = borders.checkpoints
    modes = around_forward(model, lambda: WhereInputsAre(seen.op)), around_forward(model, withheld.watching)
    try:
        with plain[0], plain[1], modes[0], modes[1], withheld.emptied(), borders.marked(), seen.seen():
            exported = torch.export.export(model, bound.args, bound.kwargs, dynamic_shapes=shapes, strict=False)
    except Exception as error:  # whatever stops the tracer is an error of the model's, told as one
        if withheld.asked:
            raise Asked from error
        raise _not_captured(model, error) from error
    withheld.settle(borders.again)
    return exported


def _not_captured(model: nn.Module, error: Exception) -> CompileError:
    text = str(error)
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\w+)\s*\n\s*(.*)', text)
    import traceback

    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        ours = Path(frame.filename).parent == Path(__file__).parent
        if "/torch/" not in frame.filename and not ours:
            frames.append((frame.filename, str(frame.lineno), frame.name, frame.line or ""))
            break
    source = f"{Path(frames[-1][0]).name}:{frames[-1][1]}   {frames[-1][3].strip()}" if frames else None
    depends = any(word in text for word in ("data-dependent", "Data dependent", "Could not guard", "unbacked"))
    depends = depends or "item()" in text or "Cannot call" in text or "_local_scalar_dense" in text
    if depends:
        return CompileError(
            f"{type(model).__name__} cannot be captured as one graph",
            source=source,
            why="its control flow depends on the values of tensors",
            tries="torch.where instead of if on a tensor",
        )
    if "register a pytree" in text or text.startswith("unhashable type"):  # the latter is torch 2.11's
        return CompileError(
            f"{type(model).__name__} returns or takes a class that cannot be taken apart",
            source=source,
            why=text.strip().splitlines()[0].split(". ")[0],
            tries="torch.export.register_dataclass(TheClass), or a dict",
        )
    return CompileError(
        f"{type(model).__name__} cannot be traced with the example inputs",
        source=source,
        why=f"{type(error).__name__}: {(text.strip().splitlines() or [''])[0][:300]}",
        tries="inputs with which the model runs on one device",
    )


def _know_users(graph: fx.GraphModule) -> None:
    """Where a model has a no-grad region, torch 2.13 loses nodes that take lists from the users of what they take."""
    for node in graph.graph.nodes:
        for value in node.all_input_nodes:
            value.users.setdefault(node)


def _label_placeholders(
    exported: torch.export.ExportedProgram,
    tensors: Mapping[str, Tensor],
    first: Mapping[str, str],
    names: list[str],
    attributes: Mapping[int, Tensor],
) -> tuple[str, ...]:
    """Say of each placeholder what it is, and make one of the placeholders of a tied parameter or buffer."""
    inputs = iter(names)
    graph, merged, found = exported.graph_module.graph, dict[str, fx.Node](), list[str]()
    for node, spec in zip(graph.find_nodes(op="placeholder"), exported.graph_signature.input_specs, strict=True):
        kind = spec.kind.name
        if kind in ("PARAMETER", "BUFFER"):
            name = first[spec.target or ""]
            if name in merged:
                node.replace_all_uses_with(merged[name])
                continue
            merged[name] = node
            grad = kind == "PARAMETER" and tensors[name].requires_grad
            node.meta |= dict(role=kind.lower(), name=name, grad=grad)
        elif kind == "CONSTANT_TENSOR":
            constant = exported.constants[spec.target or ""]
            assert isinstance(constant, Tensor), f"{spec.target} is a tensor constant"
            value = attributes.get(id(constant), constant)
            if value.is_meta:
                value = next((v for k, v in attributes.items() if v.shape == constant.shape), value)
            node.meta |= dict(role="constant", name=spec.target, grad=False, value=value)
        else:
            name = next(inputs)
            node.meta |= dict(role="input", name=name)
            if isinstance(node.meta.get("val"), Tensor):
                node.meta["grad"] = bool(node.meta["val"].requires_grad)
                found.append(name)
    for node in graph.find_nodes(op="placeholder"):
        unused = not node.users and "role" not in node.meta
        if unused or (node.meta["role"] == "input" and not isinstance(node.meta.get("val"), Tensor)):
            assert not node.users, f"{node} is a constant input and has no uses in the graph"
            graph.erase_node(node)
    return tuple(found)


def widen_casts(graph: fx.GraphModule) -> None:
    """Float64 mode: each cast to, or factory of, a lower float dtype gives float64 instead."""
    lower = (torch.float32, torch.bfloat16, torch.float16)
    for node in graph.graph.nodes:
        if node.op == "call_function":
            node.args = tuple(torch.float64 if a in lower and isinstance(a, torch.dtype) else a for a in node.args)
            node.kwargs = {
                k: torch.float64 if isinstance(v, torch.dtype) and v in lower else v for k, v in node.kwargs.items()
            }


def _propagate_dtypes(graph: fx.GraphModule, traced: Mapping[str, Any]) -> None:
    """Set every node's `dtype` by running it on meta tensors of the traced sizes, with the casts of its autocast."""
    for node in list(graph.graph.nodes):
        if "_assert_tensor_metadata" in str(node.target):
            graph.graph.erase_node(node)
    values: dict[fx.Node, Any] = {}

    def floating(node: fx.Node) -> torch.dtype | None:
        value = values.get(node)
        return value.dtype if isinstance(value, Tensor) and value.is_floating_point() else None

    def compute(node: fx.Node) -> None:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
        target: Any = node.target
        value = values[node] = target(*args, **kwargs)
        first = value[0] if isinstance(value, (list, tuple)) and value else value
        if isinstance(first, Tensor):
            node.meta["dtype"] = first.dtype

    with torch.no_grad(), torch.device("meta"):
        for node in list(graph.graph.nodes):
            if node.op == "placeholder":
                values[node] = _plain_value(node, traced)
                if isinstance(values[node], Tensor):
                    node.meta["dtype"] = values[node].dtype
            elif node.op == "call_function":
                if node.meta["autocast"] is not None:
                    casts(graph.graph, node, node.meta["autocast"], floating)
                for cast in node.all_input_nodes:
                    if cast not in values:
                        compute(cast)
                compute(node)
    graph.recompile()


def _plain_value(node: fx.Node, traced: Mapping[str, Any]) -> Any:
    if node.meta["role"] == "input":
        return traced[node.meta["name"]]
    return torch.empty(node.meta["val"].shape, dtype=node.meta["val"].dtype, device="meta")


def _roles(graph: fx.GraphModule, symbols: Mapping[str, Mapping[int, str]]) -> dict[sympy.Symbol, sympy.Expr]:
    """The tracer's symbols to `b`, `s`, or a name of the user's; to a number where the model fixed one of that name."""
    found: dict[sympy.Symbol, sympy.Expr] = {}
    fixed: dict[sympy.Expr, sympy.Expr] = {}
    for node in graph.graph.find_nodes(op="placeholder"):
        if node.meta["role"] != "input":
            continue
        for dim, symbol in symbols[node.meta["name"]].items():
            expression = _expression(node.meta["val"].shape[dim])
            role = {"b": BATCH, "s": SEQUENCE}.get(symbol) or sympy.Symbol(symbol, positive=True, integer=True)
            if isinstance(expression, sympy.Symbol):
                found[expression] = role
            elif symbol != "b" and sympy.sympify(expression).is_Integer:
                fixed[role] = sympy.Integer(expression)
            elif symbol != "b":
                raise CompileError(
                    f"the length '{symbol}' of input '{node.meta['name']}' is tied to other sizes by the model",
                    why=f"tracing found it to be {expression}: a number in the model holds for the example's sizes",
                    tries="use x.size(dim) in the model instead of a number, or leave the dim out of dynamic_dims",
                )
            else:
                raise CompileError(
                    f"the batch size of input '{node.meta['name']}' is fixed by the model",
                    why="a data-parallel rank has another batch size than the example's",
                    tries="use x.size(0) in the model instead of a number",
                )
    return {symbol: fixed.get(role, role) for symbol, role in found.items()}


def _expression(size: int | torch.SymInt | torch.SymFloat) -> Any:
    """A size as a number or in symbols; `float(size)` is that size."""
    if isinstance(size, torch.SymFloat):
        return size.node.expr.replace(lambda part: type(part).__name__ == "ToFloat", lambda part: part.args[0])
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _label_nodes(graph: fx.GraphModule, roles: Mapping[sympy.Symbol, sympy.Expr]) -> None:
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
            value = value[0]
        if isinstance(value, Tensor):
            node.meta["sizes"] = tuple(_named(size, roles) for size in value.shape)
        elif isinstance(value, (torch.SymInt, torch.SymFloat)):
            node.meta["size"] = _named(value, roles)
        node.meta["module"] = _module_path(node)
        node.meta["source"] = _source(node)


READS = ("aten.item.default", "aten._local_scalar_dense.default")
"""Ops that give a number of Python's."""


def _refuse_values(graph: fx.GraphModule) -> None:
    """Numbers that are read out of tensors, and shapes that values decide (`x[x > 0]`)."""
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        if str(node.target) in READS:
            raise CompileError(
                "forward reads a number out of a tensor",
                node=f"%{node.name}   {_module_path(node)}".rstrip(),
                source=_source(node),
                why="it would be that of the part that a rank holds, and is not known before",
                tries="the tensor itself, without .item()",
            )
        counted = node.target in COUNTS
        if isinstance(value, Tensor) and (counted or free_unbacked_symbols(value)):
            name = "aten.bincount.default" if counted else node.target
            raise CompileError(
                f"the shape of {name}'s result depends on the values of tensors",
                node=f"%{node.name}   {_module_path(node)}".rstrip(),
                source=_source(node),
                why="the parts that ranks hold must have sizes that are known before",
                tries="torch.where, or a mask that is multiplied in",
            )


def _named(size: int | torch.SymInt | torch.SymFloat, roles: Mapping[sympy.Symbol, sympy.Expr]) -> int | sympy.Expr:
    expression = _expression(size)
    return expression if isinstance(expression, int) else _plain(sympy.sympify(expression).xreplace(dict(roles)))


def _plain(expression: sympy.Expr) -> int | sympy.Expr:
    return int(expression) if expression.is_Integer else expression


def _module_path(node: fx.Node) -> str:
    stack = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    stack = [path for path in stack if not path.startswith("_empty_nn_module_stack")]
    return re.sub(r"@\d+", "", stack[-1]) if stack else ""


def _source(node: fx.Node) -> str | None:
    frames = re.findall(r'File "([^"]+)", line (\d+), in [^\n]+\n\s*([^\n]*)', node.meta.get("stack_trace") or "")
    if not frames:
        return None
    path, number, code = next((f for f in reversed(frames) if "/torch/nn/" not in f[0]), frames[-1])
    return f"{Path(path).name}:{number}   {code.strip()}"
