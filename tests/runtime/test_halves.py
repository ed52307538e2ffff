"""Two halves in turn: conversions in a start and a wait, the order of turns, and of what a compiler makes of both."""

from __future__ import annotations

import re
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from ndcompile.placement import Placement
from ndcompile.runtime import collectives, in_halves, once, start, wires
from ndcompile.runtime.halves import Started, in_turn
from ndcompile.runtime.mesh import Ranks
from ndcompile.runtime.schedule import compile_options
from tests.ranks import run
from tests.runtime.test_collectives import axis_of, cases, denoted, spread

SHAPE = (4, 8, 12)


def dims_of(source: Placement, target: Placement) -> dict[str, Any]:
    dims = [p.dim for p in (source, target) if p.kind == "S"]
    return dict(zip(("source", "target") if len(dims) == 2 else ("dim",), dims, strict=False))


def in_two(ranks: int, work: list[tuple], copies: bool) -> list[tuple[Tensor, Tensor]]:
    """Each conversion started, and another of the same between its start and its wait, in both directions."""
    axis = axis_of(ranks, copies)
    results = []
    for name, source, target, held, cotangents in work:
        x, other = (held[axis.index].clone().requires_grad_() for _ in range(2))
        convert, dims = getattr(collectives, name), dims_of(source, target)
        begun = [start(convert, value, axis, **dims) for value in (x, other)]
        assert all(isinstance(each, Started) for each in begun), "more than one rank sends something"
        y, also = (each.wait() for each in begun)
        torch.autograd.backward([y, also], [cotangents[axis.index], -cotangents[axis.index]])
        assert x.grad is not None and torch.equal(x.grad, -other.grad), name
        results.append((y.detach(), x.grad))
    return results


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_each_conversion_that_is_started_keeps_the_value_and_the_gradient(ranks, copies):
    torch.manual_seed(ranks)
    work, values = [], []
    for name, source, target, _ in cases([SHAPE]):
        x, c = (torch.randint(-99, 99, SHAPE).double() for _ in range(2))
        values.append((x, c))
        work.append((name, source, target, spread(x, source, ranks), spread(c, target.dual, ranks)))
    answers = run(ranks, in_two, ranks, work, copies)
    for i, ((name, source, target, *_), (x, c)) in enumerate(zip(work, values, strict=True)):
        where = f"{name} {source} → {target}"
        assert torch.equal(denoted([answer[i][0] for answer in answers], target), x), where
        assert torch.equal(denoted([answer[i][1] for answer in answers], source.dual), c), f"gradient of {where}"


def in_low_precision(ranks: int) -> list[Tensor]:
    """Sums in float32, forward and in the gradient: bf16 has no 257, so 256 + 1 + 1 + 1 tells."""
    axis = axis_of(ranks)
    mine = torch.full((4,), 256.0 if axis.index == 0 else 1.0, dtype=torch.bfloat16)
    part = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
    start(collectives.all_gather, part, axis, dim=0, dtype=torch.float32).wait().backward(mine)
    weight = torch.zeros(4, dtype=torch.bfloat16, requires_grad=True)
    start(collectives.replicate, weight, axis, dtype=torch.float32).wait().backward(mine)
    assert part.grad is not None and weight.grad is not None
    return [
        start(collectives.reduce_scatter, mine, axis, dim=0, dtype=torch.float32).wait(),
        start(collectives.all_reduce, mine, axis, dtype=torch.float32).wait(), part.grad, weight.grad,
    ]  # fmt: skip


def test_what_is_started_is_reduced_in_its_dtype():
    for answer in run(4, in_low_precision, 4):
        assert [(x.dtype, x.unique().tolist()) for x in answer] == [(torch.bfloat16, [260.0])] * 4


ONE = Ranks("tp", 1, 0, "none")


def test_on_one_rank_nothing_is_started():
    x = torch.ones(2, 3)
    assert start(collectives.all_gather, x, ONE, dim=1) is x


def test_uneven_parts_are_not_sent_beside_another_half():
    with pytest.raises(ValueError) as error:
        start(collectives.reduce_scatter, torch.ones(2, 3), Ranks("tp", 2, 0, "none"), dim=1)
    assert str(error.value) == (
        "dim 1 of a tensor (2, 3) does not divide by the 2 ranks of 'tp'\n"
        "  why  only even parts are sent while another half computes\n"
        "  try  reduce_scatter(…, size=3)"
    )


def test_the_first_half_is_two_turns_ahead():
    turns: list[str] = []

    def steps(name):
        for turn in range(5):
            turns.append(f"{name}{turn}")
            if turn < 4:
                yield
        return name

    assert in_turn(steps("a"), steps("b")) == ("a", "b")
    assert " ".join(turns) == "a0 a1 b0 a2 b1 a3 b2 a4 b3 b4"


def test_arguments_are_cut_and_results_put_together_along_their_dims():
    @in_halves((0, 1, None), x=0, turned=1)
    def compute(w, x, turned, whole):
        yield
        return x * w, turned + whole, whole

    x, w = torch.arange(8.0).view(4, 2).requires_grad_(), torch.tensor(3.0, requires_grad=True)
    y, turned, whole = compute(w, x, x.t(), torch.ones(()))
    assert torch.equal(y, 3 * x) and torch.equal(turned, x.t() + 1) and whole == 1
    y.sum().backward()
    assert w.grad == x.sum() and x.grad is not None and x.grad.eq(3.0).all()


