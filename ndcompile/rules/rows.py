"""From a signature the rows on one axis: every placement of operands and output that an op allows."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ndcompile.placement import I, P, Placement, R, S
from ndcompile.rules.notation import Dims, Signature
from ndcompile.size import ONE, Size, product


@dataclass(frozen=True)
class Row:
    """One way to run an op on one axis: what it takes, what it gives, and the factor that it shards, if any."""

    operands: tuple[Placement, ...]
    output: Placement
    factor: str | None = None

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.operands))} → {self.output}"


def rows(
    signature: Signature,
    ranks: int,
    *,
    taken: Mapping[str, int] | None = None,
    grads: Sequence[bool] | None = None,
    symbols: frozenset[str] | None = None,
    batch: Size | None = None,
    steps: Mapping[str, int] | None = None,
) -> list[Row]:
    """All rows on an axis of `ranks` ranks.

    `taken` says how many ways earlier axes shard each factor, `grads` which operands carry a gradient (the others have
    one replicated placement, `R`), `symbols` which symbols the axis may shard (None: any). With the size of a
    `batch` the axis shards sequences, also inside a dim that joins one with it, and where an op communicates for it;
    `steps` says what a sequence's length is a multiple of.
    """
    taken = taken or {}
    flows = list(grads) if grads is not None else [True] * len(signature.operands)
    found = [Row(tuple(R for _ in flows), R)]
    if any(flows):
        found.append(Row(tuple(I if flow else R for flow in flows), I))
    found += _partial(signature, flows)
    for factor in signature.factors:
        at_once = factor in signature.together and (batch is None or len(signature.together) > 1)
        if not at_once and _divides(signature, factor, ranks, taken, symbols):
            majors = [None] if batch is None else _majors(signature.sizes[factor], batch, steps)
            found += [row for major in majors for row in _sharded(signature, factor, taken, flows, major)]
    if batch is not None and all(_divides(signature, factor, ranks, taken, symbols) for factor in signature.together):
        found += _together(signature)
    return list(dict.fromkeys(found))


def _divides(
    signature: Signature, factor: str, ranks: int, taken: Mapping[str, int], symbols: frozenset[str] | None
) -> bool:
    """Evenly; an integer dim that no other factor shares may also be cut unevenly, if it has a part for each rank."""
    if factor in signature.whole:
        return False
    size = signature.sizes[factor]
    if factor in signature.together and size.constant:
        return False
    if symbols is not None and not set(size.symbols) <= symbols:
        return False
    left = taken.get(factor, 1)
    if size.coefficient % (left * ranks) == 0:
        return True
    alone = all(factor not in dim or len(dim) == 1 for dims in (*signature.operands, signature.output) for dim in dims)
    step = -(-size.coefficient // ranks)
    return alone and left == 1 and size.constant and size.coefficient > step * (ranks - 1)


def _majors(size: Size, batch: Size, steps: Mapping[str, int] | None) -> list[Size]:
    """Within what a sequence in this size may be sharded: from its start, for each sample of a batch, or for each of
    several batches.
    """
    if "b" not in size.symbols or len(size.symbols) < 2 or size.coefficient % batch.coefficient:
        return [ONE]
    step = max((steps[symbol] if steps else 1 for symbol in size.symbols if symbol != "b"), default=1)
    times = size.coefficient // (batch.coefficient * step)
    several = [Size(times) * batch] if times > 1 and times * batch.coefficient * step == size.coefficient else []
    return [ONE, batch, *several]


def _together(signature: Signature) -> list[Row]:
    """The factors that an algorithm shards at once."""
    placed = []
    for dims in (*signature.operands, signature.output):
        dim = next((d for d, factors in enumerate(dims) if signature.together & set(factors)), None)
        placed.append(R if dim is None else S(dim))
    return [Row(tuple(placed[:-1]), placed[-1], sorted(signature.together)[0])] if signature.together else []


def leads(dims: Dims, factor: str, sizes: Mapping[str, Size], taken: Mapping[str, int]) -> int | None:
    """The dim that sharding the factor shards, -1 if the tensor lacks it; None if a larger factor stands before it."""
    for number, factors in enumerate(dims):
        if factor in factors:
            before = factors[: factors.index(factor)]
            full = all(sizes[f] == ONE or sizes[f] == Size(taken.get(f, 1)) for f in before)
            return number if full else None
    return -1


def minor(dims: Dims, factor: str, sizes: Mapping[str, Size], major: Size) -> Placement | None:
    """The factor sharded for each index of what stands before it in its dim, and of its own `major`."""
    for number, factors in enumerate(dims):
        if factor in factors:
            before = product(tuple(sizes[f] for f in factors[: factors.index(factor)])) * major
            return S(number, "" if before == ONE else str(before))
    return None


def _sharded(
    signature: Signature, factor: str, taken: Mapping[str, int], flows: Sequence[bool], major: Size | None
) -> list[Row]:
    tensors = (*signature.operands, signature.output)
    if major is not None:
        given = [minor(dims, factor, signature.sizes, major) for dims in tensors]
    else:
        places = [leads(dims, factor, signature.sizes, taken) for dims in tensors]
        if None in places:
            return []
        given = [None if dim is None or dim < 0 else S(dim) for dim in places]
    return _with_factor(signature, factor, flows, given[:-1], given[-1])


def _with_factor(
    signature: Signature, factor: str, flows: Sequence[bool], found: list[Placement | None], out: Placement | None
) -> list[Row]:
    """The rows in which the factor is sharded where a tensor has it."""
    given = [placement or R for placement in found]
    if out is not None:
        return [Row(tuple(given), out, factor)]
    if factor in signature.special:
        return [Row(tuple(given), I, factor)]
    if signature.terms is None:
        return []
    without = [term for term in signature.terms if all(found[i] is None for i in term)]
    lacking = [[i for i in term if i in signature.carriers] for term in without]
    choices = [[i for i in term if flows[i]] or term for term in lacking]
    return [
        Row(tuple(P() if i in carried else place for i, place in enumerate(given)), P(), factor)
        for carried in itertools.product(*choices)
    ]


def _partial(signature: Signature, flows: Sequence[bool]) -> list[Row]:
    """In each term of the sum one operand is partial, the others are replicated."""
    if signature.terms is None:
        return []
    choices = [[i for i in term if i in signature.carriers and flows[i]] for term in signature.terms]
    return [
        Row(tuple(P() if i in carried else R for i in range(len(flows))), P())
        for carried in itertools.product(*choices)
    ]
