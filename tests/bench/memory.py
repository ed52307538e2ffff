"""What this process has held at most."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path


def largest() -> int:
    """Resident bytes, the most since this program started.

    Linux hands `ru_maxrss` down to a process from the one that started it, so there the kernel's own high-water mark is
    read.
    """
    if sys.platform == "linux":
        return 1024 * int(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
