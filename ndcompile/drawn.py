"""Branches on drawn numbers: `if torch.rand([]) < 0.0` has one way, since no number that is drawn is below 0."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from ndcompile.errors import NotOneGraph
from ndcompile.runtime import private

DRAWS = frozenset({torch.rand, torch.rand_like})
"""Functions that draw from 0 to below 1."""

Comparison = Callable[[float, float], bool]

COMPARISONS: dict[Any, Comparison] = {
    function: by
    for by, names in (
        (operator.lt, "lt less"), (operator.le, "le less_equal"), (operator.gt, "gt greater"),
        (operator.ge, "ge greater_equal"), (operator.eq, "eq"), (operator.ne, "ne not_equal"),
    )
    for function in (
        *(getattr(place, name) for place in (torch, Tensor) for name in names.split()),
        getattr(Tensor, f"__{names.split()[0]}__"),
    )
}  # fmt: skip

READS = frozenset({Tensor.__bool__, Tensor.item})
"""How Python takes a truth value out of a tensor."""


class Draws(TorchFunctionMode):
    """While a model is traced, answers a comparison of a drawn number where all that may be drawn give one answer.

    Known are draws and their comparisons with numbers as long as nothing else takes them, as it might change them.
    Refused are a branch that one call takes and another does not, and a generator of the model's own.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """A draw → None; a comparison of one → its answer, or a text of what is compared."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("generator") is not None:
            raise NotOneGraph(
                "it draws from a generator of its own, whose state is one device's",
                "the same without generator=: the numbers are a function of torch's seed then",
            )
        if function in READS and (answer := self._known.get(args[0])) is not None:
            return _read(answer)
        result = function(*args, **kwargs)
        if function in DRAWS and "out" not in kwargs:
            self._known[result] = None
        elif self._known:
            self._follow(function, args, kwargs, result)
        return result

    def _follow(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        taken = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x in self._known]
        number = args[1] if len(args) > 1 else kwargs.get("other")
        by = COMPARISONS.get(function) if "out" not in kwargs else None
        for x in taken:
            if by is not None and isinstance(number, (int, float)) and self._known[x] is None:
                answers = set(_answers(by, x.dtype, number))
                text = f"torch.rand {SIGNS[by]} {number}"
                self._known[result] = answers.pop() if len(answers) == 1 else text
            else:
                self._known.pop(x, None)


SIGNS: dict[Comparison, str] = {
    operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">=", operator.eq: "==", operator.ne: "!=",
}  # fmt: skip


def _read(answer: bool | str) -> bool:
    if isinstance(answer, str):
        raise NotOneGraph(
            f"which way it goes depends on a drawn number ({answer}), which is another one at each call",
            "0 as the probability: config.layerdrop = 0.0, where layers are skipped at random",
            "drop path: what a layer adds, times (torch.rand(()) >= p) / (1 - p)",
        )
    return answer


def _answers(by: Comparison, dtype: torch.dtype, number: float) -> Iterator[bool]:
    """What numbers from 0 to the last one below 1 give: at both ends, and where they are nearest to the other side.

    That is compared as it is, or rounded to the numbers' dtype: devices differ.
    """
    last = 1 - torch.finfo(dtype).eps / 2
    with private.undispatched():
        rounded = torch.tensor(number, dtype=dtype, device="cpu").item()
    for other in (number, rounded):
        yield from (by(drawn, other) for drawn in (0.0, min(max(other, 0.0), last), last))
