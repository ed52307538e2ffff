"""A folder of compiled programs: an entry is one file, written whole or not at all, and read only as it was written."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

LOG = logging.getLogger("ndcompile")

VARIABLE = "NDCOMPILE_CACHE"
"""The environment variable that says where programs are kept: a folder, `on`, or `off` (as without it)."""

LARGEST = 256 << 20
"""The bytes that a folder may hold; what was used longest ago goes first."""

FORMAT = "ndcompile program 1"
ABANDONED = 3600.0
"""Seconds after which a file that was not finished is nobody's."""


@dataclass(frozen=True)
class Store:
    """The entries of one folder, which is made when something is written."""

    folder: Path
    largest: int = LARGEST

    def read(self, key: str) -> str | None:
        """The text of an entry; None where there is none, or where it is not what was written: that one is removed."""
        path = self._path(key)
        try:
            if path.stat().st_uid != os.getuid():
                LOG.warning("%s is another user's, and is not read", path)
                return None
            head, _, text = path.read_text(errors="replace").partition("\n")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            LOG.warning("%s cannot be read: %s", path, error)
            return None
        if head != _head(key, text):
            LOG.warning("%s is not what was written, and is removed", path)
            path.unlink(missing_ok=True)
            return None
        with suppress(OSError):  # a folder that may only be read
            os.utime(path)
        return text

    def write(self, key: str, text: str) -> None:
        """Put an entry in its place at once, whoever else writes it, and remove the oldest where there are too many."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            unfinished = self.folder / f"{uuid.uuid4().hex}.unfinished"
            try:
                unfinished.write_text(f"{_head(key, text)}\n{text}")
                unfinished.replace(self._path(key))
            finally:
                unfinished.unlink(missing_ok=True)
            self._prune()
        except OSError as error:
            LOG.warning("the program is not kept in %s: %s", self.folder, error)

    @contextmanager
    def alone(self, key: str) -> Iterator[None]:
        """While it holds, no other process of this machine is in it for this key; a process that ends leaves it."""
        path = self.folder / f"{key}.lock"
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = path.open("a")
        except OSError:  # a folder that may only be read: then each compiles for itself
            yield
            return
        with file:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def _prune(self) -> None:
        now, entries = time.time(), []
        for path in self.folder.iterdir():
            with suppress(FileNotFoundError):  # another process prunes too
                found = path.stat()
                if path.suffix in (".unfinished", ".lock") and now - found.st_mtime > ABANDONED:
                    path.unlink()
                elif path.suffix == ".json":
                    entries.append((found.st_mtime, found.st_size, path))
        held = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries)[:-1]:
            if held <= self.largest:
                break
            path.unlink(missing_ok=True)
            held -= size


def _head(key: str, text: str) -> str:
    """The first line of an entry: its format, its key, and a hash of both and of the rest."""
    return f"{FORMAT} {key} {hashlib.sha256(f'{FORMAT} {key} {text}'.encode()).hexdigest()}"


def store_of(cache: str | Path | None) -> Store | None:
    """The store that is asked for by `cache=`, else by the environment; None where nothing is to be kept."""
    asked = os.environ.get(VARIABLE, "off") if cache is None else cache
    if str(asked) in ("", "off"):
        return None
    if str(asked) == "on":
        return Store(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ndcompile")
    return Store(Path(asked).expanduser())
