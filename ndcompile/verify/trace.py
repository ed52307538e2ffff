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
    """One call of a pure function of the text, a part of a segment of the program, or of what `forward` does last."""

    function: str
    weights: list[Value] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    half: bool = False
    """Whether it is of one half of a batch; then the other is `second`."""
    second: Call | None = None


MEASURES = ("b", "s")
"""Names of sizes, which a function works out first."""


def statements(source: str) -> dict[int, str]:
    """Line → the variable that it assigns, in every pure function of the text, and where the root brings results into
    the user's layout.
    """
    tree = ast.parse(source)
    listed = [statement for function in pure_functions(tree) for statement in function.body]
    targets = [(s.lineno, s.targets[0]) for s in [*listed, *border(tree)] if isinstance(s, ast.Assign)]
    return {line: t.id for line, t in targets if isinstance(t, ast.Name) and t.id not in MEASURES}


def root_forward(tree: ast.Module) -> ast.FunctionDef:
    """The `forward` of the root, which is the last class."""
    root = [kind for kind in tree.body if isinstance(kind, ast.ClassDef)][-1]
    return next(f for f in root.body if isinstance(f, ast.FunctionDef) and f.name == "forward")


def border(tree: ast.Module) -> list[ast.stmt]:
    """The statements of the root's `forward` behind the last one that calls a function of its own for a value."""
    body = [s for s in root_forward(tree).body if not isinstance(s, (ast.Expr, ast.Return))]
    own = [any(isinstance(n, ast.Name) and n.id == "self" for n in ast.walk(s)) for s in body]
    return body[len(own) - own[::-1].index(True) :] if True in own else body


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
    tree, lines = ast.parse(source), statements(source)
    starts = {line for f in pure_functions(tree) for line in (f.lineno, f.decorator_list[0].lineno)}
    whole = root_forward(tree).lineno
    halves: dict[FrameType, Any] = {}
    calls: list[Call] = []

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith("<ndcompile") or code.co_firstlineno not in starts | {whole}:
            return None
        if private.in_backward():
            return None  # a recomputation
        if frame in halves:
            return halves[frame]  # a half goes on
        call = Call(code.co_name, half=bool(code.co_flags & inspect.CO_GENERATOR))
        if call.half and calls and calls[-1].half and calls[-1].second is None:
            calls[-1].second = call
        elif code.co_firstlineno != whole:
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
                    if not call.values and code.co_firstlineno == whole:
                        calls.append(call)  # all others have been
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
