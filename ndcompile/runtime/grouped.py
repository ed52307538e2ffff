"""A linear layer in which each row of the input chooses one of several matrices: what experts are made of."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def grouped_linear(x: Tensor, weight: Tensor, ids: Tensor, transposed: bool = False) -> Tensor:
    """`y[i] = weight[ids[i]] @ x[i]`: `[s, n]` from rows `[s, k]`, matrices `[e, n, k]` and one id a row, `[s]`.

    With `transposed` the matrices are `[e, k, n]`. No shape depends on how many rows choose a matrix, and no value is
    read by the host. Where torch's grouped matrix product takes the operands, rows are sorted by id, multiplied in
    groups and put back: s·n·k multiplications. Elsewhere (float64, rows that are no multiple of 16 bytes, float32
    while compiled) every row meets every matrix, e times as many. An id that no matrix has raises an error on CPU; on
    CUDA it fails when the kernel runs.
    """
    ids = torch.arange(weight.shape[0], device=ids.device)[ids]  # refuses ids that no matrix has
    return _GroupedLinear.apply(x, weight.transpose(1, 2) if transposed else weight, ids)


class _GroupedLinear(torch.autograd.Function):
    """Saves its operands alone: neither a matrix a row nor rows in another order outlive forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ids)
        return products(x, weight.transpose(1, 2), ids)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, ids = ctx.saved_tensors
        of_x = products(gradient, weight, ids) if ctx.needs_input_grad[0] else None
        of_weight = outer(gradient, x, ids, weight.shape[0]) if ctx.needs_input_grad[1] else None
        return of_x, of_weight, None


def products(x: Tensor, matrices: Tensor, ids: Tensor) -> Tensor:
    """`x[i] @ matrices[ids[i]]`, `[s, n]`, with matrices `[e, k, n]`."""
    if fast(x, *matrices.shape[1:]):
        order, ends = groups(ids, matrices.shape[0])
        sorted_rows = F.grouped_mm(x[order], matrices, offs=ends)
        return torch.empty_like(sorted_rows).index_copy(0, order, sorted_rows)
    y = x.new_zeros(x.shape[0], matrices.shape[2])
    for number, matrix in enumerate(matrices.unbind(0)):
        y = torch.where((ids == number).unsqueeze(1), x @ matrix, y)
    return y


def outer(gradient: Tensor, x: Tensor, ids: Tensor, count: int) -> Tensor:
    """For each matrix the sum over its rows of `gradient[i] ⊗ x[i]`: `[e, n, k]`."""
    if fast(x, gradient.shape[1], x.shape[1]):
        order, ends = groups(ids, count)
        sums = F.grouped_mm(gradient[order].t(), x[order], offs=ends)
        chosen = torch.diff(ends, prepend=ends.new_zeros(1)) > 0
        return torch.where(chosen[:, None, None], sums, 0)  # a group without rows may be left as it was allocated
    return torch.stack([gradient.masked_fill((ids != n).unsqueeze(1), 0).t() @ x for n in range(count)])


def groups(ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The order that sorts the rows by id, and where in it each id's rows end."""
    in_order, order = ids.sort(stable=True)
    ends = torch.searchsorted(in_order, torch.arange(count, device=ids.device), right=True)
    return order, ends.int()


def fast(x: Tensor, *widths: int) -> bool:
    """Whether torch's grouped product takes rows of these widths, in this dtype and place."""
    aligned = all(width * x.element_size() % 16 == 0 for width in widths)
    traced = (torch.compiler.is_compiling() or x.is_meta) and x.dtype != torch.bfloat16
    return aligned and not traced and x.dtype in (torch.bfloat16, torch.float16, torch.float32) and x.shape[0] > 0
