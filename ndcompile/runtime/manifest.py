"""What must be known of a program to run its source: plain data, saved beside the source as JSON."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ndcompile.runtime import private
from ndcompile.runtime.leaves import named_leaves


@dataclass(frozen=True)
class ParameterPlan:
    """A parameter between steps: its whole shape and, per dim, the axes that shard it (major first)."""

    shape: tuple[int, ...]
    dtype: str
    dims: tuple[tuple[str, ...], ...]
    requires_grad: bool = True


@dataclass(frozen=True)
class Argument:
    """A parameter of `forward`; `default` counts where `optional`."""

    name: str
    kind: int
    optional: bool = False
    default: Any = None


@dataclass(frozen=True)
class InputPlan:
    """A tensor input: its dtype, and for each dim a fixed size, or a symbol whose size must divide by `multiples`;
    `grad` says whether it may have a gradient.
    """

    name: str
    dtype: str
    dims: tuple[int | str, ...]
    grad: bool


NUMBERS = {"max": max, "min": min, "float": float, "int": int}
"""What conditions call."""


@dataclass
class Manifest:
    """Everything about a program but its text.

    `outputs` gives for each result the axes (not data axes) that shard it, with the dim and its whole size (0: equal
    parts); `updates` the buffers that a forward writes; `assumed` those whose values the program rests on, with their
    digests; `multiples` the number of ranks that a symbol must divide by; `conditions` what the model asked of global
    sizes when it was traced, and found to be so.

    With `pads`, the number that an input is lengthened with, a sequence need not divide: `limits` says how long it may
    become, by which table, and `ends` which dims of each result are cut back: the dim, its symbol, what is added.

    With `halves`, blocks compute two halves of a rank's batch, which must be even.
    """

    mesh: str
    root: str
    model: str
    flattened: list[tuple[str, ...]]
    parameters: dict[str, ParameterPlan]
    aliases: dict[str, str]
    buffers: list[str]
    arguments: list[Argument]
    input_plans: list[InputPlan]
    constants: dict[str, Any]
    outputs: list[dict[str, list[int]]]
    output_text: str
    multiples: dict[str, dict[str, int]]
    compute: str | None = None
    reduce: str | None = None
    autocast_text: str | None = None
    training: bool = True
    random: bool = False
    halves: bool = False
    pads: dict[str, float] = field(default_factory=dict)
    limits: dict[str, list[Any]] = field(default_factory=dict)
    ends: list[list[list[Any]]] = field(default_factory=list)
    updates: list[str] = field(default_factory=list)
    conditions: list[str] = field(default_factory=list)
    assumed: dict[str, str] = field(default_factory=dict)
    _spec: Any = field(default=None, repr=False)

    @property
    def inputs(self) -> list[str]:
        return [plan.name for plan in self.input_plans]

    @property
    def autocast(self) -> torch.dtype | None:
        return as_dtype(self.autocast_text)

    @property
    def output_spec(self) -> pytree.TreeSpec:
        if self._spec is None:
            self._spec = pytree.treespec_loads(self.output_text)
        return self._spec

    @property
    def signature(self) -> inspect.Signature:
        """The model's `forward`, as users call it."""
        empty = inspect.Parameter.empty
        kinds = list(inspect._ParameterKind)
        return inspect.Signature(
            [
                inspect.Parameter(a.name, kinds[a.kind], default=a.default if a.optional else empty)
                for a in self.arguments
            ]
        )

    def tensors(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensor inputs of a call, in the program's order. Raises ValueError where the call is another one."""
        try:
            given = named_leaves(self.signature, args, kwargs)
        except TypeError as error:
            raise ValueError(f"{self.model}.forward: {error}") from error
        defaults = {a.name: a.default for a in self.arguments if a.optional}
        left_out = {name: defaults[name] for name in self.constants if name not in given and name in defaults}
        for name, value in (given | left_out).items():
            if name not in self.inputs and not self._expected(name, value):
                takes = f"{', '.join(self.inputs)} as tensors and {self.constants or 'no constants'}"
                raise ValueError(
                    f"input '{name}' = {_short(value)} is not one that the model was compiled for\n"
                    f"  why  it was compiled with {takes}\n"
                    f"  try  example_inputs that hold '{name}'"
                )
        missing = [name for name in self.inputs if not isinstance(given.get(name), Tensor)]
        if missing:
            raise ValueError(
                f"input '{missing[0]}' is missing, or no tensor\n"
                f"  why  the model was compiled with it\n"
                f"  try  example_inputs without it, for a program of its own"
            )
        return [given[name] for name in self.inputs]

    def _expected(self, name: str, value: Any) -> bool:
        if isinstance(value, Tensor):
            return False
        if name in self.constants:
            return bool(self.constants[name] == value)
        default = {a.name: a.default for a in self.arguments if a.optional}
        return name in default and bool(default[name] == value)

    def check(self, tensors: list[Tensor]) -> None:
        """Raise ValueError where an input has another dtype, rank or size than the program can take."""
        measured: dict[str, tuple[int, str]] = {}
        for plan, tensor in zip(self.input_plans, tensors, strict=True):
            if str(tensor.dtype) != plan.dtype or tensor.dim() != len(plan.dims):
                raise ValueError(
                    f"input '{plan.name}' is {tensor.dtype} of {tensor.dim()} dims, "
                    f"the model was compiled for {plan.dtype} of {len(plan.dims)}"
                )
            for dim, (size, wanted) in enumerate(zip(tensor.shape, plan.dims, strict=True)):
                if isinstance(wanted, int) and size != wanted:
                    raise ValueError(f"input '{plan.name}' has size {size} at dim {dim}, the model takes {wanted}")
                before, other = measured.setdefault(str(wanted), (size, plan.name))
                if size != before and wanted != "b":
                    raise ValueError(
                        f"input '{plan.name}' has size {size} at dim {dim}, where '{other}' has {before}\n"
                        f"  why  the program was compiled for one size '{wanted}' of both\n"
                        f"  try  example inputs of different sizes, or dynamic_dims={{'{plan.name}': {{{dim}: '…'}}}}"
                    )
                if wanted == "b" and self.halves and (own := private.local(tensor).shape[dim]) % 2:
                    raise ValueError(
                        f"input '{plan.name}' has {own} samples on a rank, which are not two halves\n"
                        f"  why  the program was compiled with halves=True\n"
                        f"  try  {own + 1} samples a rank{f', or {own - 1}' if own > 1 else ''}"
                    )
                for axis, ranks in self.multiples.get(str(wanted), {}).items():
                    if size % ranks and plan.name not in self.pads:
                        raise ValueError(
                            f"input '{plan.name}' has size {size} at dim {dim}, which does not divide by {ranks}\n"
                            f"  why  axis '{axis}' cuts it into {ranks} equal parts\n"
                            f"  try  size {size // ranks * ranks or ranks} or {(size // ranks + 1) * ranks}\n"
                            f"  try  nd.parallelize(…, pad_inputs=True), for sequences"
                        )

    def check_ways(self, sizes: Mapping[str, int]) -> None:
        """Raise ValueError where the model would take another way than the one that was traced; by symbol the global
        sizes of a call, with pads.
        """
        for condition in self.conditions:
            if not holds(condition, sizes):
                named = ", ".join(
                    f"{name} = {size}" for name, size in sizes.items() if re.search(rf"\b{name}\b", condition)
                )
                raise ValueError(
                    f"for inputs of this size the model's forward takes another way: {named}\n"
                    f"  why  it asked whether {condition}, and was traced where that holds\n"
                    f"  try  example_inputs of this size, for a program of its own"
                )

    def lengths(self, tensors: Sequence[Tensor]) -> dict[str, int]:
        """The length of each sequence of a call, by its symbol."""
        found: dict[str, int] = {}
        for plan, x in zip(self.input_plans, tensors, strict=True):
            sizes = zip(plan.dims, x.shape, strict=True)
            found |= {symbol: size for symbol, size in sizes if isinstance(symbol, str) and symbol != "b"}
        return found

    def to_json(self) -> dict[str, Any]:
        return {k: v for k, v in asdict(self).items() if k != "_spec"}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Manifest:
        made = cls(**data)
        made.parameters = {
            name: ParameterPlan(tuple(p["shape"]), p["dtype"], tuple(map(tuple, p["dims"])), p["requires_grad"])
            for name, p in data["parameters"].items()
        }
        made.flattened = [tuple(axes) for axes in data["flattened"]]
        made.arguments = [Argument(**a) for a in data["arguments"]]
        made.input_plans = [InputPlan(p["name"], p["dtype"], tuple(p["dims"]), p["grad"]) for p in data["input_plans"]]
        return made


def holds(condition: str, sizes: Mapping[str, int]) -> bool:
    """Whether a condition is true of sizes by their symbols."""
    return bool(eval(_code(condition), {"__builtins__": {}} | NUMBERS, dict(sizes)))


@cache
def _code(condition: str) -> CodeType:
    return compile(condition, "<condition>", "eval")


def digest(tensor: Tensor) -> str:
    """Equal for tensors of equal shape, dtype and values."""
    held = tensor.detach().cpu().contiguous()
    text = f"{held.dtype} {list(held.shape)} "
    return hashlib.sha256(text.encode() + held.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def as_dtype(text: str | None) -> torch.dtype | None:
    """`"torch.bfloat16"` as a dtype."""
    return None if text is None else getattr(torch, text.removeprefix("torch."))


def _short(value: Any) -> str:
    return f"a tensor of {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
