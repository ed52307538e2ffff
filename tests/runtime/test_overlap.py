"""Products that are joined with the exchange beside them: which are, and that values stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from ndcompile.runtime import private, wires
from ndcompile.runtime.mesh import Ranks
from ndcompile.runtime.overlap import join_products
from ndcompile.runtime.schedule import compile_options
from tests.ranks import run
from tests.runtime.test_collectives import axis_of

B, S, K, M = 3, 4, 6, 8
Function = Callable[..., tuple[Tensor, ...]]


def gathered(x: Tensor, axis: Ranks, dim: int) -> Tensor:
    return private.wait(wires.start_all_gather(x, dim, axis.size, axis.group))


def scattered(x: Tensor, axis: Ranks, dim: int) -> Tensor:
    return private.wait(wires.start_reduce_scatter(x, dim, axis.size, axis.group))


def projections(axis: Ranks, dim: int) -> Function:
    """Three products of one whole, one with a bias; and the whole itself is read."""

    def f(x, a, b, c, bias):
        whole = gathered(x, axis, dim)
        return whole.sin(), F.linear(whole, a), F.linear(whole, b, bias), F.linear(whole, c)

    return f


def back(axis: Ranks, dim: int) -> Function:
    """The gradient of the input of three products, which is a sum of three."""

    def f(p, q, r, a, b, c):
        return (scattered(p @ a + q @ b + r @ c, axis, dim),)

    return f


def down(axis: Ranks, dim: int) -> Function:
    def f(p, a, bias):
        return (scattered(F.linear(p, a, bias), axis, dim),)

    return f


def along_the_sum(axis: Ranks, dim: int) -> Function:
    """What is gathered is the dim that the product sums over."""

    def f(x, a):
        return (F.linear(gathered(x, axis, 2), a),)

    return f


def read_twice(axis: Ranks, dim: int) -> Function:
    """The whole sum is another's too."""

    def f(p, a):
        y = F.linear(p, a)
        return scattered(y, axis, dim), y.cos()

    return f


def in_heads(axis: Ranks, dim: int) -> Function:
    """What is summed has the product's last dim as two."""

    def f(p, a):
        return (scattered(F.linear(p, a).unflatten(-1, (2, M // 2)), axis, dim),)

    return f


def of_no_product(axis: Ranks, dim: int) -> Function:
    def f(p, a):
        return (scattered(F.linear(p, a) + p.mean(-1, keepdim=True), axis, dim),)

    return f


JOINED = {"gather_and_multiply", "multiply_and_scatter"}
APART = {"gather_by_copies", "scatter_by_copies"}
CASES: dict[Callable[[Ranks, int], Function], tuple[list[tuple[int, ...]], Counter]] = {
    projections: ([(B, S, K), (M, K), (M, K), (M + 1, K), (M,)], Counter(gather_and_multiply=1)),
    back: ([(B, 6 * S, n) for n in (2, 3, 4)] + [(n, K) for n in (2, 3, 4)], Counter(multiply_and_scatter=1)),
    down: ([(B, 6 * S, K), (M, K), (M,)], Counter(multiply_and_scatter=1)),
    along_the_sum: ([(B, S, K), (M, 6 * K)], Counter(gather_by_copies=1)),
    read_twice: ([(B, 6 * S, K), (M, K)], Counter(scatter_by_copies=1)),
    in_heads: ([(B, 6 * S, K), (M, K)], Counter(scatter_by_copies=1)),
    of_no_product: ([(B, 6 * S, K), (M, K)], Counter(scatter_by_copies=1)),
}


def exchanges(graph: fx.Graph) -> Counter:
    names = [node.target.__name__.partition(".")[0] for node in graph.nodes if node.op == "call_function"]
    return Counter(name for name in names if name in JOINED | APART)


def joined(ranks: int) -> list[str]:
    """What is wrong."""
    axis, wrong = axis_of(ranks, copies=True), []
    for make, (given, expected) in CASES.items():
        for dim in (0, 1):
            shapes = [(6, 4, *shape[2:]) if len(shape) == 3 and dim == 0 else shape for shape in given]
            if make is along_the_sum:
                shapes = [shapes[0], (M, ranks * K)]
            f = make(axis, dim)
            torch.manual_seed(dist.get_rank())
            values = [torch.randint(-9, 9, shape).double() for shape in shapes]
            traced = make_fx(f, tracing_mode="fake")(*values)
            join_products(traced.graph)
            traced.graph.lint()
            traced.recompile()
            where = f"{make.__name__} along {dim}"
            if exchanges(traced.graph) != expected:
                wrong.append(f"{where}: {dict(exchanges(traced.graph))}")
            for found, right in zip(traced(*values), f(*values), strict=True):
                if not torch.equal(found, right):
                    wrong.append(f"{where}: {(found - right).abs().max()} away")
    return wrong


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.full)])
def test_exchanges_are_joined_with_their_products(ranks):
    assert run(ranks, joined, ranks) == [[]] * ranks


def test_the_users_own_pass_is_not_replaced():
    assert compile_options({"fullgraph": True}, halved=False, copies=False) == {"fullgraph": True}
    with pytest.raises(ValueError, match="of a model with transport='symmetric'\n  why"):
        compile_options({"options": {"post_grad_custom_post_pass": None}}, halved=False, copies=True)
