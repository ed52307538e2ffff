"""Contractions and reductions: calls of each rule's op, drawn."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.rules.case import Case, Number, Spec, bools, case, f, ints, value
from tests.rules.draw import Calls, Draw, among, calls, chance, number, several, sizes, smaller


def product(draw: Draw, op: str, batch: int) -> Case:
    lead = sizes(draw, batch, batch)
    m, k, n = sizes(draw, 3, 3)
    return case(op, f(*lead, m, k), f(*lead, k, n))


def matmul(draw: Draw, op: str) -> Case:
    lead = sizes(draw, 0, 2, high=4)
    m, k, n = sizes(draw, 3, 3, high=7)
    left = f(k) if chance(draw, 4) else f(*smaller(draw, lead), m, k)
    right = f(k) if chance(draw, 4) else f(*smaller(draw, lead), k, n)
    return case(op, left, right)


def addmm(draw: Draw, op: str, batch: int) -> Case:
    lead = sizes(draw, batch, batch, high=6)
    m, k, n = sizes(draw, 3, 3)
    bias = f(*smaller(draw, [*lead, m, n]))
    scales = dict(beta=draw(SCALES), alpha=draw(SCALES)) if draw(BOOL) else {}
    return case(op, bias, f(*lead, m, k), f(*lead, k, n), **scales)


def linear(draw: Draw, op: str) -> Case:
    lead, (k, n) = sizes(draw, 0, 2), sizes(draw, 2, 2)
    return case(op, f(*lead, k), f(n, k), *([f(n)] if draw(BOOL) else []))


def einsum(draw: Draw, op: str) -> Case:
    """Any equation: each letter in one or more of up to three operands, and in the output or not."""
    letters = "abcde"[: draw(st.integers(1, 5))]
    size = {letter: number(draw, 1, 6) for letter in letters}
    dots = sizes(draw, 0, 1, high=4) if chance(draw, 3) else []
    parts = [draw(st.lists(st.sampled_from(letters), unique=True, max_size=3)) for _ in range(draw(st.integers(1, 3)))]
    used = [letter for letter in letters if any(letter in part for part in parts)]
    output = draw(st.permutations(used))[: draw(st.integers(0, len(used)))]
    first = draw(st.integers(0, len(parts) - 1))
    with_dots = [i == first or draw(BOOL) for i in range(len(parts))] if dots else [False] * len(parts)
    listed = ["..." * dotted + "".join(part) for part, dotted in zip(parts, with_dots, strict=True)]
    arrow = "" if chance(draw, 4) else "->" + "..." * bool(dots) + "".join(output)
    tensors = [f(*(dots * dotted), *(size[x] for x in part)) for part, dotted in zip(parts, with_dots, strict=True)]
    return case(op, ", ".join(listed) + arrow, tensors)


def whole_reduction(draw: Draw, op: str, low: int = 0) -> Case:
    return case(op, f(*sizes(draw, low=low)))


def of_flags(draw: Draw, op: str) -> Case:
    return case(op, bools(*sizes(draw)))


def counted(draw: Draw, op: str) -> Case:
    shape = sizes(draw)
    return case(op, draw(st.sampled_from([f(*shape), ints(*shape, high=9), bools(*shape)])))


def over_dims(draw: Draw, op: str, low: int, *before: float) -> Case:
    """Over some dims, given in any order and from either end; low=0 also over none, which is all."""
    x = f(*sizes(draw, 1, 3, low=low))
    dims: list[int] | None = several(draw, len(x.sizes))
    if low == 0 and chance(draw, 6):
        dims = draw(st.sampled_from([None, []]))
    return case(op, x, *before, dims, draw(BOOL))


def over_one_dim(draw: Draw, op: str) -> Case:
    x = f(*sizes(draw, 1, 3, low=1))
    return case(op, x, among(draw, len(x.sizes)), draw(BOOL))


def variance(draw: Draw, op: str) -> Case:
    """Of more elements than the correction takes away."""
    x = f(*sizes(draw, 1, 3, low=1))
    dims = None if chance(draw, 6) else several(draw, len(x.sizes))
    count = math.prod(value(x.sizes[d]) for d in (range(len(x.sizes)) if dims is None else dims))
    return case(op, x, dims, correction=draw(st.integers(0, min(count - 1, 2))), keepdim=draw(BOOL))


def variance_of_dims(draw: Draw, op: str) -> Case:
    x = f(*sizes(draw, 1, 3, low=2))
    return case(op, x, several(draw, len(x.sizes)), draw(BOOL), draw(BOOL))


def deviation(draw: Draw, op: str) -> Case:
    x = f(*sizes(draw, 1, 3, low=2))
    return case(op, x, several(draw, len(x.sizes)), correction=draw(st.sampled_from([0, 1])), keepdim=draw(BOOL))


def vector(draw: Draw, op: str) -> Case:
    m, k = sizes(draw, 2, 2)
    return case(op, f(m, k), f(k))


def inner(draw: Draw, op: str) -> Case:
    k = sizes(draw, 1, 1)[0]
    return case(op, f(k), f(k))


def added_to(draw: Draw, op: str) -> Case:
    """`addmv`, `addbmm`: a bias that may broadcast."""
    b, m, k, n = sizes(draw, 4, 4, high=6)
    scales = dict(beta=draw(SCALES), alpha=draw(SCALES)) if draw(BOOL) else {}
    if op == "aten.addmv.default":
        return case(op, f(*smaller(draw, [m])), f(m, k), f(k), **scales)
    return case(op, f(*smaller(draw, [m, n])), f(b, m, k), f(b, k, n), **scales)


def symmetric(*shape: Number) -> Spec:
    """Matrices that are symmetric, and definite."""

    def make(given: tuple[int, ...]) -> Tensor:
        x = torch.randn(given, dtype=torch.float64)
        return x @ x.mT + torch.eye(given[-1], dtype=torch.float64)

    return Spec(shape, make)


def of_matrices(draw: Draw, op: str) -> Case:
    n = draw(st.integers(1, 4))
    return case(op, symmetric(*sizes(draw, 0, 2, low=1, high=6), n, n))


def solved(draw: Draw, op: str) -> Case:
    """Columns, or one vector of each matrix; batches broadcast."""
    n, lead = draw(st.integers(1, 4)), sizes(draw, 0, 2, low=1, high=6)
    matrix = symmetric(*smaller(draw, lead), n, n)
    if op == "aten.linalg_solve_triangular.default":
        return case(op, matrix, f(*smaller(draw, lead), n, number(draw, 1)), upper=draw(BOOL))
    if draw(BOOL):
        return case(op, matrix, f(*matrix.sizes[:-1]))
    return case(op, matrix, f(*smaller(draw, lead), n, number(draw, 1)))


def extremes(draw: Draw, op: str) -> Case:
    x = f(*sizes(draw, 1, 3, low=1))
    return case(op, x, dim=draw(st.sampled_from([None, among(draw, len(x.sizes))])), keepdim=draw(BOOL))


def flags_over(draw: Draw, op: str) -> Case:
    x = bools(*sizes(draw, 1, 3, low=1))
    dims = several(draw, len(x.sizes)) if op.endswith("dims") else among(draw, len(x.sizes))
    return case(op, x, dims, draw(BOOL))


def norm(draw: Draw, op: str) -> Case:
    x = f(*sizes(draw, 1, 3, low=1))
    return case(op, x, draw(st.sampled_from([1.0, 2.0, 3.0])), several(draw, len(x.sizes)), draw(BOOL))


def norm_of_all(draw: Draw, op: str) -> Case:
    return case(op, f(*sizes(draw, low=1)), draw(st.sampled_from([1.0, 2.0, 3.0])))


BOOL, SCALES = st.booleans(), st.sampled_from([1, 2, -3, 0.5])

CALLS: Calls = {
    **calls("mm.default", product, 0),
    **calls("bmm.default", product, 1),
    **calls("matmul.default", matmul),
    **calls("einsum.default", einsum),
    **calls("addmm.default", addmm, 0),
    **calls("baddbmm.default", addmm, 1),
    **calls("linear.default", linear),
    **calls("sum.default", counted),
    **calls("sum.dim_IntList", over_dims, 0),
    **calls("mv.default", vector),
    **calls("dot.default vdot.default", inner),
    **calls("addmv.default addbmm.default", added_to),
    **calls(
        "linalg_inv.default inverse.default linalg_cholesky.default matrix_exp.default "
        "linalg_matrix_exp.default linalg_det.default det.default logdet.default linalg_slogdet.default "
        "slogdet.default linalg_eigvalsh.default linalg_svdvals.default",
        of_matrices,
    ),
    **calls("linalg_solve.default linalg_solve_triangular.default", solved),
    **calls("aminmax.default", extremes),
    **calls("var_mean.correction std_mean.correction", deviation),
    **calls("any.dim any.dims all.dim all.dims", flags_over),
    **calls("norm.Scalar", norm_of_all),
    **calls("nansum.default", over_dims, 1),
    **calls(
        "mean.default max.default min.default argmax.default argmin.default median.default prod.default",
        whole_reduction,
        1,
    ),
    **calls("mean.dim amax.default amin.default logsumexp.default", over_dims, 1),
    **calls("var.correction", variance),
    **calls("var.dim std.dim", variance_of_dims),
    **calls("std.correction", deviation),
    **calls("prod.dim_int", over_one_dim),
    **calls("linalg_vector_norm.default norm.ScalarOpt_dim", norm),
    **calls("any.default all.default", of_flags),
}
