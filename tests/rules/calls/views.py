"""Views: calls of each rule's op, drawn; dims and places counted from either end."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import strategies as st

from ndcompile.size import Size, product
from tests.rules.case import Case, Number, bools, case, complexes, f, ints, value
from tests.rules.draw import Calls, Draw, among, calls, chance, number, numbers, several, sizes

BOOL = st.booleans()
ATOMS = st.sampled_from([*map(Size, (2, 3, 4, 5, 6, 1, 7)), Size(2, ("b",)), Size(1, ("s",))])


def grouped(draw: Draw, atoms: Sequence[Size]) -> tuple[Size, ...]:
    """The atoms as dims: neighbours multiplied."""
    cuts = sorted(draw(st.sets(st.integers(0, len(atoms)), max_size=len(atoms))))
    return tuple(product(tuple(atoms[a:b])) for a, b in itertools.pairwise([0, *cuts, len(atoms)]))


def reshaped(draw: Draw, op: str) -> Case:
    """Two groupings of the same atoms, the second now and then in another order, or with a dim left open."""
    atoms = draw(st.lists(ATOMS, min_size=1, max_size=4))
    source = grouped(draw, atoms)
    target = grouped(draw, draw(st.permutations(atoms)) if draw(BOOL) else atoms)
    if chance(draw, 12):
        source, target = (tuple(Size(0) if i == 0 else n for i, n in enumerate(shape)) for shape in (source, target))
    given = [value(n) for n in target]
    if draw(BOOL) and 0 not in given:
        given[draw(st.integers(0, len(given) - 1))] = -1
    return Case(op, (f(*source), given), output=target)


def flattened(draw: Draw, op: str) -> Case:
    shape = numbers(draw, 1, 4)
    rank = len(shape)
    start = draw(st.integers(0, rank - 1))
    end = draw(st.integers(start, rank - 1))
    return case(op, f(*shape), start - rank * draw(BOOL), end - rank * draw(BOOL))


def unflattened(draw: Draw, op: str) -> Case:
    shape, parts = numbers(draw, 1, 3), numbers(draw, 1, 3, 1, 6)
    at = among(draw, len(shape))
    shape[at] = value(product(tuple(map(Size, parts))))
    if draw(BOOL):
        parts[draw(st.integers(0, len(parts) - 1))] = -1
    return case(op, f(*shape), at, parts)


def unsqueezed(draw: Draw, op: str) -> Case:
    x = f(*sizes(draw))
    return case(op, x, among(draw, len(x.sizes) + 1))


def squeezed(draw: Draw, op: str) -> Case:
    shape: list[Number] = [1 if chance(draw, 3) else n for n in sizes(draw, 1, 4)]
    if op.endswith("default"):
        return case(op, f(*shape))
    return case(op, f(*shape), among(draw, len(shape)) if op.endswith("dim") else several(draw, len(shape)))


def transposed(draw: Draw, op: str) -> Case:
    x = f(*sizes(draw, 1, 4, high=6))
    return case(op, x, among(draw, len(x.sizes)), among(draw, len(x.sizes)))


def turned(draw: Draw, op: str) -> Case:
    least, most = {"aten.t.default": (0, 2), "aten.mT.default": (2, 4)}.get(op, (0, 3))
    return case(op, f(*sizes(draw, least, most)))


def permuted(draw: Draw, op: str) -> Case:
    shape = sizes(draw, 0, 4, high=6)
    order = draw(st.permutations(range(len(shape))))
    return case(op, f(*shape), [d - len(shape) * draw(BOOL) for d in order])


def moved(draw: Draw, op: str) -> Case:
    x = f(*sizes(draw, 1, 4, high=6))
    rank = len(x.sizes)
    if op.endswith("int"):
        return case(op, x, among(draw, rank), among(draw, rank))
    source = several(draw, rank)
    target = draw(st.permutations(range(rank)))[: len(source)]
    return case(op, x, source, [d - rank * draw(BOOL) for d in target])


def expanded(draw: Draw, op: str) -> Case:
    """New leading dims, and dims of size 1 that grow; -1 keeps a dim."""
    target = sizes(draw)
    lead = draw(st.integers(0, len(target)))
    source: list[Number] = [1 if chance(draw, 3) else n for n in target[lead:]]
    if op.endswith("as.default"):
        return case(op, f(*source), bools(*target))
    kept = [draw(BOOL) and a == b for a, b in zip(source, target[lead:], strict=True)]
    given = [value(n) for n in target[:lead]] + [
        -1 if k else value(n) for k, n in zip(kept, target[lead:], strict=True)
    ]
    return Case(op, (f(*source), given), output=tuple(target))


def as_complex(draw: Draw, op: str) -> Case:
    return case(op, f(*sizes(draw), 2))


def as_real(draw: Draw, op: str) -> Case:
    return case(op, complexes(*sizes(draw)))


def same(draw: Draw, op: str) -> Case:
    return case(op, f(*sizes(draw)))


def sliced(draw: Draw, op: str) -> Case:
    """Ends that count from the end of the dim, that lie beyond it, and that are left open."""
    x = f(*sizes(draw, 1, 3))
    end = draw(st.sampled_from([None, 1 << 62, -1, 3, 7, 30, 0]))
    return case(op, x, among(draw, len(x.sizes)), draw(st.sampled_from([None, 0, 2, -3, -30, 9])), end, 1 + draw(BOOL))


def narrowed(draw: Draw, op: str) -> Case:
    x = f(*numbers(draw, 1, 3))
    dim = among(draw, len(x.sizes))
    start = draw(st.integers(0, n := value(x.sizes[dim])))
    return case(op, x, dim, start - n if start < n and draw(BOOL) else start, draw(st.integers(0, n - start)))


def selected(draw: Draw, op: str) -> Case:
    x = f(*sizes(draw, 1, 3, low=1))
    dim = among(draw, len(x.sizes))
    return case(op, x, dim, among(draw, value(x.sizes[dim])))


def exchanged(draw: Draw, op: str) -> Case:
    shape = sizes(draw, 1, 3, low=1)
    dim = among(draw, len(shape))
    part = [n for d, n in enumerate(shape) if d != dim % len(shape)]
    return case(op, f(*shape), f(*part), dim, among(draw, value(shape[dim])))


def slice_exchanged(draw: Draw, op: str) -> Case:
    shape = numbers(draw, 1, 3, low=1)
    dim, step = among(draw, len(shape)), 1 + draw(BOOL)
    start, end = draw(st.sampled_from([None, 0, 2, -2, -30])), draw(st.sampled_from([None, 1 << 62, -1, 3, 30]))
    part = list(shape)
    part[dim] = len(range(shape[dim])[start:end:step])
    return case(op, f(*shape), f(*part), dim, start, end, step)


def split(draw: Draw, op: str) -> Case:
    x = f(*numbers(draw, 1, 3, low=1))
    dim = among(draw, len(x.sizes))
    return case(op, x, number(draw, 1), dim)


def split_in(draw: Draw, op: str) -> Case:
    shape, parts = numbers(draw, 1, 3), numbers(draw, 1, 3)
    dim = among(draw, len(shape))
    shape[dim] = sum(parts)
    return case(op, f(*shape), parts, dim)


def joined(draw: Draw, op: str) -> Case:
    shape = sizes(draw, 1, 3)
    dim, several_sizes = among(draw, len(shape)), numbers(draw, 1, 3)
    shapes = [[n if d == dim % len(shape) else other for d, other in enumerate(shape)] for n in several_sizes]
    return case(op, [f(*each) for each in shapes], dim)


def stacked(draw: Draw, op: str) -> Case:
    shape = sizes(draw)
    return case(op, [f(*shape) for _ in range(draw(st.integers(1, 3)))], among(draw, len(shape) + 1))


def unbound(draw: Draw, op: str) -> Case:
    x = f(*numbers(draw, 1, 3, low=1, high=6))
    return case(op, x, among(draw, len(x.sizes)))


def rolled(draw: Draw, op: str) -> Case:
    x = f(*sizes(draw, 1, 3))
    if chance(draw, 4):
        return case(op, x, [draw(st.integers(-9, 9))])
    dims = several(draw, len(x.sizes))
    return case(op, x, [draw(st.integers(-9, 9)) for _ in dims], dims)


def flipped(draw: Draw, op: str) -> Case:
    x = f(*sizes(draw, 1, 3))
    return case(op, x, several(draw, len(x.sizes), 0))


def cut_in_windows(draw: Draw, op: str) -> Case:
    shape = numbers(draw, 1, 3, low=1)
    dim = among(draw, len(shape))
    return case(op, f(*shape), dim, draw(st.integers(1, min(3, shape[dim]))), draw(st.integers(1, 3)))


def diagonal(draw: Draw, op: str) -> Case:
    shape = sizes(draw, 2, 4, low=1, high=6)
    one, two = draw(st.permutations(range(len(shape))))[:2]
    return case(op, f(*shape), draw(st.integers(-1, 1)), one, two - len(shape) * draw(BOOL))


def on_a_diagonal(draw: Draw, op: str) -> Case:
    shape = sizes(draw, 1, 3, low=1, high=6)
    one, two = draw(st.permutations(range(len(shape) + 1)))[:2]
    return case(op, f(*shape), draw(st.integers(-2, 2)), one, two - (len(shape) + 1) * draw(BOOL))


def trace(draw: Draw, op: str) -> Case:
    return case(op, f(*sizes(draw, 2, 2)))


def along_one(draw: Draw, op: str) -> Case:
    shape = sizes(draw, 1, 3, low=1, high=6)
    return case(op, f(*shape), among(draw, len(shape)))


def padded_with(draw: Draw, op: str) -> Case:
    x = f(*sizes(draw, 1, 3, low=3))
    amounts = [draw(st.integers(-1, 2)) for _ in range(2 * draw(st.integers(1, len(x.sizes))))]
    return case(op, x, amounts, draw(st.sampled_from([0.0, 2.0])))


def padded(draw: Draw, op: str) -> Case:
    x = f(*sizes(draw, 1, 3, low=3))
    rank = len(x.sizes)
    if rank > 1 and chance(draw, 3):
        return case(op, x, [draw(st.integers(0, 2)), 1], draw(st.sampled_from(["reflect", "replicate", "circular"])))
    amounts = [draw(st.integers(-1, 2)) for _ in range(2 * draw(st.integers(1, rank)))]
    return case(op, x, amounts, "constant", draw(st.sampled_from([None, 0.0, 2.0])))


def running(draw: Draw, op: str) -> Case:
    shape = sizes(draw, 1, 3)
    return case(op, draw(st.sampled_from([f(*shape), ints(*shape, high=4)])), among(draw, len(shape)))


def differences(draw: Draw, op: str) -> Case:
    shape = numbers(draw, 1, 3, low=1)
    dim, make = among(draw, len(shape)), draw(st.sampled_from([f, bools]))
    ends = [make(*shape[: dim % len(shape)], draw(st.integers(1, 2)), *shape[dim % len(shape) + 1 :]) for _ in range(2)]
    times = draw(st.integers(1, 2))
    return case(op, make(*shape), times, dim, *ends[: draw(st.integers(0, 2))])


def triangle(draw: Draw, op: str) -> Case:
    return case(op, f(*sizes(draw, 2, 3)), draw(st.integers(-3, 3)))


CALLS: Calls = {
    **calls("view.default reshape.default _unsafe_view.default", reshaped),
    **calls("flatten.using_ints", flattened),
    **calls("unflatten.int", unflattened),
    **calls("unsqueeze.default", unsqueezed),
    **calls("squeeze.dim squeeze.dims squeeze.default", squeezed),
    **calls("transpose.int", transposed),
    **calls("t.default numpy_T.default mT.default", turned),
    **calls("permute.default", permuted),
    **calls("movedim.int movedim.intlist", moved),
    **calls("expand.default expand_as.default", expanded),
    **calls("view_as_complex.default", as_complex),
    **calls("view_as_real.default", as_real),
    **calls("contiguous.default clone.default alias.default detach.default", same),
    **calls("slice.Tensor", sliced),
    **calls("narrow.default", narrowed),
    **calls("select.int", selected),
    **calls("select_scatter.default", exchanged),
    **calls("slice_scatter.default", slice_exchanged),
    **calls("split.Tensor chunk.default", split),
    **calls("split_with_sizes.default", split_in),
    **calls("cat.default", joined),
    **calls("stack.default", stacked),
    **calls("unbind.int", unbound),
    **calls("roll.default", rolled),
    **calls("flip.default", flipped),
    **calls("pad.default", padded),
    **calls("constant_pad_nd.default", padded_with),
    **calls("unfold.default", cut_in_windows),
    **calls("diagonal.default diagonal_copy.default", diagonal),
    **calls("diag_embed.default", on_a_diagonal),
    **calls("trace.default", trace),
    **calls("cumprod.default cummax.default cummin.default logcumsumexp.default", along_one),
    **calls("cumsum.default", running),
    **calls("diff.default", differences),
    **calls("tril.default triu.default", triangle),
}
