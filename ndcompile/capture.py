"""Model → reference graph: what the model computes on one device, as ATen ops with symbols for batch and sequence."""

from __future__ import annotations

import copy
import inspect
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ndcompile.autocast import Autocast, casts
from ndcompile.errors import CompileError

BATCH, SEQUENCE = sympy.Symbol("b", positive=True, integer=True), sympy.Symbol("s", positive=True, integer=True)
DynamicDims = Mapping[str, Mapping[int, str]]
"""For an input by name, which of its dims is which symbol: `{"pixels": {0: "b"}}`."""


@dataclass(frozen=True)
class Inputs:
    """How the model is called: positional and keyword arguments, and where in them the tensors are."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, example: object) -> Inputs:
        """A dict is keyword arguments, a tuple or list positional ones, one tensor the only one."""
        if isinstance(example, Mapping):
            return cls((), dict(example))
        if isinstance(example, (tuple, list)):
            return cls(tuple(example), {})
        return cls((example,), {})

    def named(self, model: nn.Module) -> dict[str, Any]:
        """Every leaf with a name that a user would give it: the parameter of `forward`, dotted where nested."""
        signature = inspect.signature(model.forward)
        try:
            bound = signature.bind(*self.args, **self.kwargs).arguments
        except TypeError as error:
            raise CompileError(
                f"the example inputs do not fit {type(model).__name__}.forward: {error}",
                tries=f"example_inputs for forward{signature}",
            ) from error
        found: dict[str, Any] = {}
        for name, value in bound.items():
            for path, leaf in pytree.tree_flatten_with_path(value, is_leaf=lambda v: v is None)[0]:
                found[name + pytree.keystr(path)] = leaf
        return found


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


def capture(
    model: nn.Module,
    example: Inputs,
    *,
    compute: torch.dtype | None = None,
    float64: bool = False,
    dynamic_dims: DynamicDims | None = None,
    autocast: Autocast | None = None,
) -> Captured:
    """Trace the model in its present mode on meta tensors; the model is left as it is.

    Placeholders carry `role` (parameter, buffer, constant, input) and `name`; every node carries `sizes` (sympy, in `b`
    and `s`), `dtype`, `module`, `source`. `compute` casts parameters before tracing; `float64` makes every floating
    value a float64 one (tests and verify only); `autocast` is the one that capture stands under.
    """
    refuse_hooks(model)
    twin, constants = on_meta(model)
    if compute is not None or float64:
        cast_parameters(twin, torch.float64 if float64 else compute)
    named = example.named(model)
    symbols = name_dims(named, dynamic_dims)
    traced = dict(_fakes(named, symbols, torch.float64 if float64 else None))
    exported = _export(twin, example, named, symbols, traced)
    graph = exported.graph_module
    names = _label_placeholders(exported, model, list(named), constants)
    _refuse_sizes_from_values(graph)
    _inline_regions(graph, autocast)
    if float64:
        widen_casts(graph)
    _propagate_dtypes(graph, traced)
    _label_nodes(graph, _roles(graph, symbols))
    _make_functional(graph)
    _refuse_returned_parameters(graph)
    spec = exported.call_spec.out_spec
    assert spec is not None, "export returns the structure of its outputs"
    plain = {name: value for name, value in named.items() if not isinstance(value, Tensor)}
    return Captured(graph, names, plain, spec, model.training)


def refuse_hooks(model: nn.Module) -> None:
    """Forward hooks on inner modules do not run in emitted code, so a model that has some is refused."""
    for path, module in model.named_modules():
        if has_hooks(module):
            raise CompileError(
                f"module '{path or type(model).__name__}' has a hook",
                why="the emitted module has no inner calls that a hook could see",
                tries=("remove the hook", "write its effect into forward"),
            )


def has_hooks(module: nn.Module) -> bool:
    return any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))


def on_meta(model: nn.Module) -> tuple[nn.Module, dict[int, Tensor]]:
    """A copy that shares no storage: parameters, buffers and plain tensor attributes on the meta device.

    The second result gives the real tensor of each plain attribute by the id of its copy.
    """
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        twin = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = (
            nn.Parameter(twin, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin
        )
    attributes: dict[int, Tensor] = {}
    for module in model.modules():
        for value in pytree.tree_leaves(list(vars(module).values())):
            if isinstance(value, Tensor) and id(value) not in memo:
                memo[id(value)] = torch.empty_like(value, device="meta")
                attributes[id(memo[id(value)])] = value
    return copy.deepcopy(model, memo), attributes


def cast_parameters(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Floating parameters become `dtype`; for float64 the buffers too. Tied parameters stay tied."""
    assert dtype is not None
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    if dtype == torch.float64:
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(dtype)


