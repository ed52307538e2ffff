"""Bugs planted in an emitted text, one at a time: an operator at every site where it applies."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ndcompile.mesh import KINDS, MeshSpec
from ndcompile.placement import BY_NAME, COLLECTIVES, REDUCING
from ndcompile.rules.registry import BY_INDEX
from ndcompile.verify.calls import BLOCK, KEY, LOST, ROUND, VALUE, WAY, recalled
from ndcompile.verify.reorder import BUCKET, EVERYWHERE, HERE, Reordered, reordered
from ndcompile.verify.sites import Site


@dataclass(frozen=True)
class Mutant:
    """A text that differs from the program's in one place."""

    operator: str
    line: int
    before: str
    after: str
    source: str

    def __str__(self) -> str:
        return f"{self.operator}   line {self.line}   {self.before} → {self.after}"


Operator = Callable[[Site], list[str]]


def _drop(site: Site) -> list[str]:
    return [site.first] if site.row in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "first") else []


def _no_reduction_back(site: Site) -> list[str]:
    return [site.first] if site.name == "replicate" else []


def _unchanged_back(site: Site) -> list[str]:
    row = BY_NAME.get(site.name)
    back = row is not None and row.backward != "identity"
    return [f"wrong.unchanged_back({site.name}, {site.arguments()})"] if back else []


def _lost_gradient(site: Site) -> list[str]:
    """The right value, from which nothing flows back: as of a loss whose gradient is dropped."""
    return [f"{site.text}.detach()"] if site.name in BY_NAME else []


def _same_forward(site: Site) -> list[str]:
    if site.name not in BY_NAME:
        return []
    row = BY_NAME[site.name]
    twins = [other for other in BY_NAME.values() if other.forward == row.forward and other.source != row.source]
    twins += [other for other in BY_NAME.values() if other.forward == row.forward and other.target != row.target]
    names = dict.fromkeys(t.name for t in twins if t.name != site.name)
    return [f"runtime.{name}({site.arguments()})" for name in names]


def _gather_own(site: Site) -> list[str]:
    return [f"wrong.gather_own({site.arguments()})"] if site.row == "all_gather" else []


def _slice(site: Site) -> list[str]:
    return [f"wrong.shard_of_sum_of_one({site.arguments()})"] if site.row == "reduce_scatter" else []


def _twice(site: Site) -> list[str]:
    if site.row not in REDUCING and site.name != "replicate":
        return []
    if site.name == "replicate":
        return [f"wrong.double_back({site.text}, {site.axis})"]
    return [site.text.replace(site.first, f"runtime.all_reduce({site.first}, {site.axis})", 1)]


def _mean(site: Site) -> list[str]:
    return [f"({site.text} / {site.axis}.size)"] if site.row in REDUCING else []


def _maximum(site: Site) -> list[str]:
    """A sum becomes a maximum or minimum, and either of these a sum."""
    if site.row != "all_reduce" or len(site.call.args) > 2:
        return []
    others = ("sum",) if site.keyword("op") else ("max", "min")
    return [f"{site.name}({site.arguments(op=repr(op))})" for op in others]


def _other_axis(site: Site) -> list[str]:
    return [site.with_axis(other) for other in site.others()] if site.axis else []


def _wider(site: Site) -> list[str]:
    if len(site.mesh.names) < 2 or (site.row != "all_reduce" and site.name != "replicate"):
        return []
    return [site.with_axis("MESH[" + ", ".join(map(repr, site.mesh.names)) + "]")]


def _narrower(site: Site) -> list[str]:
    if site.row != "all_reduce" or site.axis is None or site.axis in [n.replace(".", "_") for n in site.mesh.names]:
        return []
    return [site.with_axis(name.replace(".", "_")) for name in site.mesh.names]


def _scale(site: Site) -> list[str]:
    if site.name == "scale_gradient":
        return [site.first]
    return [f"({site.text} * 2)"] if site.row in REDUCING or site.name in ("replicate", "embedding") else []


def _order(site: Site) -> list[str]:
    if site.row == "all_gather":
        return [f"wrong.turned({site.text}, {site.axis}, {site.keyword('dim')})"]
    if site.row in ("reduce_scatter", "chunk"):
        return [f"{site.name}(wrong.turned({site.first}, {site.axis}, {site.keyword('dim')}), {site.arguments(1)})"]
    if site.row == "all_to_all":
        return [f"wrong.turned({site.text}, {site.axis}, {site.keyword('source') or site.keyword('dim')})"]
    return []


