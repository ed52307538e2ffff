"""Which sizes follow from others and from numbers that the text has: what windows, pads and factories make.

An op whose sizes are not here may still say of them by its rule: that its dims are others, or products of others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import fx

from ndcompile.rules.images import RESIZED
from ndcompile.rules.layers import made_whole
from ndcompile.rules.registry import RULES, arguments, op_name, operands

Texts = tuple[str | None, ...]
"""Of each dim what it is called; None where it is a symbol's."""

Pair = tuple[str | None, str | None]
"""Texts of one number."""

Given = Mapping[str, Any]
Made = Callable[[Given, list[Texts], Texts], Iterator[Pair]]
"""From an op's arguments, its operands' dims and its own."""


def made_sizes(node: fx.Node, dims: Mapping[str, Texts]) -> Iterator[tuple[str, str]]:
    """What is known of the sizes of an op's operands and result."""
    if node.op != "call_function" or node.name not in dims:
        return
    if is_written(node):
        sizes = zip(dims[node.name], node.meta["sizes"], strict=True)
        yield from ((text, str(size)) for text, size in sizes if text is not None)
    made = MADE.get(op_name(node.target))
    if made is not None:
        given = [dims[operand.name] for operand in operands(node)]
        for one, two in made(arguments(node), given, dims[node.name]):
            if one is not None and two is not None:
                yield one, two


def is_written(node: fx.Node) -> bool:
    """Whether its size stands in its arguments as a number, whatever other dims of that size are called."""
    if op_name(node.target).startswith("aten.arange"):
        given = arguments(node)
        ends = given.get("start", 0), given["end"]
        return all(isinstance(end, int) for end in ends) and ends != (0, node.meta["sizes"][0])
    return RULES.get(op_name(node.target)) is made_whole


def _each(values: Any, count: int, default: int) -> list[int]:
    """A number for each spatial dim, where one may stand for all."""
    listed = list(values) if isinstance(values, (list, tuple)) else [values] if isinstance(values, int) else []
    return [int(n) for n in (listed or [default])] * (count if len(listed) < 2 else 1)


def _window(
    size: str | None, kernel: str | int | None, pad: int, step: int, apart: int, up: bool = False
) -> str | None:
    """At how many places a window lies in a dim; with `up`, of those whose windows reach over the end too."""
    if size is None or kernel is None:
        return None
    span = f"{size} + {2 * pad} - {apart} * ({kernel} - 1) - 1"
    return f"-(-({span}) // {step}) + 1" if up else f"({span}) // {step} + 1"


def _convolution(given: Given, operands: list[Texts], made: Texts) -> Iterator[Pair]:
    """How many places a kernel has in each spatial dim; how channels are grouped."""
    source, kernel = operands[:2]
    count = len(kernel) - 2
    yield from _grouped(source[-count - 1], kernel[1], kernel[0], given["groups"])
    pads, steps, apart = (_each(given[name], count, default) for name, default in WINDOW)
    if given["padding"] == "same":
        yield from zip(source[-count:], made[-count:], strict=True)
        return
    for i in range(count):
        at, pad = i - count, 0 if given["padding"] == "valid" else pads[i]
        yield made[at], _window(source[at], kernel[at], pad, steps[i], apart[i])


def _grouped(channels: str | None, each: str | None, others: str | None, groups: int) -> Iterator[Pair]:
    if groups > 1:
        yield channels, f"{groups} * {each}"
        yield others, f"{groups} * ({others} // {groups})"


def _transposed_convolution(given: Given, operands: list[Texts], made: Texts) -> Iterator[Pair]:
    source, kernel = operands[:2]
    count = len(kernel) - 2
    yield from _grouped(made[-count - 1], kernel[1], kernel[0], given["groups"])
    pads, steps, apart = (_each(given[name], count, default) for name, default in WINDOW)
    more = _each(given["output_padding"], count, 0)
    for i in range(count):
        at = i - count
        if source[at] is not None:
            rest = f"{apart[i]} * ({kernel[at]} - 1) + {more[i] + 1 - 2 * pads[i]}"
            yield made[at], f"({source[at]} - 1) * {steps[i]} + {rest}"


WINDOW = (("padding", 0), ("stride", 1), ("dilation", 1))


def _pooled(count: int) -> Made:
    def made_by(given: Given, operands: list[Texts], made: Texts) -> Iterator[Pair]:
        kernel = _each(given["kernel_size"], count, 1)
        steps = _each(given["stride"], count, 0) if given["stride"] else kernel
        pads, apart = _each(given["padding"], count, 0), _each(given.get("dilation", 1), count, 1)
        for i in range(count):
            at = i - count
            yield made[at], _window(operands[0][at], kernel[i], pads[i], steps[i], apart[i], given["ceil_mode"])

    return made_by


