"""An op on parts against the op on the whole: every row that its rule allows, forward and gradient."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ndcompile.placement import Placement, R
from ndcompile.rules.notation import RuleError, Signature
from ndcompile.rules.rows import Row, rows

TOLERANCE = 1e-9
Index = tuple[int, ...]
Outputs = tuple[Tensor, ...]
Rows = tuple[Row, ...]


@dataclass(frozen=True)
class Place:
    """Where a part is computed: the rank's index on each axis, the axes' sizes and rows, the local shape to give."""

    index: Index
    ways: Index
    rows: Rows
    shape: tuple[int, ...]


def one_by_one(jobs: Sequence[Callable[[], Outputs]]) -> list[Outputs]:
    return [job() for job in jobs]


class Arithmetic:
    """What a trial computes in, and how it deals a dim: here floating point, with a tolerance, in equal parts."""

    exact = False
    unknown: type[Exception] | tuple[()] = ()
    """What an op raises that has no meaning here: nothing is said of it."""

    def within(self) -> AbstractContextManager[object]:
        """A block whose ops are done in this arithmetic."""
        return nullcontext()

    def draw(self, x: Tensor) -> Tensor:
        """Random numbers of the form of `x`: a share of a partial value, a cotangent."""
        return torch.randint(-4, 5, x.shape).to(x) if _counts(x) else torch.randn(x.shape, dtype=x.dtype)

    def positions(self, size: int, placement: Placement, ranks: int) -> list[Tensor]:
        """Which elements of a sharded dim of `size` each rank holds: torch.chunk's parts."""
        step = -(-size // ranks)
        bounds = [min(rank * step, size) for rank in range(ranks + 1)]
        return [torch.arange(a, b) for a, b in itertools.pairwise(bounds)]


FLOATING = Arithmetic()


@dataclass(frozen=True)
class Trial:
    """A call to try: its operands, which of them carry a gradient, how it runs whole, and how on one rank's parts.

    A call that `fails` on the whole (an index out of range) must fail on the parts too.
    """

    signature: Signature
    operands: tuple[Tensor, ...]
    flows: tuple[bool, ...]
    whole: Callable[[Sequence[Tensor]], Outputs]
    part: Callable[[Sequence[Tensor], Place], Outputs]
    run_all: Callable[[Sequence[Callable[[], Outputs]]], list[Outputs]] = one_by_one
    arithmetic: Arithmetic = FLOATING
    fails: bool = False

    def check(self, *ways: int, most: int | None = None, among: Sequence[Rows] | None = None) -> Sequence[Rows]:
        """The combinations of rows on axes of these sizes, each tried; `RuleError` names the first that is wrong.

        Of more than `most` so many are tried, chosen at random. `among` are those to try, if it is not all.
        """
        whole = _Whole.of(self)
        combinations = self.combinations(*ways) if among is None else among
        if most is not None and len(combinations) > most:
            combinations = random.Random(most).sample(combinations, most)
        for chosen in combinations:
            try:
                _compare(self, ways, chosen, whole)
            except Differs as error:
                listed = " and then ".join(map(str, chosen))
                raise RuleError(f"row {listed} on {' × '.join(map(str, ways))} ranks: {error}") from error
        return combinations

    def combinations(self, *ways: int) -> list[Rows]:
        """A row for each axis of these sizes, in every way that the rule allows."""
        return list(row_combinations(self.signature, ways, self.flows))


class Differs(ValueError):
    """What the parts make is not what the whole makes."""


def row_combinations(
    signature: Signature, ways: Sequence[int], flows: Sequence[bool], taken: Mapping[str, int] | None = None
) -> Iterator[Rows]:
    """A row for each axis, each derived after the axes before it have taken their factors."""
    if not ways:
        yield ()
        return
    taken = taken or {}
    for row in rows(signature, ways[0], taken=taken, grads=flows):
        now = taken if row.factor is None else {**taken, row.factor: taken.get(row.factor, 1) * ways[0]}
        for others in row_combinations(signature, ways[1:], flows, now):
            yield (row, *others)


FAILURES = (RuntimeError, IndexError, ValueError, TypeError)
"""What an op raises on tensors that it does not take."""


@dataclass(frozen=True)
class _Whole:
    """What the op makes of whole tensors: outputs, cotangents for them, the gradients (None: it has none)."""

    outputs: Outputs
    cotangents: Outputs
    gradients: list[Tensor] | None

    @classmethod
    def of(cls, trial: Trial) -> _Whole:
        inputs = [x.clone().requires_grad_(flow) for x, flow in zip(trial.operands, trial.flows, strict=True)]
        with trial.arithmetic.within():
            try:
                outputs = trial.whole(inputs)
            except FAILURES as error:
                if trial.fails and not isinstance(error, trial.arithmetic.unknown):
                    return cls((), (), None)
                raise
            assert not trial.fails, "the call was to fail on the whole, and does not"
            cotangents = tuple(torch.zeros_like(y) if _counts(y) else trial.arithmetic.draw(y) for y in outputs)
            try:
                gradients = _gradients(inputs, outputs, cotangents)
            except trial.arithmetic.unknown:
                raise
            except FAILURES as error:
                raise RuleError(f"its gradient fails on whole tensors: {_first_line(error)}") from error
        return cls(tuple(y.detach() for y in outputs), cotangents, gradients)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _counts(y: Tensor) -> bool:
    """Whether the elements are whole numbers, or true and false."""
    return not (y.is_floating_point() or y.is_complex())


def _gradients(inputs: Sequence[Tensor], outputs: Outputs, cotangents: Outputs) -> list[Tensor] | None:
    """The gradient of each input that carries one (zeros for the others); None if the outputs have none."""
    pairs = [(y, c) for y, c in zip(outputs, cotangents, strict=True) if y.requires_grad]
    wanted = [x for x in inputs if x.requires_grad]
    if not pairs or not wanted:
        return None
    ends, seeds = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(ends, wanted, seeds, allow_unused=True))
    made = [next(found) if x.requires_grad else None for x in inputs]
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, made, strict=True)]