def _other_dim(site: Site) -> list[str]:
    found = []
    for word in ("dim", "source", "target"):
        value = site.keyword(word)
        if value is not None and site.name in BY_NAME:
            found += [f"{site.name}({site.arguments(**{word: str(d)})})" for d in range(3) if str(d) != value]
    return found


ALONG = ("convolve", "running_sum")
"""What looks along a sequence."""

OFFSETS = ("shard", "shard_invariant", "pad", "embedding", "cross_entropy", "arange", *ALONG)


def _alone(site: Site) -> list[str]:
    if site.name not in ALONG or site.axis is None:
        return []
    return [f"{site.name}({site.arguments(axis=None)})", f"{site.name}({site.arguments(balanced='False')})"]


def _offset(site: Site) -> list[str]:
    if site.name not in OFFSETS or site.axis is None:
        return []
    return [site.with_axis(f"wrong.{which}({site.axis})") for which in ("first_rank", "next_rank")]


def _local_size(site: Site) -> list[str]:
    size = site.keyword("size")
    if size is None or site.name not in (*BY_NAME, "embedding", "cross_entropy"):
        return []
    return [f"{site.name}({site.arguments(size=f'({size}) // {site.axis}.size')})"]


def _even(site: Site) -> list[str]:
    return [f"{site.name}({site.arguments(size=None)})"] if site.keyword("size") is not None else []


def _unwaited(site: Site) -> list[str]:
    if site.how == "start" and site.row in COLLECTIVES:
        return [f"wrong.unwaited_half({site.name}, {site.arguments()})"]
    return [f"wrong.unwaited({site.first}, {site.axis})"] if site.name.startswith("all_reduce") else []


def _late(site: Site) -> list[str]:
    return [f"wrong.late({site.first}, {site.axis})"] if site.name.startswith("all_reduce") else []


def _whole(site: Site) -> list[str]:
    """A value of which each rank should take its part, a mask or positions, and of which it takes all."""
    if site.name == "arange" and site.axis is not None:
        return [site.with_axis("None")]
    return [site.first] if site.row == "chunk" else []


def _cast_down(site: Site) -> list[str]:
    if site.row not in REDUCING:
        return []
    return [site.text.replace(site.first, f"wrong.low({site.first})", 1)]


def _seeds(site: Site) -> list[str]:
    shards = site.keyword("shards")
    if f"runtime.{site.name}" not in BY_INDEX or shards is None:
        return []
    found = [f"{site.name}({site.arguments(shards='{}', sizes=None)})"] if shards != "{}" else []
    for name in site.mesh.names:
        if name.replace(".", "_") not in shards:
            extra = shards[:-1] + (", " if shards != "{}" else "") + f"1: {name.replace('.', '_')}}}"
            found.append(f"{site.name}({site.arguments(shards=extra)})")
    return found


def _not_reduced(site: Site) -> list[str]:
    """A parameter whose gradient one axis does not reduce."""
    reduce = site.keyword("reduce")
    if site.name != "weight" or reduce is None:
        return []
    axes = ast.literal_eval(reduce)
    return [f"weight({site.arguments(reduce=repr(tuple(b for b in axes if b != a)))})" for a in axes]


def _reduced_more(site: Site) -> list[str]:
    """A parameter whose gradient is summed over an axis that holds equal gradients."""
    if site.name != "weight":
        return []
    gather, reduce = (site.keyword(k) for k in ("gather", "reduce"))
    axes = ast.literal_eval(reduce) if reduce else ()
    known = {*axes, *(ast.literal_eval(gather) if gather else {})}
    free = [n for n in site.mesh.names if n not in known]
    return [f"weight({site.arguments(reduce=repr((*axes, n)))})" for n in free]


def _gather_dim(site: Site) -> list[str]:
    gather = site.keyword("gather") if site.name == "weight" else None
    if gather is None:
        return []
    dims = ast.literal_eval(gather)
    return [f"weight({site.arguments(gather=repr(dims | {a: 1 - d}))})" for a, d in dims.items() if d in (0, 1)]


def _gather_axis(site: Site) -> list[str]:
    gather = site.keyword("gather") if site.name == "weight" else None
    if gather is None:
        return []
    dims = ast.literal_eval(gather)
    swaps = [(a, b) for a in dims for b in site.mesh.names if b not in dims and site.mesh.size(b) == site.mesh.size(a)]
    return [
        f"weight({site.arguments(gather=repr({b if k == a else k: d for k, d in dims.items()}))})" for a, b in swaps
    ]


