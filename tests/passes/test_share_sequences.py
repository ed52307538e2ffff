"""Which convolutions and running sums get a form that ranks can share, and that it computes the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ndcompile as nd
from ndcompile.rules.registry import op_name

IDS = torch.zeros(2, 8, dtype=torch.long)


class Convolves(nn.Module):
    def __init__(self, pad: Any = None, cut: Any = slice(None), **options: Any) -> None:
        super().__init__()
        self.pad, self.cut = pad, cut
        self.tokens, self.mix = nn.Embedding(19, 6), nn.Conv1d(6, 6, **options)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids).transpose(1, 2)
        x = x if self.pad is None else F.pad(x, self.pad)
        cut = self.cut(ids.shape[1]) if callable(self.cut) else self.cut
        return self.mix(x)[..., cut].square().sum()


SHARED: dict[str, tuple[Convolves, int]] = {
    "one token": (Convolves(kernel_size=1), 0),
    "both ways": (Convolves(kernel_size=3, padding=1), 1),
    "the same length": (Convolves(kernel_size=4, padding="same"), 1),
    "the same length, apart": (Convolves(kernel_size=4, padding="same", dilation=3), 4),
    "padded before": (Convolves((3, 0), kernel_size=4, groups=6), 3),
    "padded behind": (Convolves((0, 3), kernel_size=4, groups=6), 0),
    "cut, as in Mamba": (Convolves(kernel_size=4, padding=3, groups=6, cut=lambda s: slice(s)), 3),
    "cut at both ends": (Convolves(kernel_size=4, padding=3, cut=lambda s: slice(1, s + 1)), 2),
}

OTHERS: dict[str, Convolves] = {
    "a stride": Convolves(kernel_size=3, padding=1, stride=2),
    "shorter": Convolves(kernel_size=3),
    "longer": Convolves(kernel_size=3, padding=2),
}


@pytest.mark.parametrize("case", SHARED)
def test_a_convolution_that_keeps_the_length_is_shared(case: str) -> None:
    """And on one device the form computes what torch's does."""
    model, left = SHARED[case]
    program = nd.compile(model.double(), "cp=2", IDS, float64=True)
    [node] = [n for n in program.folded_reference.graph.nodes if "conv" in op_name(n.target)]
    assert op_name(node.target) == "runtime.convolve" and node.args[3] == left
    ids = torch.randint(0, 19, (3, 12))
    assert torch.allclose(program.one_device(model)(ids), model(ids), rtol=1e-12, atol=0)
    assert nd.verify(program, model, seeds=1).equal


@pytest.mark.parametrize("case", OTHERS)
def test_another_convolution_is_refused(case: str) -> None:
    with pytest.raises(nd.CompileError, match=r"aten\.conv1d\.default needs the whole sequence"):
        nd.compile(OTHERS[case], "cp=2", IDS)


def test_on_other_meshes_nothing_is_changed() -> None:
    program = nd.compile(SHARED["cut, as in Mamba"][0], "tp=2", IDS)
    assert "F.conv1d(" in str(program) and "convolve(" not in str(program)


class Counts(nn.Module):
    """Positions that count the tokens of a mask, and a state that adds up."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.at = nn.Embedding(19, 6), nn.Embedding(32, 6)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.tokens(ids) + self.at((mask.cumsum(1) - 1).clamp(min=0))
        return x.cumsum(1).square().sum()


def test_whole_numbers_are_counted_on_every_rank_and_states_are_shared() -> None:
    program = nd.compile(Counts(), "cp=2", {"ids": IDS, "mask": IDS})
    text = str(program)
    assert "mask.cumsum(1)" in text or "torch.cumsum(mask, 1)" in text
    assert "running_sum(" in text and "axis=cp)" in text
    assert nd.verify(program, seeds=1).equal


def test_a_recurrence_step_by_step_is_refused() -> None:
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.lstm = nn.Embedding(19, 6), nn.LSTM(6, 6, batch_first=True)

        def forward(self, ids: Tensor) -> Tensor:
            return self.lstm(self.tokens(ids))[0].square().sum()

    with pytest.raises(
        nd.CompileError, match=r"axis 'cp' has nothing to shard\n  why     .*a recurrence step by step fixes it"
    ):
        nd.compile(Remembers(), "cp=2", IDS)
