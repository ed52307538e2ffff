"""Section B of docs/bugs.md: a gradient that is summed twice, or over what it must not be summed over."""

from __future__ import annotations

import dataclasses

import pytest

from ndcompile.errors import CheckError
from ndcompile.pipeline import copied
from ndcompile.placement import P
from ndcompile.verify.graph_mutants import check_types
from tests.bugs.models import LATENT_WHOLE, ROUTER, Experts, Latent, Tied, batch
from tests.bugs.planted import Situation, situation


def latent() -> Situation:
    """Small vectors that every rank computes, used by the heads of each: their gradients are partial."""
    return situation(Latent, batch, "tp=2", pins=LATENT_WHOLE)


def test_a_gradient_is_summed_where_it_comes_in_and_at_the_parameter() -> None:
    found = latent()
    found.assert_equal()
    for name, right in (("q_a", "w.q_a)"), ("kv_a", "w.kv_a[:3 * n10 // 5]")):
        said = found.types_say("a parameter's way is done twice", f"= runtime.replicate   {name}")
        assert said.startswith("replicate turns 'tp R' into 'tp R'")
        assert found.seen_by(right, right.replace(f"w.{name}", f"wrong.double_back(w.{name}, tp)")) == "field"


def test_keys_that_all_heads_share_are_summed_once() -> None:
    """A sum in place of what each rank has already, of one part of a matrix alone."""
    found = latent()
    right = "kv_a_2 = F.linear(norm, cut_2)"
    assert found.seen_by(right, "kv_a_2 = wrong.double_back(F.linear(norm, cut_2), tp)") == "field"


def test_a_value_that_is_called_partial_though_it_was_reduced() -> None:
    found = situation(Experts, batch, "tp=2")
    graph = copied(found.program.folded)
    node = next(n for n in graph.graph.nodes if n.name.startswith("all_reduce_invariant"))
    node.meta["layout"] = node.meta["layout"].replace("tp", P())
    with pytest.raises(CheckError) as caught:
        check_types(graph, found.program.mesh)
    assert "but it is 'tp P'" in str(caught.value)
    right = found.line("total_2 = all_reduce_invariant(total_2")
    assert found.seen_by(right, right.replace("(total_2", "(runtime.all_reduce(total_2, tp)")) == "field"


def test_no_result_and_no_parameter_is_partial_at_the_border() -> None:
    """So nothing goes through `to_local` and back whose gradient would be another one."""
    for found in (latent(), situation(Tied, batch, "tp=2"), situation(Experts, batch, "dp_shard=2, tp=2", pins=ROUTER)):
        layouts = [p.layout for p in found.program.parameters.values()]
        layouts += [n.meta["layout"] for n in found.program.graph.graph.output_node().all_input_nodes]
        assert not [str(layout) for layout in layouts for axis in layout.axes if layout.on(axis).kind == "P"]


def test_a_lookup_whose_gradient_is_summed_over_the_axis_of_its_columns() -> None:
    """The table's columns lie on tp, its rows on dp_shard, over which tokens are parted."""
    found = situation(Experts, batch, "dp_shard=2, tp=2", pins=ROUTER)
    found.assert_equal()
    graph = copied(found.program.folded)
    way = next(n for n in graph.graph.nodes if n.meta.get("parameter") == "tokens.weight")
    assert way.meta["move"].axes == ("dp_shard",)
    way.meta["move"] = dataclasses.replace(way.meta["move"], axes=("tp",))
    with pytest.raises(CheckError):
        check_types(graph, found.program.mesh)
    right = 'tokens=weight("/tokens.weight", gather={"dp_shard": 0})'
    assert found.seen_by(right, 'tokens=weight("/tokens.weight", reduce=("tp",), gather={"dp_shard": 0})') == "field"
    assert found.seen_by(right, 'tokens=weight("/tokens.weight", gather={"tp": 0})') != ""
