"""The README tells the truth."""

import re
from pathlib import Path

from ndcompile.demo.train import Settings

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_excerpt_is_what_the_demo_emits():
    (excerpt,) = re.findall(r"```python\n(class DecoderBlock.*?)```", README, re.DOTALL)
    emitted = str(Settings().compiled())
    at = 0
    for line in excerpt.splitlines():
        if line.strip() not in ("", "..."):
            at = emitted.find(line + "\n", at)
            assert at >= 0, f"not emitted, or not in this order: {line}"