def _compare(trial: Trial, ways: Sequence[int], chosen: Rows, whole: _Whole) -> None:
    given = [[row.operands[i] for row in chosen] for i in range(len(trial.operands))]
    made = [row.output for row in chosen]
    dealt = [deal(x, at, ways, trial.arithmetic) for x, at in zip(trial.operands, given, strict=True)]
    indices = list(itertools.product(*map(range, ways)))
    shapes = dict.fromkeys(indices, torch.Size()) if trial.fails else _shapes(trial, whole.outputs[0], made, ways)
    inputs = {i: [d[i].clone().requires_grad_(f) for d, f in zip(dealt, trial.flows, strict=True)] for i in indices}
    places = {i: Place(i, tuple(ways), chosen, tuple(shapes[i])) for i in indices}
    results = _run(trial, [(inputs[i], places[i]) for i in indices])
    if results is None:
        return
    by_rank = dict(zip(indices, results, strict=True))
    for number, wanted in enumerate(whole.outputs):
        parts = {i: result[number].detach() for i, result in by_rank.items()}
        _same(denote(parts, made, ways, "the value", trial.arithmetic), wanted, "the value", trial.arithmetic.exact)
    if whole.gradients is not None:
        seeds = [deal(c, [_dual(p) for p in made], ways, trial.arithmetic) for c in whole.cotangents]
        with trial.arithmetic.within():
            backward = {i: _gradients(inputs[i], by_rank[i], tuple(s[i] for s in seeds)) for i in indices}
        _compare_gradients(trial, backward, given, ways, whole.gradients)


def _shapes(trial: Trial, output: Tensor, made: Sequence[Placement], ways: Sequence[int]) -> dict[Index, torch.Size]:
    """The shape of each rank's part of the output."""
    shards = [p if p.kind == "S" else R for p in made]
    parts = deal(torch.empty(output.shape, device="meta"), shards, ways, trial.arithmetic)
    return {index: part.shape for index, part in parts.items()}


def _dual(placement: Placement) -> Placement:
    try:
        return placement.dual
    except ValueError as error:
        raise Differs(str(error)) from error


def _run(trial: Trial, calls: Sequence[tuple[list[Tensor], Place]]) -> list[Outputs] | None:
    """What each rank computes; None where a call that is to fail does."""

    def job(x: list[Tensor], place: Place) -> Outputs:
        with trial.arithmetic.within():
            return trial.part(x, place)

    try:
        results = trial.run_all([partial(job, x, place) for x, place in calls])
    except trial.arithmetic.unknown:
        raise
    except FAILURES as error:
        if trial.fails:
            return None
        raise Differs(f"the op fails on the parts: {_first_line(error)}") from error
    if trial.fails:
        raise Differs("the op fails on the whole, and on no rank's part")
    return results


def _compare_gradients(
    trial: Trial,
    backward: Mapping[Index, list[Tensor] | None],
    given: Sequence[Sequence[Placement]],
    ways: Sequence[int],
    gradients: Sequence[Tensor],
) -> None:
    if any(found is None for found in backward.values()):
        raise Differs("the parts carry no gradient")
    for number, flow in enumerate(trial.flows):
        if flow:
            what = f"the gradient of operand {number}"
            parts = {index: found[number] for index, found in backward.items() if found is not None}
            joined = denote(parts, [_dual(p) for p in given[number]], ways, what, trial.arithmetic)
            _same(joined, gradients[number], what, trial.arithmetic.exact)


