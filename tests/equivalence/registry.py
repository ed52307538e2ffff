"""All models and all meshes of the equivalence matrix."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

from torch import nn

from ndcompile.mesh import KINDS
from tests.equivalence import along, hf, masks, torch_nn, zoo
from tests.equivalence.zoo import Batch

MODELS: dict[str, Callable[[int], tuple[nn.Module, Batch]]] = (
    zoo.ALL | hf.MODELS | torch_nn.TORCH_NN | masks.MASKED | along.ALONG
)
"""By name: what makes a model with seeded weights, and a batch of so many samples."""

WORLDS = (2, 4, 8)
WIDE = (
    zoo.ZOO.keys() | torch_nn.TORCH_NN.keys()
    | {"GPT-2", "GPT-2 with dropout", "GPT-2 over 50,257", "Llama, one KV head", "Qwen3", "Mistral", "Phi-3", "Gemma-2"}
    | {"BERT", "BERT, padded", "ALBERT", "T5", "T5 with dropout", "ResNet", "ViT", "Mixtral"}
    | {"Mixtral, balanced, padded", "Mistral, packed", "Llama, packed"}
    | {"fused attention", "pooled", "shared block", "gated", "towers", "drop path", "nn.LSTM"}
)  # fmt: skip
"""Models that the command of `models` runs on 8 ranks too, and over `cp`; the others on 2 and 4 without it."""


def has_sequence(name: str) -> bool:
    """Whether a model of the zoo has something that `cp` can shard."""
    return name != "mlp"


def meshes_of(name: str) -> list[str]:
    """All meshes on which `models` runs a model."""
    if name in WIDE:
        return [mesh for world_size in WORLDS for mesh in meshes(world_size)]
    return [mesh for world_size in WORLDS[:2] for mesh in meshes(world_size, WITHOUT_CP)]


LONGEST_CP = 4
"""The samples' sequences are cut into twice as many parts."""

WITHOUT_CP = tuple(kind for kind in KINDS if kind != "cp")


def meshes(world_size: int, kinds: tuple[str, ...] = KINDS) -> list[str]:
    """All meshes of these axes, each of more than one rank: those of one axis, of two, of three."""
    found = []
    for count in range(1, len(kinds) + 1):
        for axes in itertools.combinations(kinds, count):
            for sizes in itertools.product((2, 4, 8), repeat=count):
                if math.prod(sizes) == world_size and dict(zip(axes, sizes, strict=True)).get("cp", 1) <= LONGEST_CP:
                    found.append(", ".join(f"{axis}={size}" for axis, size in zip(axes, sizes, strict=True)))
    return found
