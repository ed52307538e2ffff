"""Random delays: what a rank computes must not depend on how fast the others, or its own streams, are."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ndcompile.runtime import private, symmetric, wires
from ndcompile.runtime.peers import Peers
from ndcompile.verify.domain import namespace

LONGEST = 0.003
"""Seconds of one delay at most."""

COPYING: tuple[tuple[Any, str], ...] = (
    (symmetric, "copy"), (symmetric.Symmetric, "barrier"), (Peers, "barrier"), (wires.Wire, "gather"),
    (wires.Wire, "scatter"),
)  # fmt: skip
"""What stands in the place of collectives where tensors travel by copies."""


@contextmanager
def delayed(seed: int, device: torch.device, longest: float = LONGEST) -> Iterator[list[int]]:
    """Wait for a random time before and after each start of a collective and each wait, each copy between ranks and
    each of their barriers. Gives a list of one number: how many were delayed. What is compiled runs as it is written
    meanwhile: for that there is `jittered`.
    """
    chance, count = random.Random(seed), [0]

    def late(action: Callable[..., Any]) -> Callable[..., Any]:
        def done(*args: Any, **kwargs: Any) -> Any:
            count[0] += 1
            _pause(chance, device, longest)
            result = action(*args, **kwargs)
            _pause(chance, device, longest)
            return result

        return done

    def run(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (late(op) if namespace(op) == "_c10d_functional" else op)(*args, **kwargs)

    with ExitStack() as stack:
        for owner, name in COPYING:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, late(getattr(owner, name)))
        stack.enter_context(private.dispatched(run))
        yield count


@contextmanager
def jittered(seed: int, device: torch.device, longest: float = LONGEST) -> Iterator[list[int]]:
    """Meanwhile another thread stalls this rank's GPU streams at random times, whatever code runs on them: the one
    that computes, or one of its own, so that kernels compete. Gives a list of one number: the stalls.
    """
    chance, count, over = random.Random(seed), [0], threading.Event()
    main, other = torch.cuda.current_stream(device), torch.cuda.Stream(device)

    def stall() -> None:
        torch.cuda.set_device(device)
        while not over.wait(chance.uniform(0.0, longest)):
            with torch.cuda.stream(main if chance.random() < 0.7 else other):
                private.spin(chance.uniform(0.0, longest))
            count[0] += 1

    thread = threading.Thread(target=stall, daemon=True)
    thread.start()
    try:
        yield count
    finally:
        over.set()
        thread.join()
        torch.cuda.synchronize(device)


def _pause(chance: random.Random, device: torch.device, longest: float) -> None:
    """A third of the time nothing, so that ranks run apart; on a GPU its stream waits, or the process, or both."""
    seconds = max(0.0, chance.uniform(-0.5, 1.0)) * longest
    if device.type == "cuda" and chance.random() < 0.7:
        private.spin(seconds)
    else:
        time.sleep(seconds)
