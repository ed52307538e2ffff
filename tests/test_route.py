"""Routes are legal, convert the value and its gradient, and no way over any layouts is cheaper."""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import random
import statistics
import time
from collections.abc import Iterator, Mapping

import pytest
import torch

from ndcompile.cost import conversion_time
from ndcompile.mesh import Axis, MeshSpec
from ndcompile.placement import I, Layout, P, Placement, R, S
from ndcompile.route import Divides, Move, RouteError, route, route_time
from tests.simulate import convert, convert_back, deal_mesh, denote_mesh, numbers

RANK = 2
SMALL = MeshSpec((Axis("dp_shard", 2), Axis("tp", 4)))
CUBE = MeshSpec((Axis("dp_replicate", 2), Axis("dp_shard", 2), Axis("tp", 2)))
MB = 2.0**20


def sizes(mesh: MeshSpec) -> dict[str, int]:
    return {axis.name: axis.size for axis in mesh.axes}


def always(dim: int, axes: tuple[str, ...]) -> bool:
    return True


@functools.cache
def layouts(mesh: MeshSpec) -> list[Layout]:
    """All of them, for a tensor of two dims."""
    places = itertools.product((R, I, P(), *map(S, range(RANK))), repeat=len(mesh.axes))
    orders = itertools.permutations(mesh.names)
    every = {Layout.make(RANK, dict(zip(axes, p, strict=True))) for p, axes in itertools.product(places, orders)}
    return sorted(every, key=str)


def moves(layout: Layout, mesh: MeshSpec) -> Iterator[Move]:
    """All moves of one axis, or of several in mesh order with one placement; of a shard only the minor axes."""
    for axes in itertools.chain.from_iterable(itertools.combinations(mesh.names, n) for n in (1, 2, 3)):
        source = layout.on(axes[0])
        alike = all(layout.on(axis) == source for axis in axes)
        minor = source.dim is None or layout.dims[source.dim][-len(axes) :] == axes
        if alike and minor:
            yield from (Move(axes, source, t) for t in (R, I, P(), *map(S, range(RANK))) if t != source)


def seconds(move: Move, layout: Layout, mesh: MeshSpec, nbytes: float, grad: bool) -> float:
    cut = [axis for axes in layout.dims for axis in axes if axis not in move.axes]
    return conversion_time(move.source, move.target, nbytes / mesh.size(*cut), mesh.size(*move.axes), grad)


Graph = Mapping[Layout, Mapping[Layout, float]]


@functools.cache
def graph(mesh: MeshSpec, nbytes: float, grad: bool) -> Graph:
    return {
        layout: {move.apply(layout): seconds(move, layout, mesh, nbytes, grad) for move in moves(layout, mesh)}
        for layout in layouts(mesh)
    }


def shortest(edges: Graph, source: Layout, allowed: frozenset[Layout]) -> dict[Layout, float]:
    """The least time from one layout to each."""
    best, queue, ties = {source: 0.0}, [(0.0, 0, source)], itertools.count(1)
    while queue:
        spent, _, here = heapq.heappop(queue)
        for there, cost in edges[here].items() if spent == best[here] else ():
            if there in allowed and spent + cost < best.get(there, math.inf):
                best[there] = spent + cost
                heapq.heappush(queue, (best[there], next(ties), there))
    return best


def sample(mesh: MeshSpec, count: int) -> list[tuple[Layout, Layout]]:
    picked = random.Random(0)
    return [(picked.choice(layouts(mesh)), picked.choice(layouts(mesh))) for _ in range(count)]


def spent(source: Layout, found: tuple[Move, ...], mesh: MeshSpec, nbytes: float, grad: bool) -> float:
    total = 0.0
    for move in found:
        total += seconds(move, source, mesh, nbytes, grad)
        source = move.apply(source)
    return total


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("nbytes", [100.0, MB, 1000 * MB])
def test_no_way_on_two_axes_is_cheaper(nbytes: float, grad: bool) -> None:
    everything = frozenset(layouts(SMALL))
    for source in layouts(SMALL):
        best = shortest(graph(SMALL, nbytes, grad), source, everything)
        for target in layouts(SMALL):
            assert route_time(source, target, sizes(SMALL), nbytes, grad, always) == pytest.approx(best[target]), target


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("nbytes", [MB, 1000 * MB])
def test_no_way_on_three_axes_is_cheaper(nbytes: float, grad: bool) -> None:
    everything = frozenset(layouts(CUBE))
    for source, target in sample(CUBE, 150):
        best = shortest(graph(CUBE, nbytes, grad), source, everything)[target]
        found = route(source, target, sizes(CUBE), nbytes, grad, always)
        assert spent(source, found, CUBE, nbytes, grad) == pytest.approx(best), (source, target)


