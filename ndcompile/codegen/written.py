"""Symbolic sizes as Python."""

from __future__ import annotations

from typing import Any

import sympy
from sympy.printing.str import StrPrinter

from ndcompile.errors import CompileError

OPERATORS = {
    "IntTrueDiv": "/", "FloatTrueDiv": "/", "CleanDiv": "//", "Mod": "%", "PythonMod": "%", "FloatPow": "**",
    "PowByNatural": "**",
}  # fmt: skip
"""The tracer's classes of sizes by Python's operators."""

FUNCTIONS = {"Max": "max", "Min": "min", "ToFloat": "float", "TruncToInt": "int"}


def _operand(part: Any, text: str) -> str:
    plain = part.is_Symbol or (part.is_Integer and part >= 0)
    return text if plain else f"({text})"


class _Python(StrPrinter):
    """Sympy's own text, and Python's for what the tracer makes of sizes; what has none is an error, not a name."""

    def _print_Function(self, expression: Any) -> str:
        kind, parts = type(expression).__name__, [self._print(part) for part in expression.args]
        if kind in OPERATORS:
            return f"({f' {OPERATORS[kind]} '.join(map(_operand, expression.args, parts))})"
        if kind in FUNCTIONS:
            return f"{FUNCTIONS[kind]}({', '.join(parts)})"
        raise CompileError(
            f"a number that is made of sizes cannot be written: {kind}({', '.join(parts)})",
            why="the emitted text computes it from the sizes of each call",
            tries=f"another way to write it, with {' '.join(dict.fromkeys(OPERATORS.values()))}, max, min",
        )

    _print_Mod = _print_Max = _print_Min = _print_LatticeOp = _print_Function


def written(size: Any) -> str:
    """A size as a Python expression of the names of its symbols.

    >>> b, s = sympy.symbols("b s")
    >>> written(b * s + b), written(sympy.Mod(s, 3)), written(sympy.Max(s, 4))
    ('b*(s + 1)', '(s % 3)', 'max(4, s)')
    """
    text: str = _Python().doprint(sympy.factor(size))
    return text
