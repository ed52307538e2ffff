"""Collectives of an emitted text in another order: on all ranks, and on one rank alone, where the others would hang."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ndcompile.placement import BY_NAME, COLLECTIVES

HERE = "two collectives in another order on one rank"
EVERYWHERE = "two collectives in another order on all ranks"
BUCKET = "a bucket's parameters in another order on one rank"


@dataclass(frozen=True)
class Reordered:
    """The lines from `first` to `last` (counted from 1, both included) become these."""

    operator: str
    first: int
    last: int
    lines: tuple[str, ...]
    before: str
    after: str


def reordered(tree: ast.Module) -> Iterator[Reordered]:
    """Each collective behind the next one of its function, with what needs its result; each bucket turned around."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield from _in_function(node)
        if isinstance(node, ast.ClassDef):
            yield from _in_class(node)


def _in_function(function: ast.FunctionDef) -> Iterator[Reordered]:
    places = [i for i, statement in enumerate(function.body) if _communicates(statement)]
    for i, j in itertools.pairwise(places):
        block = function.body[i : j + 1]
        other = _later(block)
        if other is None:
            continue
        texts = [[ast.unparse(s) for s in order] for order in (other, block)]
        span = block[0].lineno, block[-1].end_lineno or block[-1].lineno
        named = f"{ast.unparse(block[0])}; {ast.unparse(block[-1])}", ast.unparse(block[-1])
        indent = " " * block[0].col_offset
        yield Reordered(EVERYWHERE, *span, tuple(f"{indent}{line}\n" for line in texts[0]), *named)
        branches = ["if MESH.rank == 0:", *(f"    {line}" for line in texts[0])]
        branches += ["else:", *(f"    {line}" for line in texts[1])]
        yield Reordered(HERE, *span, tuple(f"{indent}{line}\n" for line in branches), *named)


def _communicates(statement: ast.stmt) -> bool:
    """Whether it sends something, forward or backward."""
    calls = [n for n in ast.walk(statement) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    names = {_called(n): {k.arg for k in n.keywords} for n in calls}
    rows = [BY_NAME[name] for name in names if name in BY_NAME]
    inside = "axis" in names.get("cross_entropy", ())
    sends = inside or any({row.forward, row.backward} & COLLECTIVES for row in rows)
    return sends and isinstance(statement, ast.Assign)


def _called(call: ast.Call) -> str:
    """The function's name, or that of the conversion that a half starts."""
    of_half = isinstance(call.func, ast.Name) and call.func.id in ("start", "once")
    named = call.args[0] if of_half else call.func
    return named.id if isinstance(named, ast.Name) else ""


def _later(block: Sequence[ast.stmt]) -> list[ast.stmt] | None:
    """The block with its first statement, and all that must stay behind it, after its last; None if that must too."""
    behind = [block[0]]
    ahead: list[ast.stmt] = []
    for statement in block[1:]:
        (behind if any(_bound(earlier, statement) for earlier in behind) else ahead).append(statement)
    return None if behind[-1] is block[-1] else ahead + behind


def _bound(earlier: ast.stmt, later: ast.stmt) -> bool:
    """Whether two statements may not change places: one writes what the other reads or writes."""
    (reads, writes), (then_reads, then_writes) = _names(earlier), _names(later)
    return bool(writes & (then_reads | then_writes) or reads & then_writes)


def _names(statement: ast.stmt) -> tuple[set[str], set[str]]:
    names = [n for n in ast.walk(statement) if isinstance(n, ast.Name)]
    written = {n.id for n in names if isinstance(n.ctx, ast.Store)}
    return {n.id for n in names if isinstance(n.ctx, ast.Load)}, written


def _in_class(node: ast.ClassDef) -> Iterator[Reordered]:
    for statement in node.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "weights":
            end = statement.end_lineno or statement.lineno
            turned = f"{' ' * statement.col_offset}weights = wrong.other_order(weights, MESH.rank == 0)\n"
            yield Reordered(BUCKET, end + 1, end, (turned,), f"weights of {node.name}", "turned around on rank 0")
