"""What a model asked of the sizes of its inputs while it was traced, and which answer a program rests on.

`if x.shape[1] <= 512` takes one way, and the graph has that way alone. Each such answer is a condition of the program,
which is looked at in every call.
"""

from __future__ import annotations

from collections.abc import Mapping

import sympy
import torch
from sympy.core.relational import Relational
from torch import Tensor, fx

from ndcompile.codegen.written import written
from ndcompile.rounded import rounded
from ndcompile.runtime import private

LEAST = 4
"""Answers that are the same for all sizes from here on are not asked again: torch itself tells 0 and 1 from others."""


def conditions(graph: fx.GraphModule, roles: Mapping[sympy.Symbol, sympy.Expr]) -> list[str]:
    """Each as Python in `b`, the global batch, and the names of the lengths. `roles` says which symbol is which."""
    found = dict.fromkeys(rounded(asked.xreplace(dict(roles))) for asked in _asked(graph))
    return [_text(asked) for asked in found if asked is not sympy.true and not _always(asked)]


def _asked(graph: fx.GraphModule) -> list[sympy.Expr]:
    """All answers, but for those that torch got to "are these two equal?", which tell it of a shorter way alone."""
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        for size in value.shape if isinstance(value, Tensor) else ():
            if isinstance(size, torch.SymInt):
                asked = private.asked_of_sizes(size)
                return [answer for answer, by_torch in asked if not (by_torch and isinstance(answer, sympy.Ne))]
    return []


def _always(asked: sympy.Expr) -> bool:
    """Whether it holds for all sizes that are not small."""
    larger = {x: LEAST + sympy.Symbol(f"{x}_", nonnegative=True, integer=True) for x in asked.free_symbols}
    return asked.xreplace(larger) is sympy.true or sympy.simplify(asked.xreplace(larger)) is sympy.true


def _text(asked: sympy.Expr) -> str:
    if isinstance(asked, Relational):
        return f"{written(asked.lhs)} {asked.rel_op} {written(asked.rhs)}"
    if isinstance(asked, (sympy.And, sympy.Or)):
        word = "and" if isinstance(asked, sympy.And) else "or"
        return f" {word} ".join(f"({_text(part)})" for part in asked.args)
    return f"not ({_text(asked.args[0])})" if isinstance(asked, sympy.Not) else written(asked)
