"""The peers' benchmark with one case more: `halves:tp=2` is `ndcompile:tp=2` with `halves=True`.

    torchrun --nproc-per-node 2 -m tests.gpu.halves FOLDER_OF_PEERS --cases ndcompile:tp=2,halves:tp=2

All flags behind the folder are those of its `peers.py`. The batch of a rank must be even.
"""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path
from unittest.mock import patch

import ndcompile as nd


def main() -> None:
    folder = Path(sys.argv.pop(1))
    sys.path.insert(0, str(folder))
    peers = importlib.import_module("peers")

    class Halves(peers.NdCompile):  # type: ignore[name-defined]
        """halves:<mesh spec>"""

        def build(self) -> None:
            with patch.object(nd, "parallelize", functools.partial(nd.parallelize, halves=True)):
                super().build()

    peers.CASES["halves"] = Halves
    peers.main()


if __name__ == "__main__":
    main()
