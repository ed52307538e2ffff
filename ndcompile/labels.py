"""What nodes of a traced graph carry: what a placeholder is, dtypes, sizes in symbols, modules and source lines."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ndcompile.autocast import casts
from ndcompile.counts import COUNTS
from ndcompile.errors import CompileError, tries_of_read
from ndcompile.known import Known
from ndcompile.rounded import rounded
from ndcompile.runtime import private

BATCH, SEQUENCE = sympy.Symbol("b", positive=True, integer=True), sympy.Symbol("s", positive=True, integer=True)

MOST_NUMBERS = 1 << 16
"""Of a buffer of positions or choices, that a program keeps."""

READS = ("aten.item.default", "aten._local_scalar_dense.default")
"""Ops that give a number of Python's."""


def label_placeholders(
    exported: torch.export.ExportedProgram,
    tensors: Mapping[str, Tensor],
    first: Mapping[str, str],
    names: list[str],
    attributes: Mapping[int, Tensor],
    twin: Mapping[str, Tensor],
) -> tuple[str, ...]:
    """Say of each placeholder what it is, and make one of the placeholders of a tied parameter or buffer.

    `tensors` are the model's parameters and buffers, `twin` those of the copy that was traced.
    """
    inputs = iter(names)
    held = [*tensors.items(), *((name, tensor) for name, tensor in twin.items() if name in tensors)]  # others are made
    reached = {_memory(tensor): first[name] for name, tensor in held}
    graph, merged, found = exported.graph_module.graph, dict[str, fx.Node](), list[str]()
    for node, spec in zip(graph.find_nodes(op="placeholder"), exported.graph_signature.input_specs, strict=True):
        kind = spec.kind.name
        if kind == "CONSTANT_TENSOR":
            constant = exported.constants[spec.target or ""]
            assert isinstance(constant, Tensor), f"{spec.target} is a tensor constant"
            name = reached.get(_memory(constant))
            if name is None:
                value = attributes.get(id(constant), constant)
                node.meta |= dict(role="constant", name=spec.target, grad=False, value=value)
                _refuse_learned(node)
                continue
            if not _is_all_of(constant, twin[name]):
                raise _around(node, name)
            kind = "PARAMETER"
        else:
            name = first.get(spec.target or "", "")
        if kind in ("PARAMETER", "BUFFER"):
            if name in merged:
                node.replace_all_uses_with(merged[name])
                continue
            merged[name] = node
            grad = kind == "PARAMETER" and tensors[name].requires_grad
            node.meta |= dict(role=kind.lower(), name=name, grad=grad)
            if kind == "BUFFER" and _counts(tensors[name]):
                node.meta["value"] = tensors[name].detach().clone()
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


def _memory(x: Tensor) -> tuple[int | None, int]:
    """Where a tensor begins."""
    return private.storage_id(x), 0 if private.is_distributed(x) else int(x.storage_offset())


def _is_all_of(constant: Tensor, parameter: Tensor) -> bool:
    """Whether it is a parameter that was reached by another way than its module, `self.listed[0]`, and as it is."""
    alike = constant.shape == parameter.shape and constant.stride() == parameter.stride()
    return isinstance(parameter, nn.Parameter) and alike and constant.dtype == parameter.dtype


def _around(node: fx.Node, name: str) -> CompileError:
    """Where it is a part of a parameter, or a buffer, which may be written to before it is read."""
    return CompileError(
        f"forward reaches '{name}' without going through the module that has it",
        source=_source(next(iter(node.users))) if node.users else None,
        why="it would be a constant of the program: without a gradient, and never another",
        tries=f"self.{name.rpartition('.')[2]} in the forward of its module",
    )


def _refuse_learned(node: fx.Node) -> None:
    value = node.meta["value"]
    if value.requires_grad:
        raise CompileError(
            f"the model holds '{node.meta['name']}' {list(value.shape)}, which takes a gradient and is no parameter",
            source=_source(next(iter(node.users))) if node.users else None,
            why="it would be a constant of the program, without a gradient",
            tries=("nn.Parameter, or nn.ParameterList for several", ".detach(), if it is not learned"),
        )


def _counts(buffer: Tensor) -> bool:
    """Whether a buffer holds whole numbers, which are known and so few that a program may keep them for `verify`."""
    return not (buffer.is_floating_point() or buffer.is_complex() or buffer.is_meta) and buffer.numel() <= MOST_NUMBERS


