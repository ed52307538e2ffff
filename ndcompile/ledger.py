"""A count of the memory that tensors hold, kept while torch's ops run."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from ndcompile.runtime import private

UNIT = 512
"""Bytes at whose multiples torch's allocator for GPUs gives memory."""


class Ledger:
    """Bytes of all storages that are alive, now and at most; each is counted once, however many tensors view it."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self._held: dict[int, weakref.ref[Any]] = {}

    def add(self, tensor: Tensor) -> int:
        """Count a tensor's storage, for as long as it lives; its bytes, or 0 where it is counted already."""
        storage, key = tensor.untyped_storage(), private.storage_id(tensor)
        if key is None or key in self._held:
            return 0
        size = rounded(storage.nbytes())
        self._held[key] = weakref.ref(storage, lambda _: self._drop(key, size))
        self.hold(size)
        return size

    def hold(self, size: int) -> None:
        self.now += size
        self.most = max(self.most, self.now)

    def _drop(self, key: int, size: int) -> None:
        del self._held[key]
        self.now -= size

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what every op of this thread gives, forward and backward."""

        def run(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            found = op(*args, **kwargs)
            for leaf in pytree.tree_leaves(found):
                if isinstance(leaf, Tensor):
                    self.add(leaf)
            return found

        with private.dispatched(run):
            yield


def rounded(size: int) -> int:
    return -(-size // UNIT) * UNIT
