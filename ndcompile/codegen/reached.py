"""How long dims are at least: places in them are written as numbers, or are found by counting a sequence's entries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import fx

from ndcompile.rules.registry import arguments, op_name, operands

POSITIONS = 32
"""How long a dim stays of which a part as long as a sequence is taken, or a row for each place of one. Larger places
have a name.
"""

Given = Mapping[str, Any]
Text = Callable[..., str]


def reached(node: fx.Node, whole: Text, fraction: Text) -> Iterator[tuple[str, int]]:
    """Texts of dims of the op's first operand, and below which number each may not be."""
    ends = REACHED.get(op_name(node.target)) if node.op == "call_function" else None
    if ends is None:
        return
    source, given = operands(node)[0], arguments(node) | {"users": tuple(node.users)}
    for dim, end in ends(given):
        size = source.meta["sizes"][dim]
        if not isinstance(size, int):
            continue
        if isinstance(end, fx.Node):
            if counted := _counted(end):
                yield whole(source, dim), min(size, counted)
            continue
        end = min(end, size)
        if op_name(node.target) not in SLICES or fraction(source, dim, end) == str(end):
            yield whole(source, dim), abs(end)


def is_input(value: fx.Node) -> bool:
    """Whether the model's caller gives the value; a program may convert it first."""
    while "move" in value.meta:
        (value,) = value.all_input_nodes
    return value.meta.get("role") == "input"


def _counted(index: fx.Node) -> int:
    """How far whole numbers may reach that come from counting a sequence's entries; 0 for others."""
    seen, front, far = {index}, [index], 0
    while front:
        node = front.pop()
        if op_name(node.target).startswith(COUNTING):
            end = arguments(node).get("end")
            far = max(far, POSITIONS, end if isinstance(end, int) else 0)
        more = [n for n in node.all_input_nodes if n not in seen and not n.meta.get("grad", False)]
        front += more
        seen.update(more)
    return far


COUNTING = ("aten.arange", "aten.cumsum")


SLICES = ("aten.slice.Tensor", "aten.slice_scatter.default")
"""Ops whose text has a place as a part of the dim, where it is one."""


def _slice(given: Given) -> Iterator[tuple[int, Any]]:
    if given["end"] is not None:
        yield given["dim"], POSITIONS if isinstance(given["end"], fx.Node) else given["end"]


def _select(given: Given) -> Iterator[tuple[int, Any]]:
    index = given["index"]
    if isinstance(index, int):
        yield given["dim"], max(index + 1, -index)


def _unbind(given: Given) -> Iterator[tuple[int, Any]]:
    yield from ((given["dim"], user.args[1] + 1) for user in given["users"])


def _embedding(given: Given) -> Iterator[tuple[int, Any]]:
    yield 0, given["indices"] if not is_input(given["indices"]) else 1
    if given["padding_idx"] < POSITIONS:
        yield 0, given["padding_idx"] + 1


REACHED: dict[str, Callable[[Given], Iterator[tuple[int, Any]]]] = {
    **dict.fromkeys(SLICES, _slice),
    "aten.select.int": _select,
    "aten.unbind.int": _unbind,
    "aten.embedding.default": _embedding,
    "aten.topk.default": lambda given: iter([(given["dim"], given["k"])]),
    "aten.gather.default": lambda given: iter([(given["dim"], given["index"])]),
    "aten.index_select.default": lambda given: iter([(given["dim"], given["index"])]),
    "aten.index.Tensor": lambda given: ((dim, i) for dim, i in enumerate(given["indices"]) if i is not None),
}
"""Dims of an op's first operand, each with a place that it reaches to, or with the indices that are looked up there."""
