"""All models and all meshes of the equivalence matrix."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

from torch import nn

from ndcompile.mesh import BUILT
from tests.equivalence import hf, masks, torch_nn, zoo
from tests.equivalence.zoo import Batch

MODELS: dict[str, Callable[[int], tuple[nn.Module, Batch]]] = zoo.ALL | hf.MODELS | torch_nn.TORCH_NN | masks.MASKED
"""By name: what makes a model with seeded weights, and a batch of so many samples."""

WORLDS = (2, 4, 8)


def meshes(world_size: int) -> list[str]:
    """All meshes of up to three axes, each of more than one rank: those of one axis, of two, of three."""
    found = []
    for count in range(1, len(BUILT) + 1):
        for axes in itertools.combinations(BUILT, count):
            for sizes in itertools.product((2, 4, 8), repeat=count):
                if math.prod(sizes) == world_size:
                    found.append(", ".join(f"{axis}={size}" for axis, size in zip(axes, sizes, strict=True)))
    return found
