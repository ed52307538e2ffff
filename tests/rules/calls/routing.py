"""Routing: calls of each rule's op, drawn; indices out of range included."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from tests.rules.case import Case, Spec, case, f, ints, value
from tests.rules.draw import Calls, Draw, among, calls, indices, maybe_out_of_range, number, numbers, sizes

BOOL = st.booleans()


def picked(draw: Draw, op: str) -> Case:
    shape = sizes(draw, 1, 3, low=1)
    dim = among(draw, len(shape))
    return case(op, f(*shape), draw(st.integers(1, value(shape[dim]))), dim, draw(BOOL))


def ordered(draw: Draw, op: str) -> Case:
    shape = sizes(draw, 1, 3)
    dim, descending = among(draw, len(shape)), draw(BOOL)
    if not op.endswith("stable"):
        return case(op, f(*shape), dim, descending)
    x = draw(st.sampled_from([f(*shape), ints(*shape, high=3)]))
    return case(op, x, stable=True, dim=dim, descending=descending)


def extreme(draw: Draw, op: str) -> Case:
    x = f(*sizes(draw, 1, 3, low=1))
    return case(op, x, among(draw, len(x.sizes)), draw(BOOL))


def scattered(draw: Draw, op: str) -> Case:
    """Of the other dims the index may take the first part."""
    shape = numbers(draw, 1, 3, low=1)
    dim = among(draw, len(shape))
    taken = [number(draw) if d == dim % len(shape) else n if draw(BOOL) else max(1, n - 1) for d, n in enumerate(shape)]
    if not op.endswith("scatter_add.default"):
        taken[dim] = 1 if taken[dim] else 0  # of several values at one place it is not said which one stays
    made = case(op, f(*shape), dim, ints(*taken, high=shape[dim]), 0.5 if op.endswith("value") else f(*taken))
    return maybe_out_of_range(draw, made, 2, 0, shape[dim])


def reduced(draw: Draw, op: str) -> Case:
    """Several values at a place; where they are no sum, of different numbers."""
    shape = numbers(draw, 1, 3, low=1)
    dim = among(draw, len(shape))
    taken = [number(draw) if d == dim % len(shape) else n if draw(BOOL) else max(1, n - 1) for d, n in enumerate(shape)]
    how, with_own = draw(st.sampled_from(["sum", "mean", "amax", "amin", "prod"])), draw(BOOL)
    made = case(op, f(*shape), dim, ints(*taken, high=shape[dim]), f(*taken), how, include_self=with_own)
    return maybe_out_of_range(draw, made, 2, 0, shape[dim])


def put(draw: Draw, op: str) -> Case:
    """One index a slice; of a copy each place once, since it is not said which of several stays."""
    shape = numbers(draw, 1, 3, low=1)
    dim = among(draw, len(shape))
    high = shape[dim]
    count = draw(st.integers(1, high))
    source = f(*(count if d == dim % len(shape) else n for d, n in enumerate(shape)))
    once = Spec((count,), lambda given: torch.randperm(high)[: given[0]], False)
    if op.startswith("aten.index_fill"):
        return case(op, f(*shape), dim, once, 0.5)
    if op.startswith("aten.index_copy"):
        return case(op, f(*shape), dim, once, source)
    how, with_own = draw(st.sampled_from(["mean", "amax", "amin", "prod"])), draw(BOOL)
    return case(op, f(*shape), dim, ints(count, high=high), source, how, include_self=with_own)


def chosen(draw: Draw, op: str) -> Case:
    """One element of each row: the most frequent, the one in the middle, or the k-th."""
    shape = sizes(draw, 1, 3, low=1)
    dim = among(draw, len(shape))
    k = [draw(st.integers(1, value(shape[dim])))] if "kthvalue" in op else []
    return case(op, f(*shape), *k, dim, draw(BOOL))


def searched(draw: Draw, op: str) -> Case:
    lead, (n, m) = sizes(draw, 0, 2, low=1), numbers(draw, 2, 2, low=1)
    rows = draw(BOOL)
    listed = Spec(
        (*lead, n) if rows else (n,), lambda given: torch.randn(given, dtype=torch.float64).sort(-1)[0], False
    )
    return case(op, listed, f(*lead, m, grad=False), right=draw(BOOL))


def added(draw: Draw, op: str) -> Case:
    shape, count = numbers(draw, 1, 3, low=1), number(draw)
    dim = among(draw, len(shape))
    source = [count if d == dim % len(shape) else n for d, n in enumerate(shape)]
    made = case(op, f(*shape), dim, indices(draw, [count], shape[dim]), f(*source))
    return maybe_out_of_range(draw, made, 2, 0, shape[dim])


def taken(draw: Draw, op: str) -> Case:
    shape = sizes(draw, 1, 3, low=1)
    dim = among(draw, len(shape))
    high = value(shape[dim])
    made = case(op, f(*shape), dim, indices(draw, sizes(draw, 1, 1), high))
    return maybe_out_of_range(draw, made, 2, 0, high)


def one_hot(draw: Draw, op: str) -> Case:
    classes = draw(st.integers(1, 5))
    return case(op, ints(*sizes(draw, low=1), high=classes), classes)


def histogram(draw: Draw, op: str) -> Case:
    """Of counts, and of numbers of which some lie outside."""
    shape = sizes(draw, low=1)
    if draw(BOOL):
        return case(op, f(*shape), 3, -1.0, 1.0)
    return case(op, ints(*shape, high=7), 5, 0, 5)


def repeated(draw: Draw, op: str) -> Case:
    x = f(*sizes(draw, 1, 3))
    return case(op, x, draw(st.integers(1, 4)), *([among(draw, len(x.sizes))] if draw(BOOL) else []))


def grouped(draw: Draw, op: str) -> Case:
    rows, (experts, k, n) = sizes(draw, 1, 1)[0], numbers(draw, 3, 3, low=1, high=8)
    turned = draw(BOOL)
    matrices = f(experts, k, n) if turned else f(experts, n, k)
    return case(op, f(rows, k), matrices, ints(rows, high=experts), turned)


CALLS: Calls = {
    **calls("topk.default", picked),
    **calls("sort.default sort.stable argsort.default argsort.stable", ordered),
    **calls("max.dim min.dim", extreme),
    **calls("scatter_add.default scatter.src scatter.value", scattered),
    **calls("scatter_reduce.two", reduced),
    **calls("index_copy.default index_reduce.default index_fill.int_Scalar", put),
    **calls("median.dim mode.default kthvalue.default", chosen),
    **calls("searchsorted.Tensor", searched),
    **calls("index_add.default", added),
    **calls("index_select.default", taken),
    **calls("one_hot.default", one_hot),
    **calls("runtime.histogram", histogram),
    **calls("repeat_interleave.self_int", repeated),
    **calls("runtime.grouped_linear", grouped),
}
