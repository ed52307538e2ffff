"""From a signature the rows on one axis: every placement of operands and output that an op allows."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ndcompile.placement import I, P, Placement, R, S
from ndcompile.rules.notation import Dims, Signature
from ndcompile.size import ONE, Size


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
) -> list[Row]:
    """All rows on an axis of `ranks` ranks.

    `taken` says how many ways earlier axes shard each factor, `grads` which operands carry a gradient (the others have
    one replicated placement, `R`), `symbols` which symbols the axis may shard (None: any).
    """
    taken = taken or {}
    flows = list(grads) if grads is not None else [True] * len(signature.operands)
    found = [Row(tuple(R for _ in flows), R)]
    if any(flows):
        found.append(Row(tuple(I if flow else R for flow in flows), I))
    found += _partial(signature, flows)
    for factor in signature.factors:
        if _divides(signature, factor, ranks, taken, symbols):
            found += _sharded(signature, factor, taken, flows)
    return list(dict.fromkeys(found))


def _divides(
    signature: Signature, factor: str, ranks: int, taken: Mapping[str, int], symbols: frozenset[str] | None
) -> bool:
    """Evenly; an integer dim that no other factor shares may also be cut unevenly, if it has a part for each rank."""
    if factor in signature.whole:
        return False
    size = signature.sizes[factor]
    if symbols is not None and not set(size.symbols) <= symbols:
        return False
    left = taken.get(factor, 1)
    if size.coefficient % (left * ranks) == 0:
        return True
    alone = all(factor not in dim or len(dim) == 1 for dims in (*signature.operands, signature.output) for dim in dims)
    step = -(-size.coefficient // ranks)
    return alone and left == 1 and size.constant and size.coefficient > step * (ranks - 1)


def leads(dims: Dims, factor: str, sizes: Mapping[str, Size], taken: Mapping[str, int]) -> int | None:
    """The dim that sharding the factor shards, -1 if the tensor lacks it; None if a larger factor stands before it."""
    for number, factors in enumerate(dims):
        if factor in factors:
            before = factors[: factors.index(factor)]
            full = all(sizes[f] == ONE or sizes[f] == Size(taken.get(f, 1)) for f in before)
            return number if full else None
    return -1


def _sharded(signature: Signature, factor: str, taken: Mapping[str, int], flows: Sequence[bool]) -> list[Row]:
    places = [leads(dims, factor, signature.sizes, taken) for dims in (*signature.operands, signature.output)]
    if None in places:
        return []
    *at, out = (place if place is not None else -1 for place in places)
    given = [S(dim) if dim >= 0 else R for dim in at]
    if out >= 0:
        return [Row(tuple(given), S(out), factor)]
    if factor in signature.special:
        return [Row(tuple(given), I, factor)]
    if signature.terms is None:
        return []
    lacking = [[i for i in term if i in signature.carriers] for term in signature.terms if all(at[i] < 0 for i in term)]
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
