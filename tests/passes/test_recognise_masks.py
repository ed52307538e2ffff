"""A mask gets a name only where it is that mask at every size and for every row that could tell."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import ndcompile as nd
from ndcompile.capture import capture
from ndcompile.inputs import Inputs
from ndcompile.passes.drop_noops import drop_noops
from ndcompile.passes.recognise_masks import ATTENTION, recognise_masks
from ndcompile.rules.registry import arguments
from ndcompile.runtime import attention
from ndcompile.runtime.manifest import digest

Rule = Callable[[Tensor], Tensor]
"""From ids `[b, s]` to a mask."""


class Held(nn.Module):
    """Blocks whose masks are cut from a buffer of each block."""

    def __init__(self, *held: Tensor) -> None:
        super().__init__()
        self.tokens, self.blocks = nn.Embedding(7, 4), nn.ModuleList(HeldBlock(mask) for mask in held)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return x


class HeldBlock(nn.Module):
    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)
        self.out = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        mask = self.mask[:, :, : x.shape[1], : x.shape[1]]
        given = x[:, None]
        return x + self.out(F.scaled_dot_product_attention(given, given, given, attn_mask=mask)[:, 0])


class Attention(nn.Module):
    """Attention of tokens to each other, once under each mask that is made from the ids' shape, or from the ids."""

    def __init__(self, *masks: Rule) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 4)
        self.masks = masks

    def forward(self, ids: Tensor) -> list[Tensor]:
        x = self.tokens(ids)[:, None]
        return [F.scaled_dot_product_attention(x, x, x, attn_mask=mask(ids)) for mask in self.masks]


def attentions(model: nn.Module, batch: Any) -> list[fx.Node]:
    graph = recognise_masks(drop_noops(capture(model, Inputs.of(batch)).graph), dict(model.named_buffers()))
    return [node for node in graph.graph.nodes if node.target in (ATTENTION, attention)]


def name_of(node: fx.Node) -> dict[str, Any] | str:
    """The parts of the name, rows by the name of their node; or why it stays dense."""
    if node.target is attention:
        return {k: shown(v) for k, v in node.kwargs.items() if k != "scale"}
    given = arguments(node)
    if given["attn_mask"] is None:
        return {"causal": True} if given["is_causal"] else {}
    return str(node.meta.get("dense_mask", "has no queries"))


def shown(part: Any) -> Any:
    return re.sub(r"_\d+$", "", str(part)) if isinstance(part, fx.Node) else part


def names(masks: Sequence[Rule]) -> list[dict[str, Any] | str]:
    return [name_of(node) for node in attentions(Attention(*masks), IDS)]


IDS = torch.ones(2, 6, dtype=torch.long)


# ---- masks -----------------------------------------------------------------------------------------------------------


def rule(allowed: Callable[[Tensor, Tensor], Tensor]) -> Rule:
    """A mask of positions `[s, 1]` and `[1, s]`."""

    def mask(ids: Tensor) -> Tensor:
        at = torch.arange(ids.shape[1], device=ids.device)
        return allowed(at[:, None], at[None, :])

    return mask


