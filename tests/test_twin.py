"""The copy of a model that is traced: on meta, alike in all that it holds, and with nothing of the model's own."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from ndcompile.twin import on_meta


class Part(nn.Module):
    """Shares a list, empty so far, with the other parts; knows the whole without having it."""

    def __init__(self, whole: nn.Module, notes: list[int]) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.register_buffer("shift", torch.ones(2))
        self.notes, self.table, self.plain = notes, {"a": [1, 2]}, torch.arange(4)
        self.whole = (whole,)


class WithState(nn.Linear):
    """Says itself what a copy gets."""

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "copied": True}


class WithCopy(nn.Linear):
    """Says itself how it is copied."""

    copied: bool

    def __deepcopy__(self, memo: dict[int, Any]) -> WithCopy:
        new = WithCopy(self.in_features, self.out_features, device="meta")
        memo[id(self)] = new
        new.copied = True
        return new


class Whole(nn.Module):
    parts: Any

    def __init__(self) -> None:
        super().__init__()
        notes: list[int] = []
        self.parts = nn.ModuleList(Part(self, notes) for _ in range(2))
        self.tied = nn.Linear(3, 2)
        self.tied.weight = self.parts[1].inner.weight
        self.state, self.own = WithState(2, 2), WithCopy(2, 2)


def test_a_twin_has_copies_of_all_and_shares_within_itself_what_the_model_shares() -> None:
    model = Whole()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    copied, constants = on_meta(model)
    twin: Any = copied
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    first, second = twin.parts
    assert first.notes == [] and first.notes is second.notes is not model.parts[0].notes
    assert first.table == {"a": [1, 2]} and first.table["a"] is not model.parts[0].table["a"]
    assert first.whole[0] is twin
    assert twin.tied.weight is second.inner.weight is not first.inner.weight
    assert all(t.is_meta for t in [*twin.parameters(), *twin.buffers(), first.plain])
    assert constants == {id(p.plain): q.plain for p, q in zip(twin.parts, model.parts, strict=True)}
    assert not {id(m) for m in model.modules()} & {id(m) for m in twin.modules()}
    assert twin.state.copied and twin.own.copied


def test_a_twin_holds_what_a_deep_copy_holds() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8), 2, enable_nested_tensor=False)
    twin, due = on_meta(model)[0], copy.deepcopy(model)
    for (name, module), (path, other) in zip(twin.named_modules(), due.named_modules(), strict=True):
        assert (name, type(module), list(vars(module))) == (path, type(other), list(vars(other)))
