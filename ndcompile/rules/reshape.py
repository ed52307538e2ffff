"""Reshape by factors: which parts of which input dims make which output dims, on symbolic sizes."""

from __future__ import annotations

import itertools

from ndcompile.rules.notation import Call, Dims, Signature
from ndcompile.size import ONE, Shape, Size, product


def reshape(call: Call) -> Signature:
    """`view`, `reshape`, `flatten`, `unflatten`, `squeeze`, `unsqueeze`: the two shapes cut into common factors.

    A factor that leads its dim on both sides may be sharded without communication; what has no common factor is whole.
    """
    source, target = call.operands[0], call.output
    sizes: dict[str, Size] = {}
    whole: set[str] = set()
    left, right = cut(source, target, sizes, whole)
    return Signature((left,), right, sizes, ((0,),), frozenset({0}), frozenset(whole))


def cut(source: Shape, target: Shape, sizes: dict[str, Size], whole: set[str]) -> tuple[Dims, Dims]:
    """Walk both shapes with two pointers; fills `sizes` and `whole`, returns each dim's factors.

    >>> sizes, whole = {}, set()
    >>> cut((Size(24),), (Size(6), Size(4)), sizes, whole), sizes
    (((('f0', 'f1'),), (('f0',), ('f1',))), {'f0': 6, 'f1': 4})
    """
    left: list[list[str]] = [[] for _ in source]
    right: list[list[str]] = [[] for _ in target]
    a, b = list(source), list(target)  # what is left to cut of each dim
    if not product(source).coefficient:
        return _of_nothing(source, target, sizes, whole)
    while (i := _first(a)) < len(a) and (j := _first(b)) < len(b):
        common = a[i].gcd(b[j])
        if common == ONE:
            end_a, end_b = _closed(a, b, i, j)
            _keep_whole(left, a, end_a, sizes, whole)
            _keep_whole(right, b, end_b, sizes, whole)
            continue
        factor = f"f{len(sizes)}"
        sizes[factor] = common
        left[i].append(factor)
        right[j].append(factor)
        a[i], b[j] = a[i] // common, b[j] // common
    _keep_whole(left, a, len(a), sizes, whole)
    _keep_whole(right, b, len(b), sizes, whole)
    return tuple(map(tuple, left)), tuple(map(tuple, right))


def _of_nothing(source: Shape, target: Shape, sizes: dict[str, Size], whole: set[str]) -> tuple[Dims, Dims]:
    """A tensor without elements has no factors: the leading dims that stay are kept, all others are whole."""
    stay = next(
        (i for i, (n, m) in enumerate(zip(source, target, strict=False)) if n != m), min(len(source), len(target))
    )
    names = [
        [f"{'f' if d < stay else side}{d}" for d in range(len(shape))] for side, shape in (("a", source), ("b", target))
    ]
    for side, shape in zip(names, (source, target), strict=True):
        sizes.update(zip(side, shape, strict=True))
        whole.update(side[stay:])
    return tuple((name,) for name in names[0]), tuple((name,) for name in names[1])


def _first(rest: list[Size]) -> int:
    """The first dim that is not cut to its end."""
    return next((i for i, size in enumerate(rest) if size != ONE), len(rest))


def _closed(a: list[Size], b: list[Size], i: int, j: int) -> tuple[int, int]:
    """The ends of the shortest stretches from `i` and `j` that have equal products: there both shapes start anew."""
    for end_a, end_b in itertools.product(range(i + 1, len(a) + 1), range(j + 1, len(b) + 1)):
        if product(tuple(a[i:end_a])) == product(tuple(b[j:end_b])):
            return end_a, end_b
    return len(a), len(b)


def _keep_whole(dims: list[list[str]], rest: list[Size], end: int, sizes: dict[str, Size], whole: set[str]) -> None:
    """What is left of the dims before `end` has no factor in common with the other shape."""
    for dim in range(end):
        if rest[dim] != ONE:
            factor = f"f{len(sizes)}"
            dims[dim].append(factor)
            sizes[factor], rest[dim] = rest[dim], ONE
            whole.add(factor)