OPERATORS: dict[str, Operator] = {
    "drop a collective": _drop,
    "drop the sum of a gradient": _no_reduction_back,
    "a conversion's backward is the identity": _unchanged_back,
    "a gradient is lost": _lost_gradient,
    "another conversion of the same forward": _same_forward,
    "gather own shard": _gather_own,
    "reduce-scatter becomes a slice": _slice,
    "reduce twice": _twice,
    "sum becomes mean": _mean,
    "sum becomes max or min": _maximum,
    "another axis of equal size": _other_axis,
    "a wider group": _wider,
    "a narrower group": _narrower,
    "a wrong scale": _scale,
    "parts in another order": _order,
    "another dim": _other_dim,
    "offset zero, or another rank's": _offset,
    "a chunk without its neighbours": _alone,
    "local size for global": _local_size,
    "uneven parts as even ones": _even,
    "drop a wait": _unwaited,
    "delay a wait": _late,
    "every rank takes the whole": _whole,
    "cast down before a reduction": _cast_down,
    "seeds equal on shards, or unequal on replicas": _seeds,
    "a parameter's gradient not reduced on an axis": _not_reduced,
    "a parameter's gradient reduced on one more axis": _reduced_more,
    "a parameter gathered on another dim": _gather_dim,
    "a parameter gathered over another axis": _gather_axis,
}
"""What a call becomes under each operator: nothing where it does not apply."""

REPLACED: dict[str, tuple[tuple[str, str], ...]] = {
    "padding counted": (("!= -100", "!= -101"), ("ignore_index=-100", "ignore_index=-101")),
    "a local count for a global one": tuple((f" * {a}.size", "") for a in (*KINDS, "data")),
    "local size in place of a global one": tuple((f" // {a}.size", "") for a in KINDS),
    "a mask that is not causal": ((", 0.0, True", ", 0.0, False"), ("causal=True", "causal=False")),
    "two chunks as one part": ((", balanced=True", ""), (", balanced_target=True", "")),
    "backward recomputes from other values": (("@recomputed", "@wrong.recomputed"),),
    "one half of a batch used twice": (("@in_halves", "@wrong.first_half_twice"),),
}
"""Operators on what is no call: pieces of text, each occurrence a site."""


ORDERS = (HERE, EVERYWHERE, BUCKET)
"""Operators on several lines."""

CALLS = (BLOCK, WAY, ROUND, LOST, VALUE, KEY)
"""Operators on what the root calls."""


def mutants(source: str, mesh: MeshSpec) -> Iterator[Mutant]:
    """Every operator at every site of a text."""
    lines, tree = source.splitlines(keepends=True), ast.parse(source)
    yield from (_in_order(lines, change) for change in reordered(tree))
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        site = Site.of(call, mesh)
        if site is None:
            continue
        for title, operator in OPERATORS.items():
            for text in dict.fromkeys(operator(site)):
                if text != site.text:
                    yield _mutant(title, lines, call.lineno, call.col_offset, call.end_col_offset or 0, text)
    for title, pieces in REPLACED.items():
        for number, line in enumerate(lines, 1):
            code = line.split("  # ")[0]
            for old, new in pieces:
                at = code.find(old)
                while at >= 0:
                    yield _mutant(title, lines, number, at, at + len(old), new)
                    at = code.find(old, at + 1)
    for other in recalled(tree):
        place = other.at.lineno, other.at.col_offset, other.at.end_col_offset or 0
        yield _mutant(other.operator, lines, *place, other.text)


def _in_order(lines: list[str], change: Reordered) -> Mutant:
    changed = [*lines[: change.first - 1], *change.lines, *lines[change.last :]]
    return Mutant(change.operator, change.first, change.before, change.after, _importing(changed))


def _mutant(operator: str, lines: list[str], number: int, start: int, stop: int, text: str) -> Mutant:
    """The text with one piece of a line replaced; columns are counted in bytes, as Python's are."""
    line = lines[number - 1].encode()
    changed = [*lines]
    changed[number - 1] = (line[:start] + text.encode() + line[stop:]).decode()
    return Mutant(operator, number, line[start:stop].decode(), text, _importing(changed))


def _importing(lines: list[str]) -> str:
    """The text with what the wrong calls need; no line gets another number."""
    imports = "import torch; from ndcompile import runtime; from ndcompile.verify import wrong\n"
    at = lines.index("import torch\n")
    return "".join([*lines[:at], imports, *lines[at + 1 :]])
