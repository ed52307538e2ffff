"""A `torch.autograd.Function` of the model's: a graph has its forward, and gradients are derivatives of what it has.

Where backward is not that derivative, forward is written as ops that have it: what it gives, with the gradient of what
backward is the derivative of.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ndcompile import forwards, runtime
from ndcompile.errors import NotOneGraph
from ndcompile.runtime import private

MOST = 1 << 27
"""Arguments with more elements than this, 1 GiB in float64, are not tried."""

NEAR = 1e-5
"""How far two gradients may be apart, of their size: constants of formulas are rounded."""

SIZES = (1.0, 1 / 16)
"""How large the numbers are on which a Function is tried: on large ones it may have no finite values."""

_LIBRARY = torch.library.Library("ndcompile", "FRAGMENT")
_LIBRARY.impl(
    _LIBRARY.define("with_gradient_of(Tensor x, Tensor y) -> Tensor"),
    lambda x, y: torch.empty_like(x),
    "CompositeExplicitAutograd",
)
TRACED = torch.ops.ndcompile.with_gradient_of.default
"""`runtime.with_gradient_of` while a model is traced."""

SHAPES = frozenset(
    "zeros_like ones_like empty_like full_like new_zeros new_ones new_empty new_full new_empty_strided sym_size "
    "sym_numel sym_stride".split()
)
"""Ops that take no values of their operand."""

TRIES = (
    "the same with torch's ops: x + (f(x) - x).detach() has the value of f, and the gradient of x",
    "torch.library.custom_op with register_autograd, and nd.register_rule",
)

OURS = f"{runtime.__name__}."

Forward = Callable[..., Any]


@contextmanager
def derivatives_alone() -> Iterator[None]:
    """While a model is traced, its Functions have the derivatives that their backwards are, or are refused.

    Gradients are compared on random numbers.
    """
    trying = False

    def call(kind: Any, forward: Forward, given: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal trying
        first = int(_takes_context(kind))
        if trying or not any(map(_differentiated, given[first:])):
            return forward(*given, **kwargs)
        called, trying = _Call(kind, forward, given[first:], kwargs), True
        try:
            right = _is_derivative(called)
            return forward(*given, **kwargs) if right else called.written(given[:first], TRACED)
        finally:
            trying = False

    with _forwards_seen(call):
        yield


def name_gradients(graph: fx.GraphModule) -> None:
    """What was traced for `runtime.with_gradient_of` becomes it."""
    for node in graph.graph.find_nodes(op="call_function", target=TRACED):
        node.target = runtime.with_gradient_of
    graph.recompile()


@contextmanager
def _forwards_seen(call: Callable[[Any, Forward, tuple[Any, ...], dict[str, Any]], Any]) -> Iterator[None]:
    """Let `call` do each call of a `Function`, by whatever name it is called: many keep `f = Function.apply`, which
    looks for the class's `forward`.
    """
    kinds = [kind for kind in _below(torch.autograd.Function) if not kind.__module__.startswith(("torch.", OURS))]
    with forwards.replaced({kind: staticmethod(_seen(kind, call)) for kind in kinds}):
        yield


def _below(kind: Any) -> Iterator[Any]:
    for each in dict.fromkeys(kind.__subclasses__()):
        yield each
        yield from _below(each)


def _seen(kind: Any, call: Callable[[Any, Forward, tuple[Any, ...], dict[str, Any]], Any]) -> Forward:
    forward = kind.forward

    @functools.wraps(forward)
    def seen(*given: Any, **kwargs: Any) -> Any:
        return call(kind, forward, given, kwargs)

    return seen


def _takes_context(kind: Any) -> bool:
    """Whether `forward` gets the context first: no `setup_context` gets it after."""
    return kind.setup_context is torch.autograd.Function.setup_context


def _differentiated(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


class _Call:
    """A call of a Function."""

    def __init__(self, kind: Any, forward: Forward, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.kind, self.forward, self.args, self.kwargs = kind, forward, args, kwargs
        self.tried: list[bool] | None = None
        """Of which tensors the transpose of backward took values where it was tried."""

    def plain(self) -> Any:
        """What forward gives, by torch's ops alone."""
        return self._called(self.args)[0]

    def written(self, contexts: Sequence[Any], joined: Callable[[Tensor, Tensor], Tensor]) -> Any:
        """What forward gives, as ops whose derivative is backward: `joined` gives the first the gradient of the second.

        `contexts` are told which results have none.
        """
        made, context = self._called([_apart(x) for x in self.args])
        results = _listed(made)
        for each in contexts:
            each.mark_non_differentiable(*context._not_differentiable)
        graph, values, taken = self._transpose(context, results)
        if self.tried is not None and self.tried != taken:
            why = f"{self.kind.__name__}.backward is another where it is traced than where it was tried"
            raise NotOneGraph(why, *TRIES)
        linear = fx.Interpreter(graph).run(*values)
        results = [y if z is None else joined(y, z) for y, z in zip(results, linear, strict=True)]
        return tuple(results) if isinstance(made, tuple) else results[0]

    def _called(self, args: Sequence[Any]) -> tuple[Any, _Context]:
        """What forward gives, and the context that it leaves to backward."""
        context = _Context(map(_differentiated, self.args))
        if _takes_context(self.kind):
            return self.forward(context, *args, **self.kwargs), context
        made = self.forward(*args, **self.kwargs)
        self.kind.setup_context(context, tuple(args), made)
        return made, context

    def taken(self) -> list[bool]:
        """Of which tensors the transpose of backward takes values: gradients of results, what is kept, arguments."""
        made, context = self._called([_apart(x) for x in self.args])
        return self._transpose(context, _listed(made))[2]

    def _transpose(self, context: _Context, results: Sequence[Any]) -> tuple[fx.GraphModule, list[Any], list[bool]]:
        """What gives for each result what is linear in the arguments and has backward as its derivative; and of what.

        It is the transpose of backward, which torch gives as a derivative with regard to the results' gradients. It is
        traced by itself: what autograd keeps of composed ops is not known to what traces a model.
        """
        seeds = [_seed(context, y) for y in results]
        carry = [_differentiated(x) for x in seeds]
        wanted = [x if _differentiated(x) else None for x in self.args]
        leaves, spec = pytree.tree_flatten((seeds, _kept(context), wanted))
        places = [i for i, x in enumerate(leaves) if isinstance(x, (Tensor, torch.SymInt))]
        values = [leaves[i] for i in places]

        def transposed(*given: Any) -> list[Tensor | None]:
            held = dict(zip(places, given, strict=True))
            at, kept, args = pytree.tree_unflatten([held.get(i, x) for i, x in enumerate(leaves)], spec)
            at = [x.detach().requires_grad_() if carries else x for x, carries in zip(at, carry, strict=True)]
            return self._derived(_Context(context.needs_input_grad, kept), at, args)

        graph = private.traced_apart(transposed, values)
        graph.graph.eliminate_dead_code()
        taken = [
            _takes_values(graph, given)
            for given, x in zip(graph.graph.find_nodes(op="placeholder"), values, strict=True)
            if isinstance(x, Tensor)
        ]
        if any(taken[: sum(x is not None for x in seeds)]):
            why = f"{self.kind.__name__}.backward is not linear in the gradient that it is given, as a derivative is"
            raise NotOneGraph(why, *TRIES)
        return graph, values, taken

    def _derived(
        self, context: _Context, seeds: Sequence[Tensor | None], args: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """The derivative of backward with regard to each seed, times the arguments."""
        backward = inspect.unwrap(self.kind.backward)  # without `once_differentiable`
        found = backward(context, *(None if x is None else x.clone() for x in seeds))
        found = found if isinstance(found, tuple) else (found,)
        pairs = [(x, g) for x, g in zip(args, found, strict=False) if x is not None and _differentiated(g)]
        at = [x for x in seeds if x is not None and x.requires_grad]
        if not pairs or not at:
            return [None] * len(seeds)
        gradients = [g.sum_to_size(x.shape).to(x.dtype) for x, g in pairs]
        got = iter(torch.autograd.grad(gradients, at, [x for x, _ in pairs], allow_unused=True, create_graph=True))
        return [next(got) if _differentiated(x) else None for x in seeds]


def _listed(made: Any) -> list[Any]:
    return list(made) if isinstance(made, tuple) else [made]


def _apart(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x


def _takes_values(graph: fx.GraphModule, given: fx.Node) -> bool:
    """Whether values of what is given reach what is returned."""
    reached = {given}
    for node in graph.graph.nodes:
        shape = node.op == "call_function" and getattr(node.target, "__name__", "").partition(".")[0] in SHAPES
        if not shape and not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
    return graph.graph.output_node() in reached


class _Context:
    """In the place of the one that keeps things for backward."""

    def __init__(self, needed: Iterable[bool], kept: Mapping[str, Any] = MappingProxyType({})) -> None:
        self.needs_input_grad = tuple(needed)
        self.saved_tensors: tuple[Any, ...] = ()
        self._not_differentiable: tuple[Tensor, ...] = ()
        self._materialized = True
        vars(self).update(kept)

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Any) -> None:
        pass

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        self._not_differentiable = tensors

    def mark_dirty(self, *tensors: Tensor) -> None:
        raise NotOneGraph("an autograd.Function changes what it is given", "one that gives a new tensor")

    def set_materialize_grads(self, value: bool) -> None:
        self._materialized = value


INNER = ("needs_input_grad", "_not_differentiable", "_materialized")
"""What a context has that forward did not leave for backward."""


def _kept(context: _Context) -> dict[str, Any]:
    return {name: value for name, value in vars(context).items() if name not in INNER}


def _seed(context: _Context, y: Any) -> Tensor | None:
    """What backward gets in the place of the gradient of a result; it is differentiated if the result is."""
    if not isinstance(y, Tensor):
        return None
    if (y.is_floating_point() or y.is_complex()) and not any(y is x for x in context._not_differentiable):
        return torch.zeros_like(y, requires_grad=True)
    return torch.zeros_like(y) if context._materialized else None


def _is_derivative(call: _Call) -> bool:
    """Whether backward is the derivative of forward. Raises where that of what `written` gives is another, too."""
    name = call.kind.__name__
    elements = sum(math.prod(map(private.hint, x.shape)) for x in call.args if isinstance(x, Tensor))
    if elements > MOST:
        why = f"whether {name}.backward is the derivative of its forward was not tried on {elements:,} numbers"
        raise NotOneGraph(why, "a smaller example, where these sizes are its batch and its length", *TRIES)
    shapes = [[*map(private.hint, x.shape)] if isinstance(x, Tensor) else private.hint(x) for x in call.args]
    with private.untraced(), torch.random.fork_rng(devices=[]):
        try:
            return _tried(call, shapes)
        except NotOneGraph:
            raise
        except Exception as error:  # of the model's code, on numbers that it may not be made for
            said = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
            why = f"whether {name}.backward is the derivative of its forward is not known ({said})"
            raise NotOneGraph(why, *TRIES) from error


def _tried(call: _Call, shapes: Sequence[Any]) -> bool:
    for size in SIZES:
        given = [_drawn(x, at, size) for x, at in zip(call.args, shapes, strict=True)]
        tried = _Call(call.kind, call.forward, given, call.kwargs)
        own = _gradients(functools.partial(call.kind.apply, **call.kwargs), given)
        if all(x.isfinite().any() or not x.numel() for x in own):
            break
    is_derivative = all(map(_near, own, _gradients(lambda *_: tried.plain(), given)))
    why = f"{call.kind.__name__}.backward is not the derivative of its forward, and torch does not transpose it"
    try:
        call.tried = tried.taken()
    except NotOneGraph:
        raise
    except Exception as error:  # torch's, of what it cannot derive: then numbers alone say that it is the derivative
        if is_derivative:
            return True
        raise NotOneGraph(why, *TRIES) from error
    if is_derivative:
        return True
    if not all(map(_same, own, _gradients(lambda *_: tried.written((), runtime.with_gradient_of), given))):
        raise NotOneGraph(why, *TRIES)
    return False


def _drawn(x: Any, at: Any, size: float) -> Any:
    if not isinstance(x, Tensor):
        return at
    generator = torch.Generator().manual_seed(0)
    if not x.is_floating_point():
        return torch.randint(0, 2, at, dtype=x.dtype, device="cpu", generator=generator)
    drawn = torch.randn(at, dtype=torch.float64, device="cpu", generator=generator) * size
    return drawn.requires_grad_(x.requires_grad)


def _gradients(run: Any, given: Sequence[Any]) -> list[Tensor]:
    """Of a random sum of what it returns, with regard to what is differentiated."""
    torch.default_generator.manual_seed(0)  # what it draws is the same each time
    generator = torch.Generator().manual_seed(1)
    made = [y for y in pytree.tree_leaves(run(*given)) if isinstance(y, Tensor) and y.is_floating_point()]
    seeds = [torch.randn(y.shape, dtype=y.dtype, device="cpu", generator=generator) for y in made]
    pairs = [(y, seed) for y, seed in zip(made, seeds, strict=True) if y.requires_grad]
    made, seeds = [y for y, _ in pairs], [seed for _, seed in pairs]
    wanted = [x for x in given if _differentiated(x)]
    found = torch.autograd.grad(made, wanted, seeds, allow_unused=True) if made else [None] * len(wanted)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=True)]


def _near(own: Tensor, wanted: Tensor) -> bool:
    """Where the derivative is finite: a root's may be bounded elsewhere."""
    finite = wanted.isfinite()
    own, wanted = own[finite], wanted[finite]
    return bool(finite.any() or not finite.numel()) and _same(own, wanted)


def _same(own: Tensor, written: Tensor) -> bool:
    """Everywhere, and somewhere a number."""
    finite = own[own.isfinite()].abs()
    size = float(finite.max()) if finite.numel() else 0.0
    numbers = finite.numel() or not own.numel()
    return bool(numbers) and torch.allclose(own, written, rtol=NEAR, atol=NEAR * size, equal_nan=True)
