"""Reshape by factors: which parts of which input dims make which output dims, on symbolic sizes."""

from __future__ import annotations

from ndcompile.rules.notation import Call, Dims, Signature
from ndcompile.size import ONE, Shape, Size


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
    i = j = 0
    rest_i, rest_j = (source[0] if source else ONE), (target[0] if target else ONE)
    while i < len(source) and j < len(target):
        if rest_i == ONE or rest_j == ONE:
            if rest_i == ONE:
                i += 1
                rest_i = source[i] if i < len(source) else ONE
            else:
                j += 1
                rest_j = target[j] if j < len(target) else ONE
            continue
        common = rest_i.gcd(rest_j)
        factor = f"f{len(sizes)}"
        left[i].append(factor)
        right[j].append(factor)
        if common == ONE:
            sizes[factor] = Size(1, (f"{rest_i}|{rest_j}",))
            whole.add(factor)
            break  # the rest of both shapes has no factor in common at this place
        sizes[factor] = common
        rest_i, rest_j = rest_i // common, rest_j // common
    return tuple(map(tuple, left)), tuple(map(tuple, right))