def _to_size(argument: str) -> Made:
    """The last dims of the result are numbers that are written."""

    def made_by(given: Given, operands: list[Texts], made: Texts) -> Iterator[Pair]:
        size = given[argument]
        listed = size if isinstance(size, (list, tuple)) else [size]
        yield from _numbers(listed, made)

    return made_by


def _numbers(listed: Sequence[Any], made: Texts) -> Iterator[Pair]:
    for number, text in zip(listed, made[len(made) - len(listed) :], strict=True):
        if isinstance(number, int):
            yield text, str(number)


def _resized(given: Given, operands: list[Texts], made: Texts) -> Iterator[Pair]:
    """To a size, or by factors: one that is no whole number is a fraction of binary digits."""
    if given["output_size"] is not None:
        yield from _numbers(given["output_size"], made)
        return
    for i, factor in enumerate(given["scale_factors"], 2):
        times, parts = float(factor).as_integer_ratio()
        yield made[i], None if operands[0][i] is None else f"{operands[0][i]} * {times} // {parts}"


def _padded(given: Given, operands: list[Texts], made: Texts) -> Iterator[Pair]:
    amounts = given["pad"]
    for i in range(len(amounts) // 2):
        source, more = operands[0][-1 - i], amounts[2 * i : 2 * i + 2]
        if source is not None and all(isinstance(n, int) for n in more):
            yield made[-1 - i], f"{source} + ({sum(more)})"


def _windows(given: Given, operands: list[Texts], made: Texts) -> Iterator[Pair]:
    """`im2col`, and from the other side `col2im`."""
    planes, columns = (made, operands[0]) if "output_size" in given else (operands[0], made)
    kernel = _each(given["kernel_size"], 2, 1)
    pads, steps, apart = (_each(given[name], 2, default) for name, default in WINDOW)
    if "output_size" in given:
        yield from _numbers(given["output_size"], made)
    places = [_window(planes[i - 2], kernel[i], pads[i], steps[i], apart[i]) for i in range(2)]
    yield columns[-2], None if planes[-3] is None else f"{planes[-3]} * {kernel[0] * kernel[1]}"
    if None not in places:
        yield columns[-1], f"({places[0]}) * ({places[1]})"


def _cut_in_windows(given: Given, operands: list[Texts], made: Texts) -> Iterator[Pair]:
    at = given["dimension"] % len(operands[0])
    yield made[-1], str(given["size"])
    yield made[at], _window(operands[0][at], given["size"], 0, given["step"], 1)


def _by_group(given: Given, operands: list[Texts], made: Texts) -> Iterator[Pair]:
    channels = operands[0][1]
    yield channels, f"{given['num_groups']} * ({channels} // {given['num_groups']})"


def _gates(count: int, first: int) -> Made:
    """Rows of weights for each gate; the weights of the input are the operand `first`, those of the state follow."""

    def made(given: Given, operands: list[Texts], made: Texts) -> Iterator[Pair]:
        yield operands[first][0], f"{count} * {operands[first + 1][1]}"

    return made


MADE: dict[str, Made] = {
    **{f"aten.conv{n}d.{overload}": _convolution for n in (1, 2, 3) for overload in ("default", "padding")},
    "aten.conv_transpose1d.default": _transposed_convolution,
    "aten.conv_transpose2d.input": _transposed_convolution,
    "aten.conv_transpose3d.input": _transposed_convolution,
    **{f"aten.{kind}_pool{n}d.default": _pooled(n) for kind in ("max", "avg") for n in (1, 2, 3)},
    **{f"aten.max_pool{n}d_with_indices.default": _pooled(n) for n in (2, 3)},
    **{f"aten.adaptive_{kind}_pool{n}d.default": _to_size("output_size") for kind in ("max", "avg") for n in (1, 2, 3)},
    **{f"aten.max_unpool{n}d.default": _to_size("output_size") for n in (2, 3)},
    "aten.pad.default": _padded,
    "aten.constant_pad_nd.default": _padded,
    "aten.im2col.default": _windows,
    "aten.col2im.default": _windows,
    "aten.unfold.default": _cut_in_windows,
    "aten.group_norm.default": _by_group,
    **{f"aten.{name}.vec": _resized for name in RESIZED},
    "runtime.lstm": _gates(4, 3),
    "runtime.gru": _gates(3, 2),
    "runtime.rnn_tanh": _gates(1, 2),
    "runtime.rnn_relu": _gates(1, 2),
}  # fmt: skip