def test_what_both_halves_have_is_sent_by_one():
    sent = []

    def doubled(x: Tensor, axis: Ranks, *, dim: int) -> Tensor:
        sent.append(dim)
        return 2 * x

    @in_halves((0,), x=0)
    def compute(w, x):
        w = yield once(doubled, w, ONE, dim=1)
        yield
        w = yield once(doubled, w, ONE, dim=3)
        return x * w

    x, w = torch.arange(8.0).view(4, 2), torch.tensor(3.0, requires_grad=True)
    y = compute(w, x)
    y.sum().backward()
    assert torch.equal(y, 12 * x) and w.grad == 4 * x.sum() and sent == [1, 3]


# ---- the order in compiled code ------------------------------------------------------------------------------------


def block(axis: Ranks):
    """Two pairs of products with their collectives; `turned`, read by both halves, invites fusions across them."""
    tp = axis

    @in_halves((0,), x=0)
    def compute(w, x, turned):
        h = yield start(collectives.all_gather, x.sin(), tp, dim=1)
        h = F.linear(h, w.up)
        h = h * turned
        h = h @ w.mid
        yield
        h = F.linear(h, w.down)
        h = yield start(collectives.reduce_scatter, h, tp, dim=1)
        x = x + h
        h = yield start(collectives.all_gather, x.cos(), tp, dim=1)
        h = F.linear(h, w.wide).tanh()
        yield
        h = F.linear(h, w.narrow)
        h = yield start(collectives.reduce_scatter, h, tp, dim=1)
        return x + h

    return compute


@contextmanager
def two_ranks_without_the_other(copies: bool) -> Iterator[Ranks]:
    """Collectives that bring nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    nothing = {name: (lambda _, x, dim, f=f: f(x, dim, 2, "")) for name, f in FAKE.items()}
    try:
        with patch.multiple(wires.Wire, **nothing):
            yield axis_of(2, copies)
    finally:
        dist.destroy_process_group()


FAKE = {"gather": wires._gathered, "scatter": wires._scattered}


def compiled_order(copies: bool, **options) -> list[str]:
    """What inductor writes for the block, forward and backward: products, starts and waits, kernels left empty."""
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    Weights = namedtuple("Weights", "up mid down wide narrow")
    shapes = (6, 8), (6, 6), (8, 6), (6, 8), (8, 6)
    w = Weights(*(torch.randn(shape, requires_grad=True) for shape in shapes))
    x, turned = torch.randn(4, 5, 8, requires_grad=True), torch.randn(10, 6)
    empty = patch("torch._inductor.async_compile.AsyncCompile.cpp_pybinding", lambda *_, **__: lambda *_: None)
    with two_ranks_without_the_other(copies) as axis, config.patch(force_disable_caches=True), empty:
        compute = torch.compile(block(axis), fullgraph=True, **options)
        _, codes = run_and_get_code(lambda: compute(w, x, turned).sum().backward())
        torch.compiler.reset()
    return [" ".join(_events(code)) for code in codes]


def _events(code: str) -> Iterator[str]:
    for line in code.splitlines():
        if re.search(r"extern_kernels\.\w*mm\(", line):
            yield "mm"
        elif found := re.search(r"= torch\.ops\._c10d_functional\.(all_gather|reduce_scatter)", line):
            yield found[1]
        elif found := re.search(r"= torch\.ops\.ndcompile\.(gather|scatter)_by_copies", line):
            yield {"gather": "all_gather", "scatter": "reduce_scatter"}[found[1]]
        elif line.strip().startswith("torch.ops._c10d_functional.wait_tensor"):
            yield "wait"


@pytest.mark.full
@pytest.mark.parametrize("copies", [False, True])
def test_in_compiled_code_one_half_computes_while_the_other_travels(copies):
    forward, backward = compiled_order(copies, **compile_options({}, halved=True, copies=copies))
    expected = (
        "all_gather wait mm mm "  # the first half, up to its second product; nothing covers its gather
        "all_gather mm reduce_scatter wait mm mm "  # the second's gather beside the first's last product, and so on
        "wait all_gather mm reduce_scatter wait mm wait all_gather mm reduce_scatter wait mm wait mm "
        "reduce_scatter wait"
    )
    assert forward == expected
    assert backward == (
        "all_gather wait mm mm all_gather mm mm reduce_scatter wait mm mm wait all_gather mm mm reduce_scatter "
        "wait mm mm wait all_gather mm mm mm mm reduce_scatter wait mm mm wait mm mm mm mm reduce_scatter wait"
    )


def test_an_order_of_the_users_own_is_refused_and_another_compiler_has_none():
    assert compile_options({"backend": "aot_eager"}, True, False) == {"backend": "aot_eager"}
    with pytest.raises(ValueError, match="of a model with halves=True\n  why"):
        compile_options({"options": {"reorder_for_peak_memory": True}}, True, False)
    assert compile_options({"mode": "max-autotune"}, True, False)["options"]["max_autotune"] is True