def name_dims(named: Mapping[str, Any], dynamic_dims: DynamicDims | None) -> dict[str, dict[int, str]]:
    """Which dim of which input is `b` or `s`: dim 0 of all is the batch, dim 1 of integer inputs the sequence.

    A floating companion of an integer input has the sequence at dim 1 too if it has as many entries there.
    """
    tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
    for name in dynamic_dims or {}:
        if name not in tensors:
            raise CompileError(f"dynamic_dims names '{name}', which is no tensor input", tries=", ".join(tensors))
    lengths = {value.shape[1] for value in tensors.values() if value.dim() > 1 and not value.is_floating_point()}
    found: dict[str, dict[int, str]] = {}
    for name, value in tensors.items():
        dims = {0: "b"} if value.dim() else {}
        if value.dim() > 1 and (not value.is_floating_point() or (value.dim() == 2 and value.shape[1] in lengths)):
            dims[1] = "s"
        found[name] = dict((dynamic_dims or {}).get(name, dims))
    return found


def _export(
    model: nn.Module,
    example: Inputs,
    named: Mapping[str, Any],
    symbols: Mapping[str, Mapping[int, str]],
    traced: Mapping[str, Any],
) -> torch.export.ExportedProgram:
    """Every tensor in the place where the call has it, by the parameter of `forward` that takes it."""
    bound = inspect.signature(model.forward).bind(*example.args, **example.kwargs)
    leaves, spec = pytree.tree_flatten(dict(bound.arguments), is_leaf=lambda v: v is None)
    assert len(leaves) == len(named), "each leaf has a name"
    dims = [
        dict.fromkeys(symbols[name], torch.export.Dim.AUTO) if isinstance(value, Tensor) else None
        for name, value in named.items()
    ]
    shapes = pytree.tree_unflatten(dims, spec)
    bound.arguments.update(pytree.tree_unflatten(list(traced.values()), spec))
    try:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False), WhereInputsAre():
            return torch.export.export(model, bound.args, bound.kwargs, dynamic_shapes=shapes, strict=False)
    except Exception as error:  # whatever stops the tracer is an error of the model's, told as one
        raise _not_captured(model, error) from error


FACTORIES = frozenset(
    {torch.arange, torch.empty, torch.eye, torch.full, torch.linspace, torch.ones, torch.zeros}
    | {torch.rand, torch.randint, torch.randn, torch.randperm, torch.tril_indices, torch.triu_indices}
)


