"""What a model asked of the sizes of its inputs while it was traced, and which answer a program rests on.

`if x.shape[1] <= 512` takes one way, and the graph has that way alone. Each such answer is a condition of the program,
which is looked at in every call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import sympy
import torch
from sympy.core.relational import Relational
from torch import Tensor, fx

from ndcompile.codegen.written import written
from ndcompile.known import Known
from ndcompile.rounded import RESTS
from ndcompile.runtime import private


def answers(graph: fx.GraphModule, roles: Mapping[sympy.Symbol, sympy.Expr]) -> Iterator[sympy.Expr]:
    """All answers, but for those that torch got to "are these two equal?", which tell it of a shorter way alone.

    In `b`, the global batch, and the names of the lengths: `roles` says which of the tracer's symbols is which.
    """
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        for size in value.shape if isinstance(value, Tensor) else ():
            if isinstance(size, torch.SymInt):
                for answer, by_torch in private.asked_of_sizes(size):
                    if not (by_torch and isinstance(answer, sympy.Ne)):
                        yield answer.xreplace(dict(roles))
                return


def conditions(known: Known) -> list[str]:
    """Each as Python in `b` and the names of the lengths."""
    return [_text(condition) for condition in known.conditions()]


def _text(condition: sympy.Expr) -> str:
    if isinstance(condition, Relational):
        return f"{_side(condition.lhs)} {condition.rel_op} {_side(condition.rhs)}"
    if isinstance(condition, (sympy.And, sympy.Or)):
        word = "and" if isinstance(condition, sympy.And) else "or"
        return f" {word} ".join(f"({_text(part)})" for part in condition.args)
    return f"not ({_text(condition.args[0])})" if isinstance(condition, sympy.Not) else written(condition)


def _side(size: sympy.Expr) -> str:
    text = written(size)
    return text.removeprefix("(").removesuffix(")") if isinstance(size, RESTS) else text
