"""What holds for every test: programs that the user keeps are neither read nor written."""

from __future__ import annotations

import os

os.environ.pop("NDCOMPILE_CACHE", None)