class WhereInputsAre(TorchFunctionMode):
    """Tensors that a model makes without saying a device are made where its inputs are: while traced, on meta."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") is not None or function not in FACTORIES | {torch.tensor}:
            return function(*args, **kwargs)
        if function is torch.tensor:
            return function(*args, **kwargs).to("meta")  # the values stay in the graph, as a constant
        return function(*args, **kwargs | {"device": "meta"})


def _fakes(
    named: Mapping[str, Any], symbols: Mapping[str, Mapping[int, str]], widen: torch.dtype | None
) -> Iterator[tuple[str, Any]]:
    """Each input its own meta tensor, with sizes ≥ 2 that differ between symbols and from all other dims."""
    used = {n for v in named.values() if isinstance(v, Tensor) for n in v.shape}
    sizes = {}
    for name, value in named.items():
        for dim, symbol in symbols.get(name, {}).items():
            if symbol == "s" or symbol not in sizes:
                sizes[symbol] = int(value.shape[dim])
    fresh = (n for n in (5, 7, 11, 13, 17, 19, 23) if n not in used)
    for symbol in sizes:
        if symbol == "b" or sizes[symbol] < 2:
            sizes[symbol] = next(fresh)
    for name, value in named.items():
        if not isinstance(value, Tensor):
            yield name, value
            continue
        shape = [sizes[symbols[name][d]] if d in symbols[name] else n for d, n in enumerate(value.shape)]
        dtype = widen if widen is not None and value.is_floating_point() else value.dtype
        yield name, torch.empty(shape, dtype=dtype, device="meta", requires_grad=value.requires_grad)


def _not_captured(model: nn.Module, error: Exception) -> CompileError:
    text = str(error)
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\w+)\s*\n\s*(.*)', text)
    import traceback

    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if "/torch/" not in frame.filename and not frame.filename.endswith("ndcompile/capture.py"):
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
    if "register a pytree" in text:
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


def _label_placeholders(
    exported: torch.export.ExportedProgram, model: nn.Module, names: list[str], attributes: Mapping[int, Tensor]
) -> tuple[str, ...]:
    """Say of each placeholder what it is, and make one of the placeholders of a tied parameter."""
    first = {id(p): name for name, p in model.named_parameters()}
    canonical = {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    owners = {name: p.requires_grad for name, p in model.named_parameters()}
    inputs = iter(names)
    graph, merged, found = exported.graph_module.graph, dict[str, fx.Node](), list[str]()
    for node, spec in zip(graph.find_nodes(op="placeholder"), exported.graph_signature.input_specs, strict=True):
        kind = spec.kind.name
        if kind == "PARAMETER":
            name = canonical[spec.target or ""]
            if name in merged:
                node.replace_all_uses_with(merged[name])
                continue
            merged[name] = node
            node.meta |= dict(role="parameter", name=name, grad=owners[name])
        elif kind == "BUFFER":
            node.meta |= dict(role="buffer", name=spec.target, grad=False)
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
    _refuse_mutation(exported)
    for node in graph.find_nodes(op="placeholder"):
        unused = not node.users and "role" not in node.meta
        if unused or (node.meta["role"] == "input" and not isinstance(node.meta.get("val"), Tensor)):
            assert not node.users, f"{node} is a constant input and has no uses in the graph"
            graph.erase_node(node)
    return tuple(found)


def _refuse_mutation(exported: torch.export.ExportedProgram) -> None:
    signature = exported.graph_signature
    for name in (*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate):
        raise _mutation(f"'{name}'")


def _mutation(what: str, node: fx.Node | None = None) -> CompileError:
    return CompileError(
        f"forward changes {what} in place",
        node=None if node is None else f"%{node.name}   {node.meta['module']}".rstrip(),
        source=None if node is None else node.meta["source"],
        why="an update of what outlives the call is not compiled yet",
        tries=("return the new value instead", "model.eval(), where only training updates it"),
    )


def _inline_regions(graph: fx.GraphModule, autocast: Autocast | None) -> None:
    """Put the bodies of no-grad and autocast regions in line: no-grad as `detach`; each node knows its autocast."""
    for node in graph.graph.nodes:
        node.meta["autocast"] = autocast
    while regions := [n for n in graph.graph.nodes if str(n.target).startswith("wrap_with_")]:
        for node in regions:
            _inline(graph, node)
    graph.graph.lint()


def _inline(graph: fx.GraphModule, node: fx.Node) -> None:
    grad_region = "set_grad" in str(node.target)
    at = next(i for i, a in enumerate(node.args) if isinstance(a, fx.Node) and a.op == "get_attr")
    settings, body_node, inputs = node.args[:at], node.args[at], node.args[at + 1 :]
    assert isinstance(body_node, fx.Node)
    body = getattr(graph, str(body_node.target))
    inside = node.meta["autocast"] if grad_region else _autocast_of(settings)
    stops = grad_region and not settings[0]
    copied: dict[fx.Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), inputs, strict=True))
    with graph.graph.inserting_before(node):
        for inner in body.graph.nodes:
            if inner.op in ("placeholder", "output"):
                continue
            new = graph.graph.node_copy(inner, lambda n: copied[n])
            new.meta["autocast"] = inside
            if inner.op == "get_attr":
                setattr(graph, str(inner.target), getattr(body, str(inner.target)))
            if stops and isinstance(new.meta.get("val"), Tensor) and new.meta["val"].is_floating_point():
                cut = graph.graph.call_function(torch.ops.aten.detach.default, (new,))
                cut.meta = dict(new.meta)
                copied[inner] = cut
            else:
                copied[inner] = new
    results = fx.node.map_arg(body.graph.output_node().args[0], lambda n: copied[n])
    for user in list(node.users):
        assert user.target is operator.getitem, "a region's results are taken by getitem"
        user.replace_all_uses_with(results[user.args[1]])
        graph.graph.erase_node(user)
    graph.graph.erase_node(node)
    if not body_node.users:
        graph.graph.erase_node(body_node)


def _autocast_of(settings: Sequence[Any]) -> Autocast | None:
    """From the arguments of an autocast region: device, dtype, enabled."""
    device, dtype, enabled = str(settings[0]), settings[1], settings[2]
    return Autocast(device, dtype or torch.get_autocast_dtype(device)) if enabled else None


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


def _roles(graph: fx.GraphModule, symbols: Mapping[str, Mapping[int, str]]) -> dict[sympy.Symbol, sympy.Symbol]:
    """The tracer's symbols to `b`, `s`, or a name of the user's."""
    found: dict[sympy.Symbol, sympy.Symbol] = {}
    for node in graph.graph.find_nodes(op="placeholder"):
        if node.meta["role"] != "input":
            continue
        for dim, symbol in symbols[node.meta["name"]].items():
            expression = _expression(node.meta["val"].shape[dim])
            if isinstance(expression, sympy.Symbol):
                found[expression] = {"b": BATCH, "s": SEQUENCE}.get(symbol) or sympy.Symbol(symbol, positive=True)
            elif symbol == "b":
                raise CompileError(
                    f"the batch size of input '{node.meta['name']}' is fixed by the model",
                    why="a data-parallel rank has another batch size than the example's",
                    tries="use x.size(0) in the model instead of a number",
                )
    return found


def _expression(size: int | torch.SymInt) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _label_nodes(graph: fx.GraphModule, roles: Mapping[sympy.Symbol, sympy.Symbol]) -> None:
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
            value = value[0]
        if isinstance(value, Tensor):
            node.meta["sizes"] = tuple(_named(size, roles) for size in value.shape)
        elif isinstance(value, torch.SymInt):
            node.meta["size"] = _named(value, roles)
        node.meta["module"] = _module_path(node)
        node.meta["source"] = _source(node)


def _refuse_sizes_from_values(graph: fx.GraphModule) -> None:
    """Shapes that values decide (`x[x > 0]`)."""
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and free_unbacked_symbols(value):
            raise CompileError(
                f"the shape of {node.target}'s result depends on the values of tensors",
                node=f"%{node.name}   {_module_path(node)}".rstrip(),
                source=_source(node),
                why="the parts that ranks hold must have sizes that are known before",
                tries="torch.where, or a mask that is multiplied in",
            )


def _named(size: int | torch.SymInt, roles: Mapping[sympy.Symbol, sympy.Symbol]) -> int | sympy.Expr:
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


def _refuse_returned_parameters(graph: fx.GraphModule) -> None:
    for value in graph.graph.output_node().all_input_nodes:
        if value.op == "placeholder" and value.meta["role"] in ("parameter", "buffer"):
            raise CompileError(
                f"forward returns {value.meta['role']} '{value.meta['name']}' itself",
                why="between steps each rank holds a part of it",
                tries="model.get_parameter(name), outside of forward",
            )


ALIASING = ("view", "reshape", "transpose", "slice", "select", "expand", "unsqueeze", "squeeze", "permute", "split")


def _make_functional(graph: fx.GraphModule) -> None:
    """`relu_(x)` becomes `relu(x)`, and later uses of x use the result. An update through a view is refused."""
    order = {node: i for i, node in enumerate(graph.graph.nodes)}
    for node in list(graph.graph.nodes):
        if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
            continue
        changed = node.args[0]
        packet = getattr(torch.ops.aten, str(node.target.overloadpacket).split(".")[-1].rstrip("_"), None)
        overload = getattr(packet, node.target._overloadname, None) if packet else None
        aliased = isinstance(changed, fx.Node) and (
            changed.op == "placeholder"
            or any(word in str(changed.target) for word in ALIASING)
            or any(any(word in str(user.target) for word in ALIASING) for user in changed.users)
        )
        if isinstance(changed, fx.Node) and changed.op == "placeholder":
            raise _mutation(f"{changed.meta['role']} '{changed.meta['name']}'", node)
        if overload is None or aliased or not isinstance(changed, fx.Node):
            raise CompileError(
                f"{node.target} changes a tensor in place that other names share",
                node=f"%{node.name}   {node.meta['module']}".rstrip(),
                source=node.meta["source"],
                why="a view of it would have to change too",
                tries="the same without in-place: y = f(x)",
            )
        node.target = overload
        for user in [user for user in changed.users if order.get(user, 1 << 30) > order[node]]:
            user.replace_input_with(changed, node)
    graph.recompile()
