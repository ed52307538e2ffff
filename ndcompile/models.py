"""Models named on the command line: `module:function`, or a transformers config.json."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ndcompile.errors import CompileError


def load_model(text: str) -> tuple[nn.Module, object]:
    """The model and its example inputs; None for a transformers model, whose inputs the compiler makes itself."""
    return _from_config(Path(text)) if text.endswith(".json") else _from_function(text)


def load_with_values(text: str, samples: int) -> tuple[nn.Module, object]:
    """The model with seeded values, and its global batch; of a transformers model tokens, unequally masked."""
    torch.manual_seed(0)
    if not text.endswith(".json"):
        return _from_function(text)
    model, _ = _from_config(Path(text), "cpu")
    config: Any = model.config
    ids = torch.randint(config.vocab_size, (samples, min(32, getattr(config, "max_position_embeddings", 32))))
    labels = ids.clone()
    for number, row in enumerate(labels):
        row[: 2 * number % len(row)] = -100
    return model, {"input_ids": ids, "labels": labels}


def in_float64(example_inputs: Any) -> Any:
    """Example inputs with every float as float64."""

    def double(x: torch.Tensor) -> torch.Tensor:
        return x.double() if x.is_floating_point() else x

    return pytree.tree_map_only(torch.Tensor, double, example_inputs)


def _from_function(text: str) -> tuple[nn.Module, object]:
    """Call `function` of `module` (found from the current folder, too), which returns (model, example_inputs)."""
    module_name, colon, function_name = text.partition(":")
    if not (colon and module_name and function_name):
        raise CompileError(
            f"cannot read a model from {text!r}",
            why="a model is named by a function that makes it, or by its transformers configuration",
            tries=("module:function, where function() returns (model, example_inputs)", "path/to/config.json"),
        )
    sys.path.insert(0, os.getcwd())
    try:
        made = getattr(import_module(module_name), function_name)()
    except (ModuleNotFoundError, AttributeError) as error:
        raise CompileError(f"cannot find {text!r}", why=str(error), tries="run in the folder of the module") from error
    finally:
        sys.path.remove(os.getcwd())
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise CompileError(
            f"{text} returned {type(made).__name__}",
            why="inspect needs the model and one batch to trace it with",
            tries="return (model, example_inputs)",
        )
    return made


def _from_config(path: Path, device: str = "meta") -> tuple[nn.Module, None]:
    """A causal language model, on the meta device without weights, without a cache."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise CompileError(f"cannot read {path}", why=str(error), tries="pip install transformers") from error
    if not path.is_file():
        raise CompileError(f"there is no file {path}", tries="the path of a transformers config.json")
    config = AutoConfig.from_pretrained(str(path))
    config.use_cache = False
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config)
    assert isinstance(model, nn.Module)
    return model, None
