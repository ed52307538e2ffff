"""Lengths that are padded to whole chunks, in a form in which equal ones are written alike.

A model that works on chunks of 64 places pads `s` by `-s % 64`. Written as 64 times a number of chunks, the result is
seen to divide by 64, and its parts to be equal to each other.
"""

from __future__ import annotations

import sympy

from ndcompile.runtime import private

TRACED = private.functions_of_sizes()
RESTS = (sympy.Mod, TRACED.Mod, TRACED.PythonMod)


def rounded(size: sympy.Expr) -> sympy.Expr:
    """`s + -s % 64` as `64 * ((s + 63) // 64)`, and `s - s % 64` as `64 * (s // 64)`, wherever they stand in a size.

    >>> s = sympy.Symbol("s", positive=True, integer=True)
    >>> padded = s + TRACED.Mod(8 - TRACED.Mod(s, 8), 8)
    >>> rounded(padded), rounded(s - TRACED.Mod(s, 8) + 8)
    (8*(((s + 7)//8)), 8*((s//8)) + 8)
    """
    return _bounded(size.replace(sympy.Add, _in_chunks) if size.has(*RESTS) else size)


def _in_chunks(*terms: sympy.Expr) -> sympy.Expr:
    total = sympy.Add(*terms)
    for term in total.args:
        found = _up(term) or _down(term)
        if found is not None:
            length, chunk, more = found
            rest = total - term - length
            if len(sympy.Add.make_args(rest)) < len(total.args):
                return chunk * TRACED.FloorDiv(length + more, chunk) + rest
    return total


def _up(term: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr, sympy.Expr] | None:
    """What is padded by the term, to whole chunks of what size, and how much more is less than one more chunk."""
    inner, chunk = _mod(term)
    if inner is None or not chunk.is_Integer:
        return None
    length, of = _mod(chunk - inner)
    return (length, chunk, chunk - 1) if length is not None and of == chunk else None


def _down(term: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr, sympy.Expr] | None:
    """What loses the term, its part beyond whole chunks."""
    length, chunk = _mod(-term)
    return None if length is None or not chunk.is_Integer else (length, chunk, sympy.Integer(0))


def _mod(term: sympy.Expr) -> tuple[sympy.Expr | None, sympy.Expr]:
    return (term.args[0], term.args[1]) if isinstance(term, RESTS) else (None, sympy.Integer(0))


def _bounded(size: sympy.Expr) -> sympy.Expr:
    """`max(0, 1 - s)` as 0: sympy's own knows that `s` is at least 1."""
    return size.replace(TRACED.Max, sympy.Max).replace(TRACED.Min, sympy.Min)