def cuts_as(layout: Layout, source: Layout, target: Layout) -> bool:
    """Each dim is cut only by axes that cut it, together, at one of the ends."""
    dims = zip(layout.dims, source.dims, target.dims, strict=True)
    return all(set(axes) <= set(one) or set(axes) <= set(other) for axes, one, other in dims)


@pytest.mark.parametrize("mesh", [SMALL, CUBE], ids=str)
def test_no_way_that_cuts_only_as_the_ends_do_is_cheaper(mesh: MeshSpec) -> None:
    for source, target in sample(mesh, 150):
        inside = frozenset(x for x in layouts(mesh) if cuts_as(x, source, target))
        best = shortest(graph(mesh, MB, True), source, inside)[target]
        found = route(source, target, sizes(mesh), MB)
        assert spent(source, found, mesh, MB, True) == pytest.approx(best), (source, target)


@pytest.mark.parametrize("divides", [None, always], ids=["as the ends", "everything"])
@pytest.mark.parametrize("mesh", [SMALL, CUBE], ids=str)
def test_a_route_converts_the_value_and_carries_its_gradient(mesh: MeshSpec, divides: Divides | None) -> None:
    torch.manual_seed(0)
    for source, target in sample(mesh, 150):
        found = route(source, target, sizes(mesh), MB, True, divides)
        value, gradient, layout = numbers(8, 8), numbers(8, 8), source
        ranks, cotangents = deal_mesh(value, source, mesh), deal_mesh(gradient, target.dual, mesh)
        for move in found:
            ranks, layout = convert(ranks, move, mesh), move.apply(layout)
            assert torch.equal(denote_mesh(ranks, layout, mesh), value), (source, target, move)
        assert layout == target
        for move in reversed(found):
            cotangents = convert_back(cotangents, move, mesh)
        assert torch.equal(denote_mesh(cotangents, source.dual, mesh), gradient), (source, target)


@pytest.mark.parametrize("mesh", [SMALL, CUBE], ids=str)
def test_without_gradient_a_route_still_converts_the_value(mesh: MeshSpec) -> None:
    torch.manual_seed(0)
    for source, target in sample(mesh, 150):
        value = numbers(8, 8)
        ranks = deal_mesh(value, source, mesh)
        for move in route(source, target, sizes(mesh), MB, grad=False):
            assert I not in (move.source, move.target)
            ranks = convert(ranks, move, mesh)
        assert torch.equal(denote_mesh(ranks, target, mesh), value), (source, target)


Placements = Mapping[str, Placement]


def shown(
    source: Placements, target: Placements, mesh: MeshSpec, grad: bool = True, divides: Divides | None = None
) -> list[str]:
    ends = (Layout.make(RANK, source), Layout.make(RANK, target))
    return [str(move) for move in route(*ends, sizes(mesh), MB, grad, divides)]


def test_slices_then_exchanges_rather_than_gathers() -> None:
    steps = shown({"dp_shard": R, "tp": S(0)}, {"dp_shard": S(1), "tp": S(1)}, SMALL)
    assert steps == ["dp_shard R→S(1)", "tp S(0)→S(1)"]


def test_slices_before_it_reduces() -> None:
    steps = shown({"dp_shard": P(), "tp": R}, {"dp_shard": R, "tp": S(0)}, SMALL)
    assert steps == ["tp R→S(0)", "dp_shard P→R"]


def test_scatters_before_it_gathers() -> None:
    steps = shown({"dp_shard": P(), "tp": S(0)}, {"dp_shard": S(1), "tp": R}, SMALL)
    assert steps == ["dp_shard P→S(1)", "tp S(0)→R"]


def test_one_all_reduce_serves_two_data_axes() -> None:
    steps = shown({"dp_replicate": P(), "dp_shard": P()}, {"dp_replicate": I, "dp_shard": I}, CUBE)
    assert steps == ["dp_replicate × dp_shard P→I"]


def test_one_gather_serves_two_axes_of_a_dim() -> None:
    assert shown({"dp_shard": S(0), "tp": S(0)}, {}, SMALL) == ["dp_shard × tp S(0)→R"]


def test_axes_out_of_mesh_order_gather_one_by_one_minor_first() -> None:
    assert shown({"tp": S(0), "dp_shard": S(0)}, {}, SMALL) == ["dp_shard S(0)→R", "tp S(0)→R"]


