"""A stream beside the one that computes, on which weights and gradients move."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

KEPT = 2
"""How many uses may be on their way before the computing stream waits for the oldest, whose memory is then free."""


class Lane:
    """On a GPU a stream of high priority; on CPU its work is done at once.

    Work on it begins after all that the computing stream was given before, so what was freed there may be used here.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._lent: deque[tuple[torch.cuda.Event, Sequence[Tensor]]] = deque()

    @contextmanager
    def __call__(self, *lent: Tensor) -> Iterator[None]:
        """Do on the lane what stands inside. `lent` tensors of the computing stream are kept until it has waited."""
        if self._stream is None:
            yield
            return
        computing = self._computing(self._stream)
        self._stream.wait_stream(computing)
        with torch.cuda.stream(self._stream):
            yield
        if lent:
            self._lent.append((self._stream.record_event(), lent))
            if len(self._lent) > KEPT:
                computing.wait_event(self._lent.popleft()[0])

    def mark(self) -> torch.cuda.Event | None:
        """The end of what the lane has been given so far."""
        return None if self._stream is None else self._stream.record_event()

    def join(self, mark: torch.cuda.Event | None) -> None:
        """Let the computing stream wait for it."""
        if mark is not None:
            assert self._stream is not None, "a lane of a CPU has no marks"
            self._computing(self._stream).wait_event(mark)

    def join_all(self) -> None:
        """Let the computing stream wait for everything."""
        if self._stream is not None:
            self._computing(self._stream).wait_stream(self._stream)
            self._lent.clear()

    @staticmethod
    def _computing(lane: torch.cuda.Stream) -> torch.cuda.Stream:
        """The stream that computes on the lane's device: by its number, which torch looks up fastest."""
        return torch.cuda.current_stream(lane.device_index)
