"""Every architecture of transformers at the sizes of its own configuration, compiled for 32 ranks and verified.

    python -m tests.equivalence.large LOG --jobs 2 --seconds 2400   all that the log lacks
    python -m tests.equivalence.large LOG --only llama gpt_neox     some
    python -m tests.equivalence.large LOG --page                    docs/large.md from the log

Nobody chose these sizes: they are the defaults of the configurations, up to a trillion parameters, whose weights are
on the meta device. What is verified is the text as it is, at small sizes (`ndcompile/verify/shrink.py`).
"""

from __future__ import annotations

import resource
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.equivalence import unchosen
from tests.equivalence.architectures import CLASSES
from tests.equivalence.unchosen import Batch, Kind, Kinds, Row

PAGE = Path(__file__).parents[2] / "docs" / "large.md"
MESHES = ("dp_shard=8, tp=4",)
SAMPLES, LENGTH = 8, 16
MEMORY = 20 << 30
"""Bytes that one model may take: some make constants of gigabytes."""


class EmptyOnMeta(TorchFunctionMode):
    """Weights are made by `torch.empty`, and buffers, whose numbers count, by other functions."""

    def __torch_function__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        more = {"device": "meta"} if function is torch.empty else {}
        return function(*args, **{**(kwargs or {}), **more})


def made(kind: str, name: str) -> tuple[nn.Module, Batch]:
    """The model without weights, in training mode, and a batch. Raises what transformers raises."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    transformers.logging.set_verbosity_error()
    classes, _ = CLASSES[kind]
    found = classes[name] if isinstance(classes[name], str) else classes[name][0]
    config = CONFIG_MAPPING[name]()
    config.use_cache, config.decoder_start_token_id = False, 1
    with EmptyOnMeta():
        model = getattr(transformers, found)(config).train()
    if kind == "image":
        size = getattr(config, "image_size", 224)
        planes = [size, size] if isinstance(size, int) else list(size)
        pixels = torch.zeros([SAMPLES, getattr(config, "num_channels", 3), *planes])
        return model, dict(pixel_values=pixels, labels=torch.zeros(SAMPLES, dtype=torch.int64))
    ids = torch.randint(3, 60, (SAMPLES, LENGTH))
    return model, dict(input_ids=ids, labels=ids)


def kinds() -> Kinds:
    on = f"transformers {transformers.__version__}"
    return {kind: Kind(tuple(classes), partial(made, kind), MESHES, on) for kind, (classes, _) in CLASSES.items()}


HEAD = """# At the sizes that models have

`python -m tests.equivalence.large LOG` takes every architecture of transformers at the defaults of its configuration,
without weights, compiles it for 32 ranks and verifies the program: types, the prime field (one seed), float64. The text
is what would run; its table has small sizes, and *same ops* says that the text for one device does what the reference
graph does at the large ones ([verification.md](verification.md#large-programs)). Left out are configurations whose
defaults make no model. What is refused here and not in [transformers.md](transformers.md) has sizes that the mesh does
not divide, or such that no small ones were found.
"""


def page(rows: list[Row]) -> str:
    return unchosen.page(HEAD, kinds(), rows, ("architecture", "architectures"))


if __name__ == "__main__":
    unchosen.main(str(__doc__), kinds, PAGE, page)