def rows(allowed: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Rule:
    """A mask of positions and ids, `[b, 1, s, s]`."""
    return lambda ids: rule(lambda q, k: allowed(q, k, ids))(ids)[:, None]


def added(mask: Rule, fill: float) -> Rule:
    return lambda ids: torch.where(mask(ids), 0.0, fill)


def same(ids: Tensor) -> Tensor:
    return ids[:, :, None] == ids[:, None, :]


def keys(row: Tensor) -> Tensor:
    return row[:, None, :]


def restarts(ids: Tensor) -> Tensor:
    """Which document each token is in, of positions that restart."""
    return (ids.diff(dim=1, prepend=ids[:, :1] - 1) != 1).cumsum(1)


LOWEST = torch.finfo(torch.float32).min
causal = rule(lambda q, k: q >= k)
padded = rows(lambda q, k, ids: (q >= k) & keys(ids != 0))

NAMED: dict[str, tuple[Rule, dict[str, Any]]] = {
    "causal": (causal, {"causal": True}),
    "causal, the other way round": (rule(lambda q, k: ~(k > q)), {"causal": True}),
    "causal, lowest added": (added(causal, LOWEST), {"causal": True}),
    "causal, minus infinity added": (added(causal, -torch.inf), {"causal": True}),
    "causal by tril": (lambda ids: same(ids)[:1].logical_or(~same(ids)[:1]).tril(), {"causal": True}),
    "everything": (rule(lambda q, k: q + k >= 0), {}),
    "window": (rule(lambda q, k: (q >= k) & (q - k < 3)), {"causal": True, "window": 3}),
    "window, up to and with": (rule(lambda q, k: (q >= k) & (q - k <= 3)), {"causal": True, "window": 4}),
    "window from the key's side": (rule(lambda q, k: (k <= q) & (k > q - 3)), {"causal": True, "window": 3}),
    "window on both sides": (rule(lambda q, k: (q - k).abs() <= 2), {"window": 3}),
    "window of 40": (rule(lambda q, k: (q >= k) & (q - k < 40)), {"causal": True, "window": 40}),
    "window of 4096": (rule(lambda q, k: (q >= k) & (q - k < 4096)), {"causal": True, "window": 4096}),
    "window of 262144": (rule(lambda q, k: (q >= k) & (q - k <= 262144)), {"causal": True, "window": 262145}),
    "window, lowest added": (
        added(rule(lambda q, k: (q >= k) & (q - k < 3)), LOWEST),
        {"causal": True, "window": 3},
    ),
    "chunks": (rule(lambda q, k: (q >= k) & (q // 3 == k // 3)), {"causal": True, "chunk": 3}),
    "chunks of 8192": (rule(lambda q, k: (q >= k) & (q // 8192 == k // 8192)), {"causal": True, "chunk": 8192}),
    "chunks and a window": (
        rule(lambda q, k: (q >= k) & (q // 5 == k // 5) & (q - k < 3)),
        {"causal": True, "window": 3, "chunk": 5},
    ),
    "two windows": (rule(lambda q, k: (q >= k) & (q - k < 9) & (q - k < 4)), {"causal": True, "window": 4}),
    "prefix of 4": (rule(lambda q, k: (q >= k) | (k < 4)), {"causal": True, "prefix": 4}),
    "prefix of 4 among themselves": (rule(lambda q, k: (q >= k) | ((k < 4) & (q < 4))), {"causal": True, "prefix": 4}),
    "prefix of rows": (rows(lambda q, k, ids: (q >= k) | keys(ids != 0)), {"causal": True, "prefix": "ids"}),
    "padding": (lambda ids: (ids != 0)[:, None, None, :], {"padding": "ids"}),
    "padding by another id": (lambda ids: (ids != 5)[:, None, None, :], {"padding": "ne"}),
    "padding by a large id": (lambda ids: (ids != 50256)[:, None, None, :], {"padding": "ne"}),
    "padding, minus infinity added": (added(padded, -torch.inf), {"causal": True, "padding": "ids"}),
    "causal and padding": (padded, {"causal": True, "padding": "ids"}),
    "documents": (rows(lambda q, k, ids: same(ids)), {"documents": "ids"}),
    "packed positions": (
        rows(lambda q, k, ids: (q >= k) & same(restarts(ids))),
        {"causal": True, "documents": "cumsum"},
    ),
    "packed, causal by position": (
        rows(lambda q, k, ids: (ids[:, :, None] >= keys(ids)) & same(restarts(ids))),
        {"causal": True, "documents": "cumsum"},
    ),
    "all at once": (
        rows(lambda q, k, ids: (q >= k) & (q - k < 100) & same(ids) & keys(ids != 0)),
        {"causal": True, "window": 100, "padding": "ids", "documents": "ids"},
    ),
}  # fmt: skip


def test_masks_that_get_a_name() -> None:
    found = names([mask for mask, _ in NAMED.values()])
    assert dict(zip(NAMED, found, strict=True)) == {name: parts for name, (_, parts) in NAMED.items()}


OTHER = "no named masks together are equal to it"
UNIFORM = "where a row lets nothing through, what it adds is finite: attention is uniform there"
ADDS = "it adds other numbers than 0 and the lowest"

DENSE: dict[str, tuple[Rule, str]] = {
    "the future": (rule(lambda q, k: q <= k), OTHER),
    "causal, one further": (rule(lambda q, k: q >= k - 1), OTHER),
    "causal but for one entry": (rule(lambda q, k: (q >= k) & ~((q == 5) & (k == 2))), OTHER),
    "causal but for one far entry": (rule(lambda q, k: (q >= k) & ~((q == 3000) & (k == 2999))), OTHER),
    "causal and one entry more": (rule(lambda q, k: (q >= k) | ((q == 4) & (k == 11))), OTHER),
    "a window that starts late": (rule(lambda q, k: (q >= k) & ((q - k < 4) | (q < 9))), OTHER),
    "a window and the first token": (rule(lambda q, k: (q >= k) & ((q - k < 4) | (k == 0))), OTHER),
    "a window of another width far out": (rule(lambda q, k: (q >= k) & (q - k < torch.where(q < 700, 4, 5))), OTHER),
    "every other": (rule(lambda q, k: (q >= k) & ((q - k) % 2 == 0)), OTHER),
    "a prefix but for the first": (rule(lambda q, k: (q >= k) | ((k < 4) & (q > 0))), OTHER),
    "padding on queries": (lambda ids: (ids != 0)[:, None, :, None], OTHER),
    "padding but for the first key": (rows(lambda q, k, ids: (q >= k) & keys(ids != 0) | (k == 0)), OTHER),
    "padded rows unmasked": (rows(lambda q, k, ids: (q >= k) & keys(ids != 0) | ~(ids != 0)[:, :, None]), OTHER),
    "documents that end in the next": (rows(lambda q, k, ids: (q >= k) & (ids[:, :, None] >= keys(ids))), OTHER),
    "documents of the neighbour": (rows(lambda q, k, ids: same(ids) | (ids[:, :, None] == keys(ids + 1))), OTHER),
    "images see themselves": (rows(lambda q, k, ids: (q >= k) | (same(ids) & keys(ids != 0))), OTHER),
    "two key masks": (
        rows(lambda q, k, ids: (q >= k) & keys(ids != 4) & keys(ids.flip(1) != 0)),
        "it has two masks of one kind in it",
    ),
    "padding, lowest added": (added(padded, LOWEST), UNIFORM),
    "a bias": (rule(lambda q, k: -(q - k).abs().float()), ADDS),
    "a billion added": (added(causal, -1e9), ADDS),
    "heads apart": (
        rule(lambda q, k: (q >= k) & ((q - k)[None] < torch.arange(2, 4, device=q.device)[:, None, None])),
        "heads have masks of their own",
    ),
}


def test_masks_that_get_none() -> None:
    found = names([mask for mask, _ in DENSE.values()])
    assert dict(zip(DENSE, found, strict=True)) == {name: why for name, (_, why) in DENSE.items()}


# ---- buffers ---------------------------------------------------------------------------------------------------------


def tril(size: int = 24) -> Tensor:
    return torch.ones(1, 1, size, size, dtype=torch.bool).tril()


def but_for_one(row: int, column: int) -> Tensor:
    mask = tril()
    mask[0, 0, row, column] = not mask[0, 0, row, column]
    return mask


def of_buffers(*held: Tensor) -> list[dict[str, Any] | str]:
    """What the program calls the masks of blocks that hold these, a folded run by its two rounds."""
    return [name_of(node) for node in attentions(Held(*held), IDS)]


@pytest.mark.parametrize("mask", [tril(), torch.where(tril(), 0.0, -torch.inf), torch.where(tril(), 0.0, LOWEST)])
def test_a_mask_cut_from_a_buffer_is_known_by_its_values(mask: Tensor) -> None:
    assert of_buffers(mask) == [{"causal": True}]


@pytest.mark.parametrize("mask", [but_for_one(23, 3), but_for_one(0, 23), but_for_one(20, 20)])
def test_a_buffer_with_one_other_entry_is_dense(mask: Tensor) -> None:
    assert of_buffers(mask) == [OTHER]


def test_equal_blocks_share_a_name_only_if_their_buffers_are_equal() -> None:
    assert of_buffers(*(tril() for _ in range(4))) == [{"causal": True}] * 2
    assert of_buffers(tril(), tril(), tril(), but_for_one(5, 2))[-2:] == [{"causal": True}, OTHER]
    assert of_buffers(but_for_one(5, 2), tril(), tril(), tril())[:2] == [OTHER, {"causal": True}]


def test_buffers_without_values_are_no_masks_that_could_be_known() -> None:
    with torch.device("meta"):
        (node,) = attentions(Held(tril()), IDS)
    assert name_of(node) == "the values of buffer 'blocks.0.mask' are not known"


def test_a_number_in_a_tensor_counts_as_one_in_the_code() -> None:
    """Lengths beyond it are computed, so what begins there is seen."""

    class Late(nn.Module):
        start: Tensor

        def __init__(self, start: int) -> None:
            super().__init__()
            self.tokens = nn.Embedding(7, 4)
            self.register_buffer("start", torch.tensor(start))

        def forward(self, ids: Tensor) -> Tensor:
            x = self.tokens(ids)[:, None]
            mask = rule(lambda q, k: (q >= k) | (q > self.start))(ids)
            return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    assert [name_of(node) for node in attentions(Late(50), IDS)] == [OTHER]
    beyond = "its numbers ask for lengths beyond 4096"
    assert [name_of(node) for node in attentions(Late(5000), IDS)] == [beyond]


def test_a_program_says_what_its_names_rest_on_and_which_masks_are_dense() -> None:
    model = Held(tril(), but_for_one(5, 2))
    program = nd.compile(model, "dp_shard=2", IDS)
    assert program.manifest.assumed == {"blocks.0.mask": digest(tril())}
    (dense,) = program.dense_masks()
    assert (dense.module, dense.bytes, dense.count, dense.why) == ("blocks.1", 4096**2, 1, OTHER)
    assert dense.source.endswith("F.scaled_dot_product_attention(given, given, given, attn_mask=mask)[:, 0])")
    assert str(program).splitlines()[:6] == [
        '"""Held on dp_shard=2: emitted by ndcompile.',
        "",
        "It holds while s <= 24.",
        "",
        f'blocks.1: a dense mask of 16,777,216 bytes a rank, since {OTHER}"""',
        "",
    ]
