"""Makes a failing sketch small: takes away all that it also fails without."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.programs.sketch import SIZES, Body, Sketch, Statement, members, names_in


def reduce(sketch: Sketch, fails: Callable[[Sketch], bool], seconds: float = 120) -> Sketch:
    """The smallest sketch that was found to fail within the time."""
    end = time.monotonic() + seconds
    tried = {str(sketch)}
    smaller = True
    while smaller:
        smaller = False
        for candidate in _candidates(sketch):
            if time.monotonic() > end:
                return sketch
            if str(candidate) in tried:
                continue
            tried.add(str(candidate))
            if fails(candidate):
                sketch, smaller = candidate, True
                break
    return sketch


def _candidates(sketch: Sketch) -> Iterator[Sketch]:
    """Sketches with less in them, the smallest first."""
    root = sketch.bodies[-1]
    for names in [s.targets for s in root.statements if s.targets != SIZES]:
        yield from (_with_root(sketch, replace(root, result=name)) for name in names if root.result != name)
    yield from (replace(sketch, pins=(*sketch.pins[:i], *sketch.pins[i + 1 :])) for i in range(len(sketch.pins)))
    yield from (replace(sketch, mesh=mesh) for mesh in _meshes(sketch.mesh))
    for number, body in enumerate(sketch.bodies):
        for smaller in _bodies(body):
            yield _tidy(replace(sketch, bodies=(*sketch.bodies[:number], smaller, *sketch.bodies[number + 1 :])))


def _with_root(sketch: Sketch, root: Body) -> Sketch:
    return _tidy(replace(sketch, bodies=(*sketch.bodies[:-1], root)))


def _meshes(mesh: str) -> Iterator[str]:
    axes = [axis.split("=") for axis in mesh.split(", ")]
    for number, (name, size) in enumerate(axes):
        front, back = axes[:number], axes[number + 1 :]
        if len(axes) > 1:
            yield ", ".join("=".join(axis) for axis in [*front, *back])
        if size != "2":
            yield ", ".join("=".join(axis) for axis in [*front, [name, "2"], *back])


def _bodies(body: Body) -> Iterator[Body]:
    """Without one statement: what it made is another value, or is used by nothing."""
    for number in reversed(range(len(body.statements))):
        gone = body.statements[number]
        front, back = body.statements[:number], body.statements[number + 1 :]
        yield replace(body, statements=front + back)
        known = {name for s in front for name in s.targets} | set(body.arguments)
        for name in sorted(gone.uses & known - set(SIZES)):
            renamed = {target: name for target in gone.targets if target != name}
            later = tuple(Statement(_renamed_all(s.targets, renamed), _renamed(s.text, renamed)) for s in back)
            if renamed:
                yield replace(body, statements=front + later, result=_renamed(body.result, renamed))
    for number, line in enumerate(body.setup):
        for count in ("2", "1"):
            shorter = re.sub(r"range\([2-9]\)", f"range({count})", line)
            if shorter != line:
                yield replace(body, setup=(*body.setup[:number], shorter, *body.setup[number + 1 :]))


def _renamed_all(names: tuple[str, ...], to: dict[str, str]) -> tuple[str, ...]:
    return tuple(to.get(name, name) for name in names)


def _renamed(text: str, to: dict[str, str]) -> str:
    return re.sub(r"\b\w+\b", lambda found: to.get(found[0], found[0]), text)


def _tidy(sketch: Sketch) -> Sketch:
    """Without what nothing uses: values, members, classes, inputs but the first."""
    bodies = [_live(body) for body in sketch.bodies]
    used = {name for body in bodies for line in body.setup for name in re.findall(r"\w+", line)}
    bodies = [body for body in bodies[:-1] if body.name in used] + bodies[-1:]
    read = names_in([*(s.text for s in bodies[-1].statements), bodies[-1].result])
    inputs = tuple(x for x in sketch.inputs if x.name in read) or sketch.inputs[:1]
    root = replace(bodies[-1], arguments=tuple(x.name for x in inputs))
    return replace(sketch, bodies=(*bodies[:-1], root), inputs=inputs)


def _live(body: Body) -> Body:
    needed, kept = names_in([body.result]), list[Statement]()
    for statement in reversed(body.statements):
        if not statement.targets or needed & set(statement.targets) or members(statement.text.partition("=")[0]):
            needed |= statement.uses
            kept.append(statement)
    return replace(body, statements=tuple(kept[::-1])).needed()
