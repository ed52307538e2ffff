"""Try a user's rule on random tensors before it is taken."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ndcompile.rules.notation import Call, RuleError, line, tokens
from ndcompile.rules.trial import Outputs, Trial
from ndcompile.size import Shape, Size

WAYS = ((2,), (3,), (4,), (2, 2), (2, 3), (3, 2))
"""The axes on which each row is tried; of two that shard one dim the first is the major one."""

PAIRS = 8
"""Of each call's pairs of rows on two axes, at most so many are tried."""

Sizes = dict[str, int]


def probe(op: Any, text: str) -> None:
    """Run the op on the parts of random tensors, by every row of the rule, forward and gradient.

    Raises `RuleError` with the op, the rule, the row and what differed; or if the op cannot be called with tensors as
    the rule describes them, numbers and flags that it requires being filled in.
    """
    special = [token for part in _lists(text) for token in part if token[-1] in "?~"]
    if special:
        raise _refused(op, text, f"'{special[0]}' needs an algorithm that only ndcompile's own ops have")
    tried = 0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for shapes in _draws(text):
            trial = _trial(op, text, shapes)
            if trial is not None:
                tried += 1
                _check(op, text, trial)
    if not tried:
        shown = ", ".join(str(list(shape)) for shape in next(_draws(text)))
        raise _refused(op, text, f"the op cannot be called with tensors of sizes {shown}")


def _refused(op: Any, text: str, why: str) -> RuleError:
    return RuleError(f"the rule '{text}' of {op} is refused: {why}")


def _check(op: Any, text: str, trial: Trial) -> None:
    try:
        for ways in WAYS:
            trial.check(*ways, most=PAIRS)
    except RuleError as error:
        raise _refused(op, text, str(error)) from error


def _lists(text: str) -> list[tuple[str, ...]]:
    operands, _ = tokens(text)
    return list(operands)


def _draws(text: str) -> Iterator[list[tuple[int, ...]]]:
    """Sizes of the operands: that divide, that do not, of 1, with fewer leading dims, with leading dims of size 1."""
    operands, output = tokens(text)
    names = sorted({token.rstrip("!") for part in (*operands, output) for token in part} - {"*", "1"})
    choose = random.Random(0)
    for stars, pool in itertools.product((1, 2, 0), ((12, 4, 6, 18, 24), (5, 7, 9, 6, 11), (8, 3, 1, 2, 13))):
        picked = choose.sample(pool, min(len(names), len(pool))) + [6] * len(names)
        sizes = {"1": 1, **dict(zip(names, picked, strict=False))}
        leading = tuple(choose.sample((6, 4, 5, 12), stars))
        yield [_shape(part, sizes, leading) for part in operands]
        starred = [i for i, part in enumerate(operands) if "*" in part]
        if stars and len(starred) > 1:
            short = choose.choice(starred)
            yield [_shape(part, sizes, leading[1:] if i == short else leading) for i, part in enumerate(operands)]
            units = (1, *leading[1:])
            yield [_shape(part, sizes, units if i == short else leading) for i, part in enumerate(operands)]


def _shape(part: Sequence[str], sizes: Sizes, leading: tuple[int, ...]) -> tuple[int, ...]:
    dims = [leading if token == "*" else (sizes[token.rstrip("!")],) for token in part]
    return tuple(itertools.chain.from_iterable(dims))


def _trial(op: Any, text: str, shapes: Sequence[tuple[int, ...]]) -> Trial | None:
    """The call as a trial, with the first kinds of values that the op takes; None if it takes none."""
    call = _caller(op, len(shapes))
    for makers in itertools.islice(itertools.product((_normal, _positive, _integers, _flags), repeat=len(shapes)), 256):
        operands = tuple(make(shape, shapes) for make, shape in zip(makers, shapes, strict=True))
        try:
            outputs, again = call(operands), call(operands)
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
            continue
        if len(outputs) != 1:
            raise _refused(op, text, "it must return one tensor")
        if not all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(outputs, again, strict=True)):
            raise _refused(op, text, "it gives another value on each call")
        if outputs[0].isfinite().all():
            bound = line(text)(Call(str(op), tuple(map(_sized, shapes)), _sized(outputs[0].shape), {}))
            flows = tuple(x.is_floating_point() for x in operands)
            return Trial(bound, operands, flows, call, lambda x, place: call(x))
    return None


def _sized(shape: Sequence[int]) -> Shape:
    return tuple(Size(n) for n in shape)


def _normal(shape: tuple[int, ...], shapes: Sequence[tuple[int, ...]]) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _positive(shape: tuple[int, ...], shapes: Sequence[tuple[int, ...]]) -> Tensor:
    return torch.rand(shape, dtype=torch.float64) + 0.5


def _integers(shape: tuple[int, ...], shapes: Sequence[tuple[int, ...]]) -> Tensor:
    """Small enough to index any dim."""
    return torch.randint(0, min((n for other in shapes for n in other), default=2), shape)


def _flags(shape: tuple[int, ...], shapes: Sequence[tuple[int, ...]]) -> Tensor:
    return torch.rand(shape) < 0.5


FILLED: dict[str, Any] = {"int": 1, "float": 0.5, "number": 0.5, "bool": True}
"""What a required argument that is no tensor is given, by its type in the op's schema."""


def _caller(op: Any, count: int) -> Callable[[Sequence[Tensor]], Outputs]:
    """The op as a function of its tensors alone."""

    def call(tensors: Sequence[Tensor]) -> Outputs:
        result = op(*_arguments(op, list(tensors)))
        return (result,) if isinstance(result, Tensor) else tuple(result)

    return call


def _arguments(op: Any, tensors: list[Tensor]) -> list[Any]:
    if not isinstance(op, torch._ops.OpOverload):
        return tensors
    given: list[Any] = []
    left = iter(tensors)
    remaining = len(tensors)
    for argument in op._schema.arguments:
        kind = str(argument.type)
        if "Tensor" in kind and remaining:
            taken = list(left) if kind.startswith("List") else next(left)
            remaining -= len(taken) if isinstance(taken, list) else 1
            given.append(taken)
        elif argument.kwarg_only or (not remaining and argument.has_default_value()):
            break
        else:
            given.append(argument.default_value if argument.has_default_value() else FILLED.get(kind))
    return given
