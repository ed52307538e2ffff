"""One capture for all meshes, of which it knows nothing: it is most of a compilation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from torch import nn

from ndcompile.capture import Captured, capture
from ndcompile.inputs import Inputs
from ndcompile.pipeline import copied


@contextmanager
def captured_once(held: dict[Any, Captured] | None = None, *key: object) -> Iterator[None]:
    """Compilations inside capture a model once for all that `key`, its type and the options tell apart, in `held`."""
    found = {} if held is None else held

    def copies(model: nn.Module, example: Inputs, **options: Any) -> Captured:
        known = (*key, type(model), repr(options))
        if known not in found:
            found[known] = capture(model, example, **options)
        return replace(found[known], graph=copied(found[known].graph))

    with patch("ndcompile.compiler.capture", copies):
        yield
