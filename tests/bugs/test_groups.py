"""Section C of docs/bugs.md: a collective over other ranks than those that hold the parts."""

from __future__ import annotations

import ndcompile as nd
from tests.bugs.models import SEQUENCE, Documents, Experts, Padded, batch, documents, padded
from tests.bugs.planted import Situation, situation

BOTH = "dp_shard=2, tp=2"


def on_sequence_shards() -> Situation:
    return situation(Padded, padded, BOTH, pins=(("norm", nd.S(1)),))


def test_a_mask_that_is_cut_by_another_groups_index() -> None:
    """It needs two replicas of tp, whose ranks of equal number cut alike."""
    found = on_sequence_shards()
    found.assert_equal()
    assert found.seen_by("shard(real, tp, dim=1)", "shard(real, dp_shard, dim=1)") == "field"
    found.types_say("a conversion is over another axis", "= runtime.shard")


def test_a_statistic_of_tokens_is_summed_over_all_that_hold_some() -> None:
    found = on_sequence_shards()
    right = "all_reduce_invariant(ratio, dp_shard_tp)"
    for other in ("dp_shard", "tp"):
        assert found.seen_by(right, f"all_reduce_invariant(ratio, {other})") == "field"


def test_gradients_of_experts_are_summed_over_the_data_ranks() -> None:
    """The matrices of experts lie on tp; the other axis, over which their gradients are due, has as many ranks."""
    found = situation(Experts, batch, "dp_replicate=2, tp=2")
    found.assert_equal()
    for name in ("up", "down"):
        found.types_say("a parameter's way is over another axis", found.way(name))
        right = f'{name}=weight("/{name}", reduce=("dp_replicate",))'
        assert found.seen_by(right, right.replace("dp_replicate", "tp")) == "field"


def test_a_loss_by_document_whose_tokens_lie_on_several_ranks() -> None:
    """Documents are packed in rows that tp cuts: what is squared is the mean over a whole document."""
    found = situation(Documents, documents, "tp=2", pins=SEQUENCE)
    found.assert_equal()
    right = "ratio = all_reduce_invariant(ratio, tp)"
    assert found.seen_by(right, "ratio = ratio") == "field"
    assert found.seen_by("to = shard(eq, tp, dim=1)", "to = shard(eq, wrong.next_rank(tp), dim=1)") == "field"
