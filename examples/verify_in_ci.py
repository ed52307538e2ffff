"""A test for your own CI: on every mesh that you train on, the model computes what it computes on one device.

pytest examples/verify_in_ci.py

Needs no GPU and no process group; a mesh may have more ranks than the machine has cores. Each report is kept as a page
in the folder `reports`. `examples/ci/verify.yml` is a GitHub workflow with it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ndcompile as nd

MESHES = ("dp_replicate=2, dp_shard=2", "dp_shard=16, tp=8")


class Tagger(nn.Module):
    """A label for each token."""

    def __init__(self, width: int = 64, labels: int = 24) -> None:
        super().__init__()
        self.tokens = nn.Embedding(320, width)
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.head = nn.Linear(width, labels)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.tokens(ids)
        logits = self.head(x + self.mlp(self.norm(x)))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def make() -> tuple[nn.Module, dict[str, Tensor]]:
    """Your model, on the meta device if it is large, and inputs like those of a training step."""
    ids = torch.zeros(8, 16, dtype=torch.long)
    return Tagger(), dict(ids=ids, labels=ids.clone())


@pytest.mark.parametrize("mesh", MESHES)
def test_model_is_equal_on_mesh(mesh: str) -> None:
    model, batch = make()
    report = nd.verify(nd.compile(model, mesh, batch), model)
    page = Path("reports") / f"{mesh.replace(', ', '_')}.html"
    page.parent.mkdir(exist_ok=True)
    page.write_text(report.to_html())
    assert report, f"\n{report}"