def deal(
    value: Tensor, placements: Sequence[Placement], ways: Sequence[int], arithmetic: Arithmetic = FLOATING
) -> dict[Index, Tensor]:
    """Tensors on the ranks of several axes that stand for `value`, by the ranks' indices."""
    held: dict[Index, Tensor] = {(-1,) * len(ways): value}
    for axis in _dealt(placements):
        held = {
            (*index[:axis], rank, *index[axis + 1 :]): part
            for index, x in held.items()
            for rank, part in enumerate(split(x, placements[axis], ways[axis], arithmetic))
        }
    return held


def denote(
    parts: Mapping[Index, Tensor],
    placements: Sequence[Placement],
    ways: Sequence[int],
    what: str = "the value",
    arithmetic: Arithmetic = FLOATING,
) -> Tensor:
    """The value that the ranks' tensors stand for; `Differs` if they cannot be what the placements say."""
    held = dict(parts)
    for axis in reversed(_dealt(placements)):
        groups: dict[Index, list[Tensor]] = {}
        for index in sorted(held):
            groups.setdefault((*index[:axis], -1, *index[axis + 1 :]), []).append(held[index])
        held = {index: _joined(group, placements[axis], what, arithmetic) for index, group in groups.items()}
    return held[(-1,) * len(ways)]


def _dealt(placements: Sequence[Placement]) -> list[int]:
    """Partial axes first, then shards, major first, then copies, which are equal in everything before."""
    order = {"P": 0, "S": 1, "R": 2, "I": 2}
    return sorted(range(len(placements)), key=lambda axis: order[placements[axis].kind])


def split(x: Tensor, placement: Placement, ranks: int, arithmetic: Arithmetic = FLOATING) -> list[Tensor]:
    """What the ranks of one axis hold of `x`; the shares of a partial value are random."""
    if placement.kind == "S":
        assert placement.dim is not None
        held = arithmetic.positions(x.shape[placement.dim], placement, ranks)
        return [x.index_select(placement.dim, each.to(x.device)) for each in held]
    if placement.kind == "P":
        with arithmetic.within():
            shares = [arithmetic.draw(x) for _ in range(ranks - 1)]
            return _shared(x, shares, placement.op or "sum")
    return [x] * ranks


def _shared(x: Tensor, shares: list[Tensor], op: str) -> list[Tensor]:
    """Tensors of which the reduction is `x`."""
    if op == "sum":
        return [x - sum(shares, torch.zeros_like(x)), *shares]
    return [x, *((torch.minimum if op == "max" else torch.maximum)(x, share) for share in shares)]


def _joined(parts: Sequence[Tensor], placement: Placement, what: str, arithmetic: Arithmetic) -> Tensor:
    try:
        if placement.kind == "S":
            assert placement.dim is not None
            whole = torch.cat(list(parts), placement.dim)
            held = arithmetic.positions(whole.shape[placement.dim], placement, len(parts))
            if [len(each) for each in held] != [part.shape[placement.dim] for part in parts]:
                raise Differs(f"{what} has parts {[tuple(p.shape) for p in parts]} that are no {placement}")
            return whole.index_select(placement.dim, torch.cat(held).argsort())
        if placement.kind == "P":
            with arithmetic.within():
                return _reduced(torch.stack(list(parts)), placement.op or "sum")
    except (RuntimeError, IndexError) as error:
        raise Differs(f"{what} has parts {[tuple(p.shape) for p in parts]} that are no {placement}") from error
    for part in parts[1:]:
        _same(part, parts[0], f"{what}, which is {placement}, between the ranks", arithmetic.exact)
    return parts[0]


def _reduced(stacked: Tensor, op: str) -> Tensor:
    if op == "sum":
        return stacked.sum(0, dtype=stacked.dtype)
    return stacked.amax(0) if op == "max" else stacked.amin(0)


def _same(found: Tensor, wanted: Tensor, what: str, exact: bool) -> None:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        mine, whole = (f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in (found, wanted))
        raise Differs(f"{what} differs: {mine} instead of {whole}")
    if exact or _counts(wanted):
        if not torch.equal(found, wanted):
            raise Differs(f"{what} differs")
        return
    finite = wanted[wanted.isfinite()].abs()
    scale = max(float(finite.max()) if finite.numel() else 0.0, 1e-3)
    if not torch.allclose(found, wanted, rtol=0, atol=TOLERANCE * scale, equal_nan=True):
        error = float((found - wanted).nan_to_num().abs().max()) / scale
        raise Differs(f"{what} differs by {error:.2g} of its size")
