"""A model that calls torch.utils.checkpoint: its blocks are recomputed, or it is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import ndcompile as nd
from ndcompile.errors import CompileError
from tests.models import Residual, Stack, llama, seeded, tokens

BATCH = {"ids": tokens()["ids"]}
OWN: Callable[..., Any] = functools.partial(checkpoint, use_reentrant=False)
OTHER: Callable[..., Any] = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=True)


class Outside(Stack):
    """Checkpoints each layer where it calls it."""

    def one(self, layer: nn.Module, x: Tensor, number: int) -> Tensor:
        return OWN(layer, x)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.tokens(ids)
        for number, layer in enumerate(self.layers):
            x = self.one(layer, x, number)
        return {"logits": self.head(x)}


class Reentrant(Outside):
    def one(self, layer: nn.Module, x: Tensor, number: int) -> Tensor:
        return OTHER(layer, x)


class Alternate(Outside):
    def one(self, layer: nn.Module, x: Tensor, number: int) -> Tensor:
        return layer(x) if number % 2 else OWN(layer, x)


class Selective(Outside):
    def one(self, layer: nn.Module, x: Tensor, number: int) -> Tensor:
        contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
        return OWN(layer, x, context_fn=contexts)


class More(Outside):
    def one(self, layer: nn.Module, x: Tensor, number: int) -> Tensor:
        return OWN(lambda x: layer(x) * 2, x)


class Together(Stack):
    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        return {"logits": self.head(OWN(nn.Sequential(*self.layers), self.tokens(ids)))}


class Head(Stack):
    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        return {"logits": OWN(self.head, self.tokens(ids))}


class Inside(Residual):
    def inner(self, x: Tensor) -> Tensor:
        return super().forward(x)

    def forward(self, x: Tensor) -> Tensor:
        return OWN(self.inner, x)


class Part(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return x + OWN(self.mlp, self.norm(x))


class OfInside(Stack):
    kind: type[nn.Module] = Inside

    def __init__(self, depth: int) -> None:
        super().__init__(depth)
        self.layers = nn.ModuleList(self.kind(12, 20) for _ in range(depth))


class OfPart(OfInside):
    kind = Part


def classes(kind: type[nn.Module], **options: Any) -> list[str]:
    program = nd.compile(seeded(kind, 4), "tp=2", BATCH, **options)
    return [line.strip() for line in str(program).splitlines() if "(Block):" in line or "@recomputed" in line]


@pytest.mark.parametrize("kind, name", [(Outside, "Residual"), (Reentrant, "Residual"), (OfInside, "Inside")])
def test_blocks_that_a_model_checkpoints_are_recomputed(kind: type[nn.Module], name: str) -> None:
    assert classes(kind) == [f"class {name}(Block):  # layers.0 … 3", "@recomputed"]


def test_only_those_blocks() -> None:
    some = ["class Residual(Block):  # layers.0 … 2", "@recomputed", "class Residual2(Block):  # layers.1 … 3"]
    assert classes(Alternate) == some


def test_the_option_takes_the_place_of_the_models_own() -> None:
    whole = ["class Residual(Block):  # layers.0 … 3"]
    assert classes(Outside, remat="none") == whole
    assert classes(More, remat="block") == classes(Together, remat="block") == [*whole, "@recomputed"]


REFUSED = {
    More: ("on what is not one block", "'block'"),
    Head: ("on what is not one block", "'block'"),
    Together: ("on 4 blocks at once", "'block'"),
    OfPart: ("on a part of block 'layers.0'", "'block'"),
    Selective: ("with a policy of its own", "('linear', 'attention')"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_another_checkpoint_is_refused_with_what_takes_its_place(kind: type[nn.Module]) -> None:
    what, instead = REFUSED[kind]
    with pytest.raises(CompileError) as caught:
        classes(kind)
    first, source, *rest = str(caught.value).splitlines()
    assert first == f"the model calls torch.utils.checkpoint {what}"
    assert source.startswith("  source  ") and ".py:" in source
    assert rest == [
        "  why     backward recomputes whole blocks (children of an nn.ModuleList), by the option remat",
        f"  try     remat={instead}, which takes the place of the model's own checkpoints",
        "  try     remat='none', to recompute nothing",
    ]


class NoBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Residual(12, 20)

    def forward(self, x: Tensor) -> Tensor:
        return OWN(self.layer, x)


def test_a_model_without_blocks_is_told_to_have_some() -> None:
    model, x = NoBlocks(), torch.zeros(4, 8, 12)
    with pytest.raises(CompileError) as caught:
        nd.compile(model, "tp=2", x)
    assert str(caught.value).splitlines()[-2:] == [
        "  try     an nn.ModuleList of what is to be recomputed",
        "  try     remat='none', to recompute nothing",
    ]
    assert "recomputed" not in str(nd.compile(model, "tp=2", x, remat="none"))


ON_FOUR = """\
the model calls torch.utils.checkpoint on 4 blocks at once
  why     backward recomputes whole blocks (children of an nn.ModuleList), by the option remat
  try     remat='block', which takes the place of the model's own checkpoints
  try     remat='none', to recompute nothing"""


def test_the_whole_text_but_for_the_line() -> None:
    with pytest.raises(CompileError) as caught:
        classes(Together)
    first, _, *rest = str(caught.value).splitlines()
    assert "\n".join([first, *rest]) == ON_FOUR


@pytest.mark.parametrize("reentrant", [False, True])
def test_transformers_switch_is_heeded_while_training(reentrant: bool) -> None:
    model: Any = llama()
    model.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
    program = nd.compile(model.train(), "tp=2")
    assert str(program).count("    @recomputed\n") == 1
    assert str(program) == str(nd.compile(llama().train(), "tp=2", remat="block"))
    assert "recomputed" not in str(nd.compile(model.eval(), "tp=2"))


def test_torch_is_left_as_it_was() -> None:
    owner: Any = torch.utils.checkpoint
    before = owner.CheckpointFunction, vars(owner)["_checkpoint_without_reentrant_generator"]
    classes(Outside)
    assert before == (owner.CheckpointFunction, vars(owner)["_checkpoint_without_reentrant_generator"])
