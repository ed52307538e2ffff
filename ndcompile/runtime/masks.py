"""Masks of attention by name: which keys a query may attend to, and how far that reaches."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mask:
    """The keys that every given part lets through; queries and keys are counted from the same first token.

    causal      `key <= query`, or a key in `prefix`
    window      `abs(query - key) < window`
    chunk       `query // chunk == key // chunk`
    prefix      the first so many keys, or those where a `[b, t]` is not 0; widens `causal`
    padding     keys where a `[b, t]` is not 0
    documents   `documents[:, query] == documents[:, key]`, of a `[b, s]`

    The tensors are bool or integer. In a graph the fields hold nodes in their place.
    """

    causal: bool = False
    window: int | None = None
    chunk: int | None = None
    prefix: Any = None
    padding: Any = None
    documents: Any = None

    @property
    def parts(self) -> dict[str, Any]:
        """What is given, by name."""
        default = Mask()
        return {f.name: v for f in fields(self) if (v := getattr(self, f.name)) is not getattr(default, f.name)}

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.parts)

    @property
    def of_keys(self) -> bool:
        """Whether all queries see the same keys."""
        return self.names <= {"padding"}

    def on(self, queries: tuple[int, int], keys: tuple[int, int]) -> Mask:
        """The same mask on some queries and keys (from and up to), without the parts that let all of them through."""
        causal = self.causal and keys[1] - 1 > queries[0]
        furthest = max(queries[1] - 1 - keys[0], keys[1] - 1 - queries[0])
        window = None if self.window is None or furthest < self.window else self.window
        ends = min(queries[0], keys[0]), max(queries[1], keys[1]) - 1
        chunk = None if self.chunk is None or ends[0] // self.chunk == ends[1] // self.chunk else self.chunk
        return replace(self, causal=causal, window=window, chunk=chunk, prefix=self.prefix if causal else None)

    def reach(self, start: int, stop: int, length: int) -> tuple[int, int]:
        """The keys, from and up to, of which the queries `start` … `stop - 1` may see any; at least the own ones."""
        low, high = 0, length
        if self.causal and not isinstance(self.prefix, Tensor):
            high = min(max(stop, self.prefix or 0), length)
        if self.window is not None:
            low, high = max(low, start - self.window + 1), min(high, stop - 1 + self.window)
        if self.chunk is not None:
            low = max(low, start // self.chunk * self.chunk)
            high = min(high, -(-stop // self.chunk) * self.chunk)
        return low, high

    def allowed(self, queries: tuple[int, int], keys: tuple[int, int], device: torch.device) -> Tensor | None:
        """Bool, to be broadcast to `[b, h, queries, keys]`; None for the mask without parts."""
        q, k = torch.arange(*queries, device=device)[:, None], torch.arange(*keys, device=device)
        found: list[Tensor] = []
        if self.causal:
            found.append(self._causal(q, k, keys))
        if self.window is not None:
            found.append((q - k).abs() < self.window)
        if self.chunk is not None:
            found.append(q // self.chunk == k // self.chunk)
        if self.padding is not None:
            found.append(_of_keys(self.padding, keys))
        if self.documents is not None:
            own, others = self.documents[:, slice(*queries)], self.documents[:, slice(*keys)]
            found.append(own[:, None, :, None] == others[:, None, None, :])
        if not found:
            return None
        whole = found[0]
        for part in found[1:]:
            whole = whole & part
        return whole

    def _causal(self, q: Tensor, k: Tensor, keys: tuple[int, int]) -> Tensor:
        if self.prefix is None:
            return k <= q
        shared = _of_keys(self.prefix, keys) if isinstance(self.prefix, Tensor) else k < self.prefix
        return (k <= q) | shared


def _of_keys(rows: Tensor, keys: tuple[int, int]) -> Tensor:
    return rows[:, None, None, slice(*keys)] != 0