def widen_casts(graph: fx.GraphModule) -> None:
    """Float64 mode: each cast to, or factory of, a lower float dtype gives float64 instead."""
    lower = (torch.float32, torch.bfloat16, torch.float16)
    for node in graph.graph.nodes:
        if node.op == "call_function":
            node.args = tuple(torch.float64 if a in lower and isinstance(a, torch.dtype) else a for a in node.args)
            node.kwargs = {
                k: torch.float64 if isinstance(v, torch.dtype) and v in lower else v for k, v in node.kwargs.items()
            }


def set_dtypes(graph: fx.GraphModule, traced: Mapping[str, Any]) -> None:
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


def roles_of(graph: fx.GraphModule, symbols: Mapping[str, Mapping[int, str]]) -> dict[sympy.Symbol, sympy.Expr]:
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
                node.meta["fixed_at"] = _fixed_at(node, int(expression))
            elif symbol != "b":
                raise CompileError(
                    f"the length '{symbol}' of input '{node.meta['name']}' is tied to other sizes by the model",
                    why=f"tracing found it to be {expression}: a number in the model holds for the example's sizes",
                    tries="use x.size(dim) in the model instead of a number, or leave the dim out of dynamic_dims",
                )
            else:
                raise CompileError(
                    f"the batch size of input '{node.meta['name']}' is fixed by the model",
                    source=_fixed_at(node, expression),
                    why="a data-parallel rank has another batch size than the example's",
                    tries="use x.size(0) in the model instead of a number",
                )
    return {symbol: fixed.get(role, role) for symbol, role in found.items()}


def _fixed_at(node: fx.Node, size: Any) -> str | None:
    """The line that made a number of a length."""
    line = private.fixed_at(node.meta["val"], size)
    return line and f"{Path(line.filename).name}:{line.lineno}   {(line.line or '').strip()}"


def _expression(size: int | torch.SymInt | torch.SymFloat) -> Any:
    """A size as a number or in symbols; `float(size)` is that size."""
    if isinstance(size, torch.SymFloat):
        return size.node.expr.replace(lambda part: type(part).__name__ == "ToFloat", lambda part: part.args[0])
    return size.node.expr if isinstance(size, torch.SymInt) else size


def label_nodes(graph: fx.GraphModule, roles: Mapping[sympy.Symbol, sympy.Expr], known: Known) -> None:
    """Set every node's `sizes` (of a number its `size`) in the user's symbols, its `module` and its `source`.

    An input has `chunks` too: the numbers that lengths are known to divide by.
    """
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
            value = value[0]
        if isinstance(value, Tensor):
            node.meta["sizes"] = tuple(_named(size, roles, known) for size in value.shape)
        elif isinstance(value, (torch.SymInt, torch.SymFloat)):
            node.meta["size"] = _named(value, roles, known)
        if node.meta.get("role") == "input":
            node.meta["chunks"] = {str(x): chunk for x, chunk in known.chunks.items()}
        node.meta["module"] = _module_path(node)
        node.meta["source"] = _source(node)


def refuse_values(graph: fx.GraphModule) -> None:
    """Numbers that are read out of tensors, and shapes that values decide (`x[x > 0]`)."""
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        if str(node.target) in READS:
            raise CompileError(
                "forward reads a number out of a tensor",
                node=f"%{node.name}   {_module_path(node)}".rstrip(),
                source=_source(node),
                why="it would be that of the part that a rank holds, and is not known before",
                tries=tries_of_read(_source(node), "the tensor itself, without .item()"),
            )
        counted = node.target in COUNTS
        if isinstance(value, Tensor) and (counted or free_unbacked_symbols(value)):
            name = "aten.bincount.default" if counted else node.target
            raise CompileError(
                f"the shape of {name}'s result depends on the values of tensors",
                node=f"%{node.name}   {_module_path(node)}".rstrip(),
                source=_source(node),
                why="the parts that ranks hold must have sizes that are known before",
                tries="torch.where(mask, x, y), or a mask that is multiplied in",
            )


def _named(
    size: int | torch.SymInt | torch.SymFloat, roles: Mapping[sympy.Symbol, sympy.Expr], known: Known
) -> int | sympy.Expr:
    expression = _expression(size)
    if isinstance(expression, int):
        return expression
    return _plain(known.simplified(rounded(sympy.sympify(expression).xreplace(dict(roles)))))


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
