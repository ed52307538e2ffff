"""The model of time compares as it should."""

from __future__ import annotations

import itertools
import math

import pytest

from ndcompile.cost import LATENCY_PLAIN, MEMORY, collective_time, conversion_time, op_time
from ndcompile.placement import COLLECTIVES, CONVERSIONS, I, P, Placement, R, S

PLACEMENTS = (R, I, S(0), S(1), P())


@pytest.mark.parametrize("primitive", sorted(COLLECTIVES))
def test_more_bytes_take_longer(primitive: str) -> None:
    times = [collective_time(primitive, nbytes, ranks=4) for nbytes in (0, 1, 2**10, 2**30)]
    assert times == sorted(times) and len(set(times)) == 4


@pytest.mark.parametrize("primitive", ["all_reduce", "all_gather", "reduce_scatter"])
def test_more_ranks_take_longer(primitive: str) -> None:
    times = [collective_time(primitive, 2**30, ranks) for ranks in (2, 4, 8, 16)]
    assert times == sorted(times) and len(set(times)) == 4


def test_an_all_reduce_is_a_scatter_and_a_gather_less_one_start() -> None:
    def volume(primitive: str) -> float:
        return collective_time(primitive, 2**30, 4) - collective_time(primitive, 0, 4)

    assert volume("all_reduce") == pytest.approx(volume("reduce_scatter") + volume("all_gather"))
    assert volume("all_gather") == pytest.approx(4 * volume("all_to_all"))


def test_an_identity_is_free_and_a_slice_costs_memory_time() -> None:
    assert collective_time("identity", 2**30, 4) == 0
    assert collective_time("chunk", 2**30, 4) == collective_time("pad", 2**30, 4) == 2**30 / MEMORY


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_staying_is_free(placement: Placement) -> None:
    assert conversion_time(placement, placement, 2**30, 4) == 0


def test_without_gradient_both_replicated_placements_are_one() -> None:
    assert conversion_time(I, R, 2**30, 4, grad=False) == conversion_time(R, I, 2**30, 4, grad=False) == 0
    assert conversion_time(I, R, 2**30, 4) == collective_time("all_reduce", 2**30, 4)


def test_a_gradient_costs_the_backward_primitive_more() -> None:
    for source, target in itertools.permutations(PLACEMENTS, 2):
        row = CONVERSIONS[source.kind, target.kind]
        sides = [collective_time(primitive, 2**30, 4) for primitive in (row.forward, row.backward)]
        assert conversion_time(source, target, 2**30, 4) == sum(sides)


def test_a_value_without_gradient_pays_the_forward_and_a_real_latency() -> None:
    for source, target in itertools.permutations(PLACEMENTS, 2):
        forward = collective_time(CONVERSIONS[source.kind, target.kind].forward, 2**30, 4, LATENCY_PLAIN)
        alone = 0.0 if source.whole and target.whole else forward
        assert conversion_time(source, target, 2**30, 4, grad=False) == alone


EXTREME = [(P("max"), S(0)), (R, P("max")), (I, P("min")), (S(0), P("max")), (P(), P("max")), (P("max"), P())]


@pytest.mark.parametrize(("source", "target"), EXTREME)
@pytest.mark.parametrize("grad", [True, False])
def test_illegal_conversions_take_for_ever(source: Placement, target: Placement, grad: bool) -> None:
    assert conversion_time(source, target, 1, 4, grad) == math.inf


@pytest.mark.parametrize("target", [R, I])
def test_an_extreme_reduces_where_no_gradient_flows(target: Placement) -> None:
    assert conversion_time(P("max"), target, 1, 4, grad=False) == collective_time("all_reduce", 1, 4, LATENCY_PLAIN)
    assert conversion_time(P("max"), target, 1, 4) == math.inf


def test_an_op_takes_its_arithmetic_and_its_memory() -> None:
    assert op_time(0, 0) == 0
    assert op_time(2e9, 1e6) == op_time(2e9, 0) + op_time(0, 1e6)
