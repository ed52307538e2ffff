"""A mask gets a name only where it is that mask at every size that could tell."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from ndcompile.capture import capture
from ndcompile.inputs import Inputs
from ndcompile.passes.drop_noops import drop_noops
from ndcompile.passes.recognise_masks import recognise_masks
from ndcompile.rules.registry import arguments

Mask = Callable[[Tensor], Tensor]


class Attention(nn.Module):
    """Attention of tokens to each other under a mask made from the ids' shape, or from the ids."""

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 4)
        self.mask = mask

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)[:, None]
        return F.scaled_dot_product_attention(x, x, x, attn_mask=self.mask(ids))


def places(ids: Tensor) -> tuple[Tensor, Tensor]:
    at = torch.arange(ids.shape[1], device=ids.device)
    return at[:, None], at[None, :]


def causal(ids: Tensor) -> Tensor:
    q, k = places(ids)
    return q >= k


def additive_causal(ids: Tensor) -> Tensor:
    q, k = places(ids)
    return torch.where(q >= k, 0.0, torch.finfo(torch.float32).min)


def everything(ids: Tensor) -> Tensor:
    q, k = places(ids)
    return q + k >= 0


def window(width: int) -> Mask:
    def mask(ids: Tensor) -> Tensor:
        q, k = places(ids)
        return (q >= k) & (q - k < width)

    return mask


def anticausal(ids: Tensor) -> Tensor:
    q, k = places(ids)
    return q <= k


def shifted(ids: Tensor) -> Tensor:
    q, k = places(ids)
    return q >= k - 1


def padding(ids: Tensor) -> Tensor:
    return (ids != 0)[:, None, None, :]


def bias(ids: Tensor) -> Tensor:
    q, k = places(ids)
    return -(q - k).abs().float()


def attention_of(mask: Mask) -> fx.Node:
    graph = capture(Attention(mask), Inputs.of(torch.ones(2, 6, dtype=torch.long))).graph
    return recognise_masks(drop_noops(graph)).graph.find_nodes(
        op="call_function", target=torch.ops.aten.scaled_dot_product_attention.default
    )[0]


@pytest.mark.parametrize("mask", [causal, additive_causal])
def test_causal_masks_are_named(mask: Mask) -> None:
    given = arguments(attention_of(mask))
    assert given["attn_mask"] is None and given["is_causal"]


def test_a_mask_that_lets_all_through_is_dropped() -> None:
    given = arguments(attention_of(everything))
    assert given["attn_mask"] is None and not given["is_causal"]


@pytest.mark.parametrize(
    "mask", [window(3), window(40), window(4096), window(5000), anticausal, shifted, padding, bias]
)
def test_other_masks_stay_tensors(mask: Mask) -> None:
    given = arguments(attention_of(mask))
    assert isinstance(given["attn_mask"], fx.Node) and not given["is_causal"]


def test_no_tensor_of_a_llama_is_sequence_by_sequence() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, use_cache=False
    )
    ids = torch.ones(2, 6, dtype=torch.long)
    graph = capture(LlamaForCausalLM(config), Inputs.of({"input_ids": ids, "labels": ids})).graph
    nodes = recognise_masks(drop_noops(graph)).graph.nodes
    assert [n for n in nodes if list(map(str, n.meta.get("sizes", ()))).count("s") > 1] == []
