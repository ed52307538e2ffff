"""Model → reference graph: what the model computes on one device, as ATen ops with symbols for batch and sequence."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from ndcompile.autocast import Autocast
from ndcompile.blocks import blocks_of, first_names, tensors_of
from ndcompile.borders import Borders, spell_out
from ndcompile.conditions import answers, conditions
from ndcompile.counts import count_places
from ndcompile.drawn import Draws
from ndcompile.errors import CompileError, NotOneGraph, tries_of_read
from ndcompile.fold import NotFollowed, fold
from ndcompile.functional import make_functional, mark_views
from ndcompile.inputs import DynamicDims, Inputs, name_dims, traced_inputs
from ndcompile.known import Known
from ndcompile.labels import label_nodes, label_placeholders, refuse_values, roles_of, set_dtypes, widen_casts
from ndcompile.literals import write_literals
from ndcompile.own_backward import derivatives_alone, name_gradients
from ndcompile.precision import Precision
from ndcompile.regions import inline_regions
from ndcompile.remat import Kept, Remat, Reshard, read_kept
from ndcompile.runtime import private
from ndcompile.synonyms import replace_synonyms
from ndcompile.twin import cast_inputs, cast_parameters, name_keywords, on_meta, refuse_hooks
from ndcompile.while_traced import (
    WhereInputsAre,
    around_forward,
    autocast_where_inputs_are,
    drawn_by_torch,
    inference_is_no_grad,
    registered_as_values,
)
from ndcompile.withheld import Asked, Withheld


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
    conditions: list[str]
    """What the sizes of a call must be like, for the model to take the way that was traced."""


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
    name_gradients(graph)
    refuse_values(graph)
    if float64:
        widen_casts(graph)
    set_dtypes(graph, traced)
    roles = roles_of(graph, symbols)
    known = Known.of(answers(graph, roles))
    label_nodes(graph, roles, known)
    make_functional(graph)
    spec = exported.call_spec.out_spec
    assert spec is not None, "export returns the structure of its outputs"
    plain = {name: value for name, value in named.items() if not isinstance(value, Tensor)}
    return Captured(graph, names, plain, spec, model.training, kept, conditions(known))


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
    names = label_placeholders(exported, tensors, first, list(given.named), constants, dict(tensors_of(twin)))
    write_literals(graph)
    inline_regions(graph, options.autocast)
    replace_synonyms(graph)
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
    made = (lambda: WhereInputsAre(seen.op), withheld.watching, Draws, *AROUND)
    modes = [around_forward(model, each) for each in made]
    try:
        with ExitStack() as held:
            for context in (*plain, *modes, withheld.emptied(), borders.marked(), seen.seen(), derivatives_alone()):
                held.enter_context(context)
            exported = torch.export.export(model, bound.args, bound.kwargs, dynamic_shapes=shapes, strict=False)
    except Exception as error:  # whatever stops the tracer is an error of the model's, told as one
        if withheld.asked:
            raise Asked from error
        raise _not_captured(model, error, given) from error
    withheld.settle(borders.again)
    return exported


AROUND = (autocast_where_inputs_are, inference_is_no_grad, drawn_by_torch, registered_as_values)
"""What the tracer would not see of a forward, or take for what it is once."""


def _not_captured(model: nn.Module, error: Exception, given: _Given) -> CompileError:
    text = str(error)
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\w+)\s*\n\s*(.*)', text)
    import traceback

    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        ours = Path(frame.filename).parent in (Path(__file__).parent, Path(private.__file__).parent)
        ours = ours or frame.filename == contextlib.__file__
        if "/torch/" not in frame.filename and not ours:
            frames.append((frame.filename, str(frame.lineno), frame.name, frame.line or ""))
            break
    frames = [frame for frame in frames if not frame[0].startswith("<")]  # code that was made, not written
    source = f"{Path(frames[-1][0]).name}:{frames[-1][1]}   {frames[-1][3].strip()}" if frames else None
    cut = f"{type(model).__name__} cannot be captured as one graph"
    if isinstance(error, NotOneGraph):
        return CompileError(cut, source=source, why=error.why, tries=error.tries)
    depends = any(word in text for word in ("data-dependent", "Data dependent", "Could not guard", "unbacked"))
    depends = depends or "item()" in text or "Cannot call" in text or "_local_scalar_dense" in text
    if depends:
        return CompileError(
            cut,
            source=source,
            why="its control flow depends on the values of tensors",
            tries=tries_of_read(source, "torch.where instead of if on a tensor"),
        )
    if "register a pytree" in text or text.startswith("unhashable type"):  # the latter is torch 2.11's
        caches = getattr(getattr(model, "config", None), "use_cache", False)
        return CompileError(
            f"{type(model).__name__} returns or takes a class that cannot be taken apart",
            source=source,
            why=text.strip().splitlines()[0].split(". ")[0],
            tries="model.config.use_cache = False, as keys and values of past tokens are for generation"
            if caches
            else "torch.export.register_dataclass(TheClass), or a dict",
        )
    return CompileError(
        f"{type(model).__name__} cannot be traced with the example inputs",
        source=source,
        why=f"{type(error).__name__}: {(text.strip().splitlines() or [''])[0][:300]}",
        tries="inputs that it makes itself where none are given, as attention_mask=: while traced it may not make them"
        if "'NoneType' object" in text
        else (*_other_batches(given), "inputs with which the model runs on one device"),
    )


def _other_batches(given: _Given) -> Iterator[str]:
    """What is to be said of inputs whose dim 0 is taken for the batch, and has another size in the example."""
    batches = {name: len(x) for name, x in given.named.items() if given.symbols.get(name, {}).get(0) == "b"}
    (size, _), *others = Counter(batches.values()).most_common() or [(0, 0)]
    if others:
        none = ", ".join(f"'{name}': {{}}" for name, other in batches.items() if other != size)
        yield f"dynamic_dims={{{none}}}, if dim 0 is not the batch, which is {size} in other inputs of the example"


def _know_users(graph: fx.GraphModule) -> None:
    """Where a model has a no-grad region, torch 2.13 loses nodes that take lists from the users of what they take."""
    for node in graph.graph.nodes:
        for value in node.all_input_nodes:
            value.users.setdefault(node)
