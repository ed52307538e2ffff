"""Keys and values that a model repeats for each head reach attention once a group, where a kernel takes them."""

from __future__ import annotations

import pytest
import torch

import ndcompile as nd
from tests.models import llama

HALF = nd.Precision(compute=torch.bfloat16, reduce=torch.float32)


def batch_of_words() -> dict[str, torch.Tensor]:
    words = torch.randint(131, (8, 16), generator=torch.Generator().manual_seed(0))
    return dict(input_ids=words, labels=words)


def shares(mesh: str, precision: nd.Precision | None) -> bool:
    """Two of four heads share one head of keys."""
    model, batch = llama(), batch_of_words()
    program = nd.compile(model, mesh, batch, precision=precision)
    text = str(program)
    assert ("enable_gqa=True" in text) != ("expand(" in text), text
    return "enable_gqa=True" in text


@pytest.mark.parametrize("mesh", [pytest.param("dp_shard=2", marks=pytest.mark.full), "tp=2"])
def test_in_half_precision(mesh):
    assert shares(mesh, HALF) and not shares(mesh, None)


def test_not_where_heads_are_sharded_further():
    assert not shares("tp=4", HALF)


def test_the_program_is_the_model():
    model, batch = llama(), batch_of_words()
    program = nd.compile(model, "dp_shard=2, tp=2", batch, precision=HALF)
    assert nd.verify(program, model, seeds=1).equal
