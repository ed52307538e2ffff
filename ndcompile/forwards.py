"""Other `forward`s for classes, for a while."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(forwards: Mapping[Any, Any]) -> Iterator[None]:
    """While it holds, each class has the `forward` that is given for it; one that inherits its own inherits it again
    after it.
    """
    before = {cls: vars(cls).get("forward") for cls in forwards}
    for cls, forward in forwards.items():
        cls.forward = forward
    try:
        yield
    finally:
        for cls, forward in before.items():
            if forward is None:
                del cls.forward
            else:
                cls.forward = forward
