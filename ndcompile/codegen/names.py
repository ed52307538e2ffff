"""What variables of an emitted module are called, and its blocks for people."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping

from torch import fx

from ndcompile.rules.registry import op_name

RESERVED = frozenset(keyword.kwlist) | frozenset(
    "torch F self b s w rng data MESH Block Root abs pow sum max min all any slice int float bool list dict len range "
    "input type id iter next map filter zip str repr hash dir vars print eval exec open set tuple round sorted".split()
)

RUNTIME = frozenset(
    "replicate invariant shard partial shard_invariant partial_invariant all_gather all_gather_invariant all_to_all "
    "in_order pad all_reduce all_reduce_invariant reduce_scatter embedding cross_entropy dropout attention "
    "attention_with_dropout context_attention arange fold scale_gradient grouped_linear histogram literal "
    "uniform batch_norm moving_average lstm gru rnn_tanh rnn_relu convolve running_sum start once in_halves "
    "with_gradient_of".split()
)
"""What emitted modules call of the runtime."""


MEMBERS = frozenset("weights blocks classes forward compute gathered block list buffer update compile".split())
"""What emitted classes have, and no further function of theirs may be called."""


def value_name(node: fx.Node) -> str:
    """A layer's result is called as the layer, another op's as the op."""
    base = op_name(node.target).split(".")[1] if node.op == "call_function" else node.name
    if "move" in node.meta or "data_axes" in node.meta:
        origin = node.args[0]
        assert isinstance(origin, fx.Node)
        return value_name(origin) if origin.op == "call_function" and not origin.meta.get("bucket") else "part"
    if "called" in node.meta:
        return str(node.meta["called"])
    module = node.meta.get("module") or ""
    if base in ("linear", "embedding", "layer_norm", "rms_norm") and module:
        parts = module.split(".")
        return identifier("_".join(parts[-2:]) if parts[-1].isdigit() and len(parts) > 1 else parts[-1])
    return {
        "scaled_dot_product_attention": "attended", "attention_with_dropout": "attended", "attention": "attended",
        "cross_entropy": "losses", "sum": "total", "div": "loss" if not node.meta["shape"] else "ratio",
        "getitem": "item", "slice": "cut", "pow": "power", "__and__": "both", "index": "picked", "arange": "numbers",
        "embedding": "embedded", "pad": "padded", "convolve": "convolved", "running_sum": "running",
        "eye": "identity", "with_gradient_of": "with_gradient",
    }.get(base, identifier(base.strip("_")))  # fmt: skip


def identifier(text: str) -> str:
    text = re.sub(r"\W+", "_", text).strip("_") or "value"
    return f"m{text}" if text[0].isdigit() else text


def fresh(base: str, used: set[str]) -> str:
    name, number = base, 2
    if base in RESERVED | RUNTIME:
        base = name = base + "_"
    while name in used:
        name, number = f"{base}_{number}", number + 1
    used.add(name)
    return name


def block_range(blocks: list[str]) -> str:
    """The blocks of a class, for people: `layers.0, 2 … 24`."""
    texts = []
    for path, start, stop, step in _slices(blocks):
        last = start + (stop - 1 - start) // step * step
        middle = f", {start + step}" if step > 1 and start + step < last else ""
        texts.append(f"{path}.{start}{middle} … {last}" if last > start else f"{path}.{start}")
    return ", ".join(texts)


def block_table(rows: Mapping[str, str]) -> list[tuple[str, str]]:
    """Blocks of one class in one list as `path[start:stop:step]`, where they are at even distances."""
    table = []
    for name in dict.fromkeys(rows.values()):
        for path, start, stop, step in _slices([block for block, of in rows.items() if of == name]):
            table.append((f"{path}[{start}:{stop}{f':{step}' if step > 1 else ''}]", name))
    return table


def _slices(blocks: list[str]) -> list[tuple[str, int, int, int]]:
    """Paths of lists with start, stop and step."""
    found: list[tuple[str, int, int, int]] = []
    listed = {(block.rpartition(".")[0], int(block.rpartition(".")[2])) for block in blocks}
    for path, number in sorted(listed):
        if found and found[-1][0] == path:
            _, start, stop, step = found[-1]
            gap = number - (stop - 1)
            if gap > 0 and (start == stop - 1 or gap == step):
                found[-1] = (path, start, number + 1, gap)
                continue
        found.append((path, number, number + 1, 1))
    return found
