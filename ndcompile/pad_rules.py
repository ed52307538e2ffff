"""What each op does to pads: whether its result has at true places what it has without them, and what at the pads."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from ndcompile.pads import ANY, ON, ZERO, Followed, Pad, end_of, refused
from ndcompile.rules import pointwise, views
from ndcompile.rules.notation import Signature
from ndcompile.rules.registry import arguments, op_name, operands

# ---- ops that take each place by itself ------------------------------------------------------------------------------


def value_at_pads(node: fx.Node, name: str, bound: Signature, taken: dict[int, Pad], found: Followed) -> Pad:
    """What stands at the pads of a result; operands that are not in `taken` have no such dim."""
    base = name.split(".")[1]
    if base in LOOKUPS:
        return _looked_up(node, taken, found)
    if base in SPECIFIC:
        return SPECIFIC[base](node, taken)
    if bound.terms is not None and all(any(taken.get(i) == ZERO for i in term) for term in bound.terms):
        return ZERO
    every = [taken.get(i) for i in range(len(bound.operands))]
    if name in views.RULES and len(every) == 1:
        return taken[0]
    if name in pointwise.RULES and all(pad is not None and pad.number is not None for pad in every):
        return _evaluated(node, taken)
    fixed = [pad is not None and (pad.on or pad.number is not None) for pad in every]
    others = [value for i, value in enumerate(operands(node)) if every[i] is None]
    return ON if all(fixed) or (any(fixed) and all(map(_fixed, others)) and not _varies(every)) else ANY


def _varies(every: list[Pad | None]) -> bool:
    return ANY in every


def _evaluated(node: fx.Node, taken: dict[int, Pad]) -> Pad:
    """An op of numbers."""
    values = {value: torch.tensor(taken[i].number).to(value.meta["dtype"]) for i, value in enumerate(operands(node))}
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda value: values[value])
    target: Any = node.target
    kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "layout", "memory_format")}
    return Pad(float(target(*args, **kwargs)))


def _either(node: fx.Node, taken: dict[int, Pad]) -> Pad:
    """`where(c, a, b)`."""
    given, order = arguments(node), operands(node)
    condition = taken.get(0, ANY)
    if condition.number is None:
        return ANY
    chosen = given["self" if condition.number else "other"]
    return _operand(chosen, order, taken)


def _filled(node: fx.Node, taken: dict[int, Pad]) -> Pad:
    """`masked_fill(x, mask, value)`."""
    given, order = arguments(node), operands(node)
    mask = _operand(given["mask"], order, taken)
    if mask.number is None:
        return ANY
    return _operand(given["value" if mask.number else "self"], order, taken)


def _operand(value: Any, order: list[fx.Node], taken: dict[int, Pad]) -> Pad:
    if not isinstance(value, fx.Node):
        return Pad(float(value))
    return taken.get(order.index(value), ANY)


def _both(node: fx.Node, taken: dict[int, Pad]) -> Pad:
    """`a and b`, of truth values."""
    if any(pad == ZERO for pad in taken.values()):
        return ZERO
    return _evaluated(node, taken) if _known(node, taken) else ANY


def _either_of(node: fx.Node, taken: dict[int, Pad]) -> Pad:
    """`a or b`, of truth values."""
    if node.meta["dtype"] == torch.bool and any(pad.number for pad in taken.values()):
        return Pad(1)
    return _evaluated(node, taken) if _known(node, taken) else ANY


def _sum(node: fx.Node, taken: dict[int, Pad]) -> Pad:
    """A sum with minus infinity is that."""
    if any(pad.number == -math.inf for pad in taken.values()) and op_name(node.target).startswith("aten.add"):
        return Pad(-math.inf)
    if _known(node, taken):
        return _evaluated(node, taken)
    rest = [value for i, value in enumerate(operands(node)) if i not in taken]
    return ON if ANY not in taken.values() and all(map(_fixed, rest)) else ANY


def _known(node: fx.Node, taken: dict[int, Pad]) -> bool:
    return all(i in taken and taken[i].number is not None for i in range(len(operands(node))))


def _loss(node: fx.Node, taken: dict[int, Pad]) -> Pad:
    """A token that the loss ignores gives 0."""
    given = arguments(node)
    return ZERO if _operand(given["target"], operands(node), taken).number == given["ignore_index"] else ANY


def _dropped(node: fx.Node, taken: dict[int, Pad]) -> Pad:
    return ZERO if taken.get(0) == ZERO else ANY


SPECIFIC: dict[str, Callable[[fx.Node, dict[int, Pad]], Pad]] = {
    "where": _either, "masked_fill": _filled, "logical_and": _both, "__and__": _both, "bitwise_and": _both,
    "logical_or": _either_of, "__or__": _either_of, "bitwise_or": _either_of, "add": _sum, "sub": _sum,
    "cross_entropy": _loss, "dropout": _dropped,
}  # fmt: skip
"""Ops that may give one number though not all that they take is known."""

LOOKUPS = ("embedding", "index", "index_select", "gather")


def _looked_up(node: fx.Node, taken: dict[int, Pad], found: Followed) -> Pad:
    """Entries of a table: the number at the pads is one of its rows."""
    given = arguments(node)
    table = given["weight"] if "weight" in given else given["self"]
    for number, value in enumerate(operands(node)):
        if value is table or number not in taken:
            continue
        pad, rows = taken[number], table.meta["sizes"][given.get("dim", _first_index(given))]
        if pad.number is not None and isinstance(rows, int) and not -rows <= pad.number < rows:
            raise refused(node, f"{pad.number:.0f} would be looked up in a table of {rows}", "labels as an input")
        if pad.on:
            for dim in found.lengthened(node):
                found.limit(node.meta["sizes"][dim], rows, str(table.meta.get("name", table.name)))
    return ANY


def _first_index(given: Mapping[str, Any]) -> int:
    indices = given.get("indices")
    return next((i for i, x in enumerate(indices) if x is not None), 0) if isinstance(indices, (list, tuple)) else 0


# ---- ops that add places up ------------------------------------------------------------------------------------------


def require_nothing(node: fx.Node, base: str, bound: Signature, factor: str, taken: dict[int, Pad]) -> None:
    """The dim goes: pads must add nothing."""
    if base == "select" and arguments(node)["index"] >= 0:
        return
    if base == "slice" and (arguments(node)["start"] or 0) >= 0:
        return  # the first tokens
    if base in EXTREMES and taken[0].number == EXTREMES[base]:
        return
    if factor in bound.whole or bound.terms is None or not bound.carriers:
        raise refused(node, f"{base} looks at all places of the sequence, pads too", *MASKED)
    if not all(any(taken.get(i) == ZERO for i in term) for term in bound.terms):
        raise refused(node, "it adds up the places of the sequence, and pads are not 0 there", *MASKED)


MASKED = ("labels, or a mask that is multiplied in",)
EXTREMES = {"any": 0.0, "all": 1.0, "amax": -math.inf, "max": -math.inf, "logsumexp": -math.inf, "amin": math.inf}
"""With which number at the pads these ops do not see them."""


# ---- attention -------------------------------------------------------------------------------------------------------

ATTENTION = ("scaled_dot_product_attention", "attention", "attention_with_dropout")


def require_mask(node: fx.Node, found: Followed, bound: Signature) -> None:
    """No query sees a key at the end: by causality, by padding, or by a dense mask."""
    given = arguments(node)
    keys = operands(node)[1]
    if len(keys.meta["sizes"]) - 2 not in found.pads[keys]:
        return
    prefix = given.get("prefix")
    causal = given.get("is_causal") or given.get("causal")
    if causal and (prefix is None or _at_keys(prefix, found) == ZERO):
        return
    if _at_keys(given.get("padding"), found) == ZERO:
        return
    mask = given.get("mask", given.get("attn_mask"))
    unseen = Pad(-math.inf) if isinstance(mask, fx.Node) and mask.meta["dtype"].is_floating_point else ZERO
    if _at_keys(mask, found) == unseen:
        return
    raise refused(
        node, "tokens would attend to pads: it is not causal, and no mask keeps them out",
        "a mask of padding as an input (attention_mask)",
    )  # fmt: skip


def _at_keys(mask: Any, found: Followed) -> Pad | None:
    return found.pads[mask].get(len(mask.meta["sizes"]) - 1) if isinstance(mask, fx.Node) else None


# ---- ops along a sequence --------------------------------------------------------------------------------------------


def along(node: fx.Node, base: str, dim: int, taken: dict[int, Pad], found: Followed) -> Pad:
    """The op acts along the dim, which has pads before and after."""
    if base not in ALONG:
        raise refused(node, f"{base} acts along the sequence, and pads have no known effect on it")
    if base not in ANYWHERE and any(end_of(v.meta["sizes"][dim]) is None for v in _having(node, taken)):
        raise refused(node, "pads are not at the end of the dim, which joins several sequences")
    return ALONG[base](node, dim, taken)


def _having(node: fx.Node, taken: dict[int, Pad]) -> list[fx.Node]:
    return [value for i, value in enumerate(operands(node)) if i in taken]


def _sliced(node: fx.Node, dim: int, taken: dict[int, Pad]) -> Pad:
    """From a place on; where the end is cut, true tokens are behind it."""
    given = arguments(node)
    start = given["start"] or 0
    if not isinstance(start, int) or start < 0 or given.get("step", 1) != 1:
        raise refused(node, "it counts places from the end, where pads would be")
    length = given["self"].meta["sizes"][dim] - node.meta["sizes"][dim]
    return taken[0] if length == start else _behind(taken[0])


def _behind(pad: Pad) -> Pad:
    """What stands behind a new end that is before the old one."""
    return pad if pad.on else ANY


def _padded(node: fx.Node, dim: int, taken: dict[int, Pad]) -> Pad:
    """More places: what the model puts at the end must be what stands at the pads."""
    given, rank = arguments(node), len(node.meta["sizes"])
    pairs = given["pad"]
    _, right = pairs[2 * (rank - 1 - dim) : 2 * (rank - dim)] or (0, 0)
    value = float(given.get("value") or 0)
    if given.get("mode", "constant") != "constant" or (right > 0 and taken[0].number != value):
        raise refused(node, f"it puts {value:g} behind the last token, and pads are something else there")
    return taken[0] if right >= 0 else _behind(taken[0])


def _joined(node: fx.Node, dim: int, taken: dict[int, Pad]) -> Pad:
    if set(taken) != {len(operands(node)) - 1}:
        raise refused(node, "it puts something behind the last token")
    return taken[len(operands(node)) - 1]


def _differences(node: fx.Node, dim: int, taken: dict[int, Pad]) -> Pad:
    given = arguments(node)
    if given.get("append") is not None:
        raise refused(node, "it puts something behind the last token")
    return _behind(taken.get(0, ANY))


def _running(node: fx.Node, dim: int, taken: dict[int, Pad]) -> Pad:
    """A place takes those before it."""
    return _behind(taken[0])


def _shares(node: fx.Node, dim: int, taken: dict[int, Pad]) -> Pad:
    if taken[0].number != -math.inf:
        raise refused(node, "shares are of all places, and pads have one", "-inf at masked places before the softmax")
    return ZERO


def _convolved(node: fx.Node, dim: int, taken: dict[int, Pad]) -> Pad:
    given = arguments(node)
    if given["left"] < given["dilation"] * (given["weight"].meta["sizes"][2] - 1):
        raise refused(node, "a window reaches over the last token")
    return ANY


ALONG: dict[str, Callable[[fx.Node, int, dict[int, Pad]], Pad]] = {
    "slice": _sliced, "pad": _padded, "constant_pad_nd": _padded, "cat": _joined, "diff": _differences,
    "cumsum": _running, "running_sum": _running, "tril": _running, "triu": _running, "convolve": _convolved,
    "softmax": _shares, "_softmax": _shares,
}  # fmt: skip
"""Ops of which a place takes itself, what stands before it, or its neighbours."""

ANYWHERE = ("softmax", "_softmax")
"""Ops to which it is one where the pads are."""


# ---- what begins here ------------------------------------------------------------------------------------------------

FILLED = {"zeros": 0.0, "ones": 1.0}


def born(node: fx.Node, base: str, dim: int, found: Followed) -> Pad:
    """A dim that no operand has: of a factory, of something repeated, of a table that is cut to the length."""
    given = arguments(node)
    if base in FILLED:
        return Pad(FILLED[base])
    if base == "full" and not isinstance(given["fill_value"], fx.Node):
        return Pad(float(given["fill_value"]))
    if base == "arange":
        forwards = (
            all(isinstance(given.get(k, 0), (int, float)) for k in ("start", "step")) and given.get("step", 1) > 0
        )
        if not forwards:
            raise refused(node, "positions are counted from the end")
        return ON
    if base == "slice":
        found.limit(node.meta["sizes"][dim], given["self"].meta["sizes"][dim], _table(given["self"]))
        return ON if (given["start"] or 0) == 0 and _fixed(node) else ANY
    return ON if _fixed(node) else ANY


def _table(node: fx.Node) -> str:
    return str(node.meta.get("name") or node.name)


def _fixed(node: fx.Node) -> bool:
    """Whether no input and no parameter is in the value."""
    pending, seen = [node], set()
    while pending:
        value = pending.pop()
        if value in seen or "size" in value.meta:
            continue
        seen.add(value)
        if value.meta.get("role") in ("input", "parameter", "key"):
            return False
        pending += value.all_input_nodes
    return True


SHAPED = frozenset(
    "view reshape _unsafe_view expand unflatten arange zeros ones full uniform slice narrow split "
    "split_with_sizes".split()
)
"""Ops that take a length as the size of something."""


def refuse_length(node: fx.Node, found: Followed) -> None:
    """A number that depends on the length is another one with pads."""
    base = op_name(node.target).split(".")[1]
    lengths = [n for n in node.all_input_nodes if "shape" not in n.meta and found.longer(n.meta.get("size", 0))]
    inside = base in SHAPED and not (base == "full" and isinstance(arguments(node)["fill_value"], fx.Node))
    if lengths and not inside:
        size = lengths[0].meta["size"]
        raise refused(node, f"it computes with the length ({size}), which pads change: as a mean does", *MASKED)