def test_a_parameter_is_replicated_at_its_smallest_and_then_gathered() -> None:
    steps = shown({"dp_replicate": I, "dp_shard": S(0)}, {"dp_replicate": R, "dp_shard": R}, CUBE)
    assert steps == ["dp_replicate I→R", "dp_shard S(0)→R"]


def test_the_order_of_axes_on_a_dim_is_reached_exactly() -> None:
    tp_major = Layout.make(RANK, {"tp": S(0), "dp_shard": S(0)})
    dp_major = Layout.make(RANK, {"dp_shard": S(0), "tp": S(0)})
    layout = tp_major
    for move in route(tp_major, dp_major, sizes(SMALL), MB, divides=always):
        layout = move.apply(layout)
    assert layout == dp_major


def test_of_equal_ways_the_shortest_wins() -> None:
    assert shown({"tp": P()}, {"tp": R}, SMALL) == ["tp P→R"]
    assert shown({"tp": P(), "dp_shard": R}, {"tp": R, "dp_shard": I}, SMALL) == ["dp_shard R→I", "tp P→R"]


def test_staying_takes_no_moves() -> None:
    assert shown({"tp": S(0)}, {"tp": S(0), "dp_shard": R}, SMALL) == []
    assert shown({"tp": I}, {"tp": R}, SMALL, grad=False) == []
    assert shown({"tp": I}, {"tp": R}, SMALL) == ["tp I→R"]


def test_axes_of_size_one_do_not_appear() -> None:
    ends = (Layout.make(RANK, {"dp_shard": S(0), "tp": P()}), Layout.make(RANK, {"dp_shard": R, "tp": R}))
    assert route(*ends, {"dp_shard": 1, "tp": 4}, MB) == (Move(("tp",), P(), R),)
    assert route(*ends, {"dp_shard": 1, "tp": 1}, MB) == ()


def test_a_dim_that_does_not_divide_is_not_cut_on_the_way() -> None:
    ends = ({"dp_shard": R, "tp": P()}, {"dp_shard": I, "tp": R})
    plain = ["dp_shard R→I", "tp P→R"]
    assert shown(*ends, SMALL, divides=always) == ["dp_shard R→S(1)", "tp P→R", "dp_shard S(1)→I"]
    assert shown(*ends, SMALL) == shown(*ends, SMALL, divides=lambda dim, axes: False) == plain


def test_an_uneven_shard_over_two_axes_is_gathered_axis_by_axis() -> None:
    steps = shown({"dp_shard": S(0), "tp": S(0)}, {}, SMALL, divides=lambda dim, axes: False)
    assert steps == ["tp S(0)→R", "dp_shard S(0)→R"]


def test_an_extreme_reduces_where_no_gradient_flows() -> None:
    assert shown({"tp": P("max")}, {"tp": R}, SMALL, grad=False) == ["tp P(max)→R"]


UNREACHABLE = [
    (
        {"tp": P("max")},
        {"tp": R},
        True,
        "cannot convert tp P(max) to tp R\n  why  no gradient flows through P(max)\n  try  detach the value first",
    ),
    (
        {"tp": R},
        {"tp": P("max")},
        False,
        "cannot convert tp R to tp P(max)\n"
        "  why  only an op makes P(max), and it only reduces to R or I\n"
        "  try  reduce it where it is made",
    ),
]


@pytest.mark.parametrize(("source", "target", "grad", "message"), UNREACHABLE)
def test_no_way_is_an_error(source: Placements, target: Placements, grad: bool, message: str) -> None:
    with pytest.raises(RouteError) as error:
        shown(source, target, SMALL, grad=grad)
    assert str(error.value) == message
    assert route_time(Layout.make(RANK, source), Layout.make(RANK, target), sizes(SMALL), MB, grad) == math.inf


def test_a_route_on_three_axes_takes_milliseconds() -> None:
    def lasted(source: Layout, target: Layout, nbytes: float) -> float:
        start = time.perf_counter()
        route(source, target, sizes(CUBE), nbytes)
        return time.perf_counter() - start

    # Other bytes for each, so that none is remembered. It is 0.7 ms on an idle machine.
    assert statistics.median(lasted(*pair, MB + i) for i, pair in enumerate(sample(CUBE, 100))) < 0.01


def test_the_same_question_is_answered_from_memory() -> None:
    source, target = sample(CUBE, 1)[0]
    assert route(source, target, sizes(CUBE), MB) is route(source, target, sizes(CUBE), MB)
