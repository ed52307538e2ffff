"""The lockstep runs on the device that is asked for: on meta, where a tensor that was made elsewhere does not fit."""

from __future__ import annotations

import pytest
import torch

import ndcompile as nd
from ndcompile.verify.domain import Float64
from ndcompile.verify.execute import Step, on_one_device, on_ranks
from ndcompile.verify.field import Field
from ndcompile.verify.sample import draw
from tests.equivalence.zoo import ALL


def tensors(step: Step) -> list[torch.Tensor]:
    found = [y for results in step.results for y in results]
    return [*found, *step.gradients.values(), *step.parameters.values(), step.norm]


@pytest.mark.parametrize("name", ["mlp", "gpt with dropout"])
def test_all_ranks_and_the_reference_run_on_the_device(name: str) -> None:
    model, batch = ALL[name](8)
    program = nd.compile(model, "dp_shard=2, tp=2", batch)
    domain = Float64(0, "meta")
    sample = draw(program, domain, model)
    steps = [*on_one_device(program, sample, domain), *(s for rank in on_ranks(program, sample, domain) for s in rank)]
    assert {str(x.device) for step in steps for x in tensors(step)} == {"meta"}
    assert {str(g.device) for g in sample.drawn[0] if g is not None} == {"meta"}


def test_the_fields_tables_are_there_too() -> None:
    field = Field(0, "meta")
    with pytest.raises(RuntimeError, match="Meta tensors"):  # it looks whether all are residues
        field.function("exp", torch.zeros(3, device="meta"))
    assert {table.device.type for table in (field._inverses, *field._functions.values())} == {"meta"}
    assert field.draw((2,)).device.type == "meta"
