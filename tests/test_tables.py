"""What the command line shows of a program."""

import torch

from ndcompile.listing import Collective, amount, block_title, grouped
from ndcompile.tables import class_source


def gather(block: str | None, side: str, size: int) -> Collective:
    return Collective(("tp",), "all_gather", side, size, torch.float32, "module", "model.py:1", block)


def test_equal_blocks_are_one_row_and_what_is_outside_stays_apart():
    found = [gather(block, "forward", 8) for block in ("blocks.0", "blocks.1", None)]
    counts = {("tp", "all_gather"): {"forward": (1, 8)}}
    assert grouped(found) == [(["blocks.0", "blocks.1"], counts), (["outside blocks"], counts)]


def test_bytes_of_a_side_add_up():
    found = [gather("b", "forward", 8), gather("b", "forward", 4), gather("b", "backward", 2)]
    assert grouped(found) == [(["b"], {("tp", "all_gather"): {"forward": (2, 12), "backward": (1, 2)}})]


def test_a_row_of_blocks_says_its_number():
    assert block_title(["a.0"]) == "a.0"
    assert block_title(["a.0", "a.1", "a.2"]) == "a.0 … a.2 (each of 3)"


def test_amounts_are_for_people():
    assert [amount(n) for n in (12, 1536, 3 * 2**20)] == ["12 B", "1.5 KiB", "3.0 MiB"]


def test_the_source_of_one_class():
    source = "import x\n\n\nclass A:\n    a = 1\n\n\nclass BlockOf2(Block):\n    b = 2  # tp\n\n\nc = 3\n"
    assert class_source(source, "Block") == "class BlockOf2(Block):\n    b = 2  # tp"
