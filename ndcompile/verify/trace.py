"""What the emitted text computes, line by line: values and cotangents, seen from outside while it runs."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from torch import Tensor

from ndcompile.runtime import private


@dataclass
class Value:
    """A value of the text: the line that made it (0: a weight that came in), and its cotangent once it is known."""

    line: int
    name: str
    value: Tensor
    cotangent: Tensor | None = None

    def keep(self, gradient: Tensor | None) -> None:
        """A hook of autograd, which also tells it that a value has no gradient."""
        self.cotangent = None if gradient is None else gradient.detach().clone()


@dataclass
class Call:
    """One call of a pure function of the text: a segment of the program."""

    function: str
    weights: list[Value] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    half: bool = False
    """Whether it is of one half of a batch; then the other is `second`."""
    second: Call | None = None


MEASURES = ("b", "s")
"""Names of sizes, which a function works out first."""


def statements(source: str) -> dict[int, str]:
    """Line → the variable that it assigns, in every pure function of the text."""
    found: dict[int, str] = {}
    for function in pure_functions(ast.parse(source)):
        for statement in function.body:
            target = statement.targets[0] if isinstance(statement, ast.Assign) else None
            if isinstance(target, ast.Name) and target.id not in MEASURES:
                found[statement.lineno] = target.id
    return found


def pure_functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    """The static methods of the text's classes: what `torch.compile` sees."""
    for kind in tree.body:
        if isinstance(kind, ast.ClassDef):
            for function in kind.body:
                if isinstance(function, ast.FunctionDef) and function.decorator_list:
                    yield function


@contextmanager
def traced(source: str) -> Iterator[list[Call]]:
    """Record every value of the pure functions that this thread calls in a forward inside the block, in order."""
    lines, functions = statements(source), {f.lineno: f.name for f in pure_functions(ast.parse(source))}
    halves: dict[FrameType, Any] = {}
    starts = {f.decorator_list[0].lineno for f in pure_functions(ast.parse(source))} | set(functions)
    calls: list[Call] = []

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith("<ndcompile") or code.co_firstlineno not in starts:
            return None
        if private.in_backward():
            return None  # a recomputation
        if frame in halves:
            return halves[frame]  # a half goes on
        call = Call(code.co_name, half=bool(code.co_flags & inspect.CO_GENERATOR))
        if call.half and calls and calls[-1].half and calls[-1].second is None:
            calls[-1].second = call
        else:
            calls.append(call)
        if "w" in code.co_varnames[:1]:
            weights = frame.f_locals["w"]
            call.weights = [_seen(0, name, getattr(weights, name)) for name in weights._fields]
        last = [0]

        def step(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "return" and call.half:
                return step  # a turn ends, and what it yields is not assigned yet
            if event in ("line", "return") and last[0] in lines:
                value = frame.f_locals.get(lines[last[0]])
                if isinstance(value, Tensor):
                    call.values.append(_seen(last[0], lines[last[0]], value))
            last[0] = frame.f_lineno if event == "line" else 0
            return step

        if call.half:
            halves[frame] = step
        return step

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield calls
    finally:
        sys.settrace(before)


def _seen(line: int, name: str, value: Tensor) -> Value:
    seen = Value(line, name, value.detach().clone())
    if value.requires_grad:
        value.register_hook(seen.keep)
    return seen
