"""How often something was compiled, and what the log says."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from ndcompile import compiler
from ndcompile.capture import capture


@dataclass
class Counted:
    """Captures and lines of the log while `counted` held."""

    captures: int = 0
    log: list[str] = field(default_factory=list)


@contextmanager
def counted() -> Iterator[Counted]:
    """Count captures and note the log."""
    found = Counted()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.log.append(record.getMessage())

    def counting(*args: Any, **options: Any) -> Any:
        found.captures += 1
        return capture(*args, **options)

    handler, logger = Handler(), logging.getLogger("ndcompile")
    logger.addHandler(handler)
    try:
        with mock.patch.object(compiler, "capture", counting), mock.patch.object(logger, "level", logging.INFO):
            yield found
    finally:
        logger.removeHandler(handler)
