"""What is other while a model is traced: functions of torch that a tracer loses, takes for a value, or stops at."""

from __future__ import annotations

import functools
import inspect
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ndcompile.counts import CALLS, bincount
from ndcompile.errors import NotOneGraph


@contextmanager
def around_forward(model: nn.Module, made: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """While it holds, each call of the model's `forward` stands in a context: the model's code, and not the tracer's.

    A class that has a `__call__` of its own has code around its `forward`, so there the context is on all the time.
    """
    if type(model).__call__ is not nn.Module.__call__:
        with made():
            yield
        return
    own, inner = vars(model).get("forward"), model.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with made():
            return inner(*args, **kwargs)

    forward.__signature__ = inspect.signature(inner)  # type: ignore[attr-defined]  # not that of the class, with `self`
    model.forward = forward
    try:
        yield
    finally:
        del model.forward
        if own is not None:
            model.forward = own


FACTORIES = frozenset(
    {torch.arange, torch.empty, torch.eye, torch.full, torch.linspace, torch.logspace, torch.ones, torch.zeros}
    | {torch.hann_window, torch.hamming_window, torch.blackman_window}
    | {
        torch.rand,
        torch.randint,
        torch.randn,
        torch.randperm,
        torch.scalar_tensor,
        torch.tril_indices,
        torch.triu_indices,
    }
)


DIVISIONS = frozenset({torch.div, torch.divide, torch.true_divide})
"""`torch.div(x.size(1), 8, rounding_mode="trunc")` would be a tensor, and as a size of another be read on the host."""

HOOKS = frozenset({Tensor.register_hook, Tensor.register_post_accumulate_grad_hook})
DATA = Tensor.data.__get__  # type: ignore[attr-defined]
VALUED = frozenset({torch.tensor, torch.as_tensor})


class WhereInputsAre(TorchFunctionMode):
    """Tensors that a model makes without saying a device are made where its inputs are: while traced, on meta.

    Those that it makes of values are made with them, and then moved: the values stay in the graph, as a constant.
    `called` is told of every function.
    """

    def __init__(self, called: Callable[[Any], None]) -> None:
        super().__init__()
        self._called = called

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._called(function)
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if function in VALUED and not (args and isinstance(args[0], Tensor)):
            return function(*args, **kwargs | {"device": None}).to("meta" if device is None else device)
        if function is Tensor.new_tensor and not isinstance(args[1], Tensor):
            return torch.tensor(args[1], dtype=kwargs.get("dtype") or args[0].dtype).to(device or args[0].device)
        if function is Tensor.__getitem__:
            return function(args[0], _listed_places(args[1]))
        if function in DIVISIONS and _of_sizes(*args, **kwargs):
            return args[0] // args[1]
        if function is F.cross_entropy:
            return _cross_entropy(*args, **kwargs)
        if function in HOOKS:
            raise NotOneGraph(
                "a hook changes or sees a gradient, and a graph has the forward alone",
                "the same in the forward: x * a + (x - x * a).detach() has the value of x, and a times its gradient",
            )
        if function == DATA:
            return args[0].detach()
        if function in CALLS:
            return bincount(*args, **kwargs)
        if device is None and function in FACTORIES:
            return function(*args, **kwargs | {"device": "meta"})
        return function(*args, **kwargs)


def _of_sizes(one: Any, two: Any, *, rounding_mode: str | None = None, out: Any = None) -> bool:
    """Whether a division is one of sizes, which are not negative, to a whole number."""
    sizes = type(one) is torch.SymInt and type(two) in (int, torch.SymInt)
    return sizes and rounding_mode is not None and out is None and (type(two) is torch.SymInt or two > 0)


@contextmanager
def inference_is_no_grad() -> Iterator[None]:
    """While a model is traced, `torch.inference_mode()` is `torch.no_grad()`: the tracer forgets the former."""
    kind: Any = torch.inference_mode
    enter, leave = kind.__enter__, kind.__exit__

    def entered(self: Any) -> None:
        self.within = torch.set_grad_enabled(not self.mode)
        self.within.__enter__()

    kind.__enter__, kind.__exit__ = entered, lambda self, *error: self.within.__exit__(*error)
    try:
        yield
    finally:
        kind.__enter__, kind.__exit__ = enter, leave


@contextmanager
def drawn_by_torch() -> Iterator[None]:
    """Refuse a model that draws numbers by Python's `random` or by numpy: the graph would have what came out."""
    before = _states()
    yield
    if _states() != before:
        raise NotOneGraph(
            "it draws numbers by Python's random or by numpy, and each call would have those of the trace",
            "torch.rand, torch.randn or dropout, which no mesh changes",
            "0 as the probability, if layers are skipped at random",
        )


def _states() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    kind, keys, place, *_ = numpy.random.get_state() if numpy else ("", b"", 0)
    return random.getstate(), kind, bytes(keys), place


@contextmanager
def autocast_where_inputs_are() -> Iterator[None]:
    """While a model is traced, `torch.autocast(x.device.type, enabled=False)` switches autocast off, as on any device.

    One that is on casts other ops on each device, and while traced `x` has none.
    """
    inner = torch.autocast.__init__

    @functools.wraps(inner)
    def made(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, *cached: Any, **more: Any) -> None:
        if device_type == "meta" and enabled:
            raise NotOneGraph(
                "what autocast does depends on the device, and it is on for the device of a tensor that is traced",
                'the device by its name: torch.autocast("cuda", dtype=torch.bfloat16)',
                "torch.autocast around nd.compile",
            )
        inner(self, "cpu" if device_type == "meta" else device_type, dtype, enabled, *cached, **more)

    torch.autocast.__init__ = made  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = inner  # type: ignore[method-assign]


def _cross_entropy(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Losses that are not reduced, over classes at dim 1 of three: with two dims torch gives them no shape on meta."""
    reduction = kwargs.get("reduction", args[4] if len(args) > 4 else "mean")
    if reduction != "none" or input.dim() != 2 or target.dim() != 1:
        return F.cross_entropy(input, target, *args, **kwargs)
    return F.cross_entropy(input.unsqueeze(2), target.unsqueeze(1), *args, **kwargs).squeeze(1)


def _listed_places(index: Any) -> Any:
    """An index with each list of places as a tensor that keeps its values, `x[:, [0, -1]]`."""
    if isinstance(index, tuple):
        return tuple(_listed_places(part) for part in index)
    if isinstance(index, list) and index and all(type(place) is int for place in index):
        return torch.tensor(index).to("meta")
    return index


@contextmanager
def registered_as_values() -> Iterator[None]:
    """While a model is traced, a buffer that its forward registers is an attribute.

    The tracer knows no place for it, and would write it to another input.
    """
    inner = nn.Module.register_buffer

    @functools.wraps(inner)
    def register(self: nn.Module, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        if name in self._buffers:
            inner(self, name, tensor, persistent)
        else:
            setattr(self, name, tensor)

    nn.Module.register_buffer = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_buffer = inner  # type: ignore[method-assign]
