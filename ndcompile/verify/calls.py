"""The root of an emitted text with one call changed: of another block, in another way, with other values, or none."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from ndcompile.runtime.block import paths

BLOCK = "another block is called"
WAY = "a block is called in another way"
ROUND = "a round more or less"
LOST = "a block is not called"
VALUE = "another value is given to a block"
KEY = "the random numbers of another block"


@dataclass(frozen=True)
class Recalled:
    """The expression `at` becomes `text`."""

    operator: str
    at: ast.expr
    text: str


def recalled(tree: ast.Module) -> Iterator[Recalled]:
    """Each call of the root's forward, changed in each way that applies to it."""
    for root in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        known = _blocks(root)
        for forward in (f for f in root.body if isinstance(f, ast.FunctionDef) and f.name == "forward" and known):
            yield from _in_forward(forward, known)


def _in_forward(forward: ast.FunctionDef, known: dict[str, tuple[str, ...]]) -> Iterator[Recalled]:
    for node in ast.walk(forward):
        if not isinstance(node, ast.Call):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                yield from _lost(node.value)
            continue
        match ast.unparse(node.func):
            case "self.block":
                yield from _another_block(node, known)
                yield from _another_way(node, known[ast.literal_eval(node.args[0])])
            case "self.list":
                yield from _other_rounds(node, 1, 2)
                yield from _another_way(node, _ways_of_list(node, known))
            case "range":
                yield from _other_rounds(node, 0, 0)
            case "fold":
                yield Recalled(KEY, node, f"fold({ast.unparse(node.args[0])}, ({ast.unparse(node.args[1])}) + 1)")
            case _ if _is_a_block(node.func):
                yield from _other_values(node, _bound_before(forward, node))


def _blocks(root: ast.ClassDef) -> dict[str, tuple[str, ...]]:
    """The names of the classes of each block, by its path."""
    found: dict[str, tuple[str, ...]] = {}
    for line in root.body:
        if (
            isinstance(line, ast.Assign)
            and ast.unparse(line.targets[0]) == "blocks"
            and isinstance(line.value, ast.Dict)
        ):
            for place, kinds in zip(line.value.keys, line.value.values, strict=True):
                names = tuple(ast.unparse(k) for k in (kinds.elts if isinstance(kinds, ast.Tuple) else [kinds]))
                found |= dict.fromkeys(paths(ast.literal_eval(place) if place else ""), names)
    return found


def _is_a_block(called: ast.expr) -> bool:
    """Whether this is `self.block(…)`, or what a loop calls so."""
    if isinstance(called, ast.Call):
        return ast.unparse(called.func) == "self.block"
    return isinstance(called, ast.Name) and called.id.startswith("block")


def _another_block(call: ast.Call, known: dict[str, tuple[str, ...]]) -> Iterator[Recalled]:
    """The next of those with a class in common; the last becomes the first."""
    path = ast.literal_eval(call.args[0])
    alike = [other for other, kinds in known.items() if set(kinds) & set(known[path])]
    if len(alike) > 1:
        other = alike[(alike.index(path) + 1) % len(alike)]
        yield Recalled(BLOCK, call.args[0], f'"{other}"')


def _another_way(call: ast.Call, ways: tuple[str, ...]) -> Iterator[Recalled]:
    at = next((k.value for k in call.keywords if k.arg == "kind"), call.args[-1])
    if isinstance(at, ast.Name):
        for way in ways:
            if way != at.id:
                yield Recalled(WAY, at, way)


def _ways_of_list(call: ast.Call, known: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    first = ast.literal_eval(call.args[1]) if len(call.args) > 1 else 0
    return known.get(f"{ast.literal_eval(call.args[0])}.{first}", ())


def _other_rounds(call: ast.Call, first: int, last: int) -> Iterator[Recalled]:
    """A range that begins or ends elsewhere, by a step of it."""
    places = {first, last} & {*range(len(call.args))}
    step = ast.literal_eval(call.args[last + 1]) if len(call.args) > last + 1 else 1
    for place in sorted(places):
        value = ast.literal_eval(call.args[place])
        for other in (value - step, value + step):
            if other >= 0:
                yield Recalled(ROUND, call.args[place], str(other))


def _lost(value: ast.expr) -> Iterator[Recalled]:
    if isinstance(value, ast.Call) and _is_a_block(value.func) and value.args and isinstance(value.args[0], ast.Name):
        yield Recalled(LOST, value, value.args[0].id)


def _other_values(call: ast.Call, bound: list[str]) -> Iterator[Recalled]:
    """In place of each value the one that was computed last before it, and the next argument."""
    named = [a.id for a in call.args if isinstance(a, ast.Name)]
    for at in (a for a in call.args if isinstance(a, ast.Name)):
        others = [name for name in bound if name not in named][-1:] + named[named.index(at.id) + 1 :][:1]
        for other in others:
            yield Recalled(VALUE, at, other)


def _bound_before(forward: ast.FunctionDef, call: ast.Call) -> list[str]:
    """The names of values that are there when a call is made, the latest last."""
    bound = [argument.arg for argument in forward.args.args[1:]]
    lines = [node for node in ast.walk(forward) if isinstance(node, ast.Assign) and node.lineno < call.lineno]
    for line in sorted(lines, key=lambda node: node.lineno):
        for name in (n.id for n in ast.walk(line.targets[0]) if isinstance(n, ast.Name)):
            bound = [*(b for b in bound if b != name), name]
    return bound
