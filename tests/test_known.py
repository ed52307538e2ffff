"""What answers tell of lengths is as good as the answers, and sizes written by it are the sizes, for all lengths."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from ndcompile.codegen.written import written
from ndcompile.conditions import conditions
from ndcompile.known import LEAST, Known
from ndcompile.rounded import TRACED, rounded

B, S = (sympy.Symbol(name, positive=True, integer=True) for name in "bs")
FURTHEST = 400
Div, Mod = TRACED.FloorDiv, TRACED.Mod

UP = S + Mod(8 - Mod(S, 8), 8)
"""`s`, padded to whole chunks of 8."""

TOLD: dict[str, tuple[list[Any], list[str]]] = {
    "padded by nothing": ([sympy.Le(Mod(8 - Mod(S, 8), 8), 0)], ["s % 8 == 0"]),
    "as long as with pads": ([sympy.Eq(UP, S)], ["s % 8 == 0"]),
    "as many elements, of each sample": ([sympy.Eq(64 * B * UP, 64 * B * S)], ["s % 8 == 0"]),
    "cut to whole chunks": ([sympy.Eq(8 * Div(S, 8), S)], ["s % 8 == 0"]),
    "nothing is left": ([sympy.Le(S - 8 * Div(S, 8), 0)], ["s % 8 == 0"]),
    "chunks of two sizes": ([sympy.Eq(Mod(S, 4), 0), sympy.Eq(Mod(S, 6), 0)], ["s % 12 == 0"]),
    "cut off where it ends": ([sympy.Eq(S, sympy.Min(256, S))], ["s <= 256"]),
    "from the end of a table": ([sympy.Eq(S, 2048 - sympy.Max(0, 2048 - S))], ["s <= 2048"]),
    "one chunk": ([sympy.Eq(Div(S + 255, 256), 1)], ["s <= 256"]),
    "one chunk, with pads": ([sympy.Eq(8 * S + 8 * Mod(64 - Mod(S, 64), 64), 512)], ["s <= 64"]),
    "no chunk": ([128 * Div(S, 128) <= 0, 1024 * B * Div(S, 128) < 2], ["s <= 127"]),
    "some chunks": ([Div(S, 8) > 2], ["s >= 24"]),
    "three chunks of 8": ([sympy.Eq(Div(S, 8), 3)], ["s >= 24", "s <= 31"]),
    "three whole chunks: the length is 24": ([sympy.Eq(Div(S, 8), 3), sympy.Eq(Mod(S, 8), 0)], []),
    "a bound between whole chunks": ([S <= 30, sympy.Eq(Mod(S, 8), 0)], ["s % 8 == 0", "s <= 24"]),
    "always so": ([8 * Div(S, 8) <= S, 512 * B * Div(S + 7, 8) >= 2, sympy.Min(9, S) <= S], []),
    "another length": ([sympy.Ne(S, 20)], ["s != 20"]),
    "no whole chunks": ([sympy.Ne(Mod(S, 4), 0)], ["s % 4 != 0"]),
    "a rest": ([sympy.Eq(Mod(S, 4), 3)], ["s % 4 == 3"]),
    "a batch": ([B < 9, sympy.Eq(Mod(B, 2), 0)], ["b % 2 == 0", "b <= 8"]),
    "both together": ([6 * B * S < 600], ["6*b*s < 600"]),
}


@pytest.mark.parametrize("name", TOLD)
def test_answers_in_few_words(name: str) -> None:
    asked, wanted = TOLD[name]
    assert conditions(Known.of(asked)) == wanted


SIMPLE: dict[str, tuple[list[Any], Any, str]] = {
    "whole chunks are the length": ([sympy.Eq(UP, S)], rounded(UP), "s"),
    "their number": ([sympy.Eq(UP, S)], Div(rounded(UP), 8), "(s//8)"),
    "chunks joined with samples": ([sympy.Eq(UP, S)], B * Div(rounded(UP), 8) * 16, "2*b*s"),
    "halves of them": ([sympy.Eq(UP, S)], Div(S, 4), "2*((s//8))"),
    "the lesser": ([S <= 256], sympy.Min(256, S), "s"),
    "the greater": ([S <= 2048], 2048 - sympy.Max(0, 2048 - S), "s"),
    "one of a part": ([S <= 127], sympy.Min(512, Div(S, 4)), "(s//4)"),
    "what is not known": ([S <= 600], sympy.Min(512, S), "Min(512, s)"),
    "one chunk": ([S <= 64], 64 * Div(S + 63, 64), "64"),
    "a fixed length": ([sympy.Eq(Div(S, 8), 3), sympy.Eq(Mod(S, 8), 0)], S * B, "24*b"),
    "a batch is any": ([B < 9, sympy.Eq(Mod(B, 2), 0)], sympy.Min(Div(B, 2), 40), "Min(40, (b//2))"),
}


@pytest.mark.parametrize("name", SIMPLE)
def test_sizes_by_what_is_known(name: str) -> None:
    asked, size, wanted = SIMPLE[name]
    assert str(Known.of(asked).simplified(size)) == wanted


def sizes(depth: int = 3) -> st.SearchStrategy[Any]:
    """None is negative: torch's own `Mod` is of none that is. (To sympy a sixth of `Max(8, 2*s)` is whole.)"""
    leaf = st.one_of(st.just(S), st.just(S), st.just(UP), st.just(UP - S), st.integers(0, 40).map(sympy.Integer))
    if not depth:
        return leaf
    inner, chunk = sizes(depth - 1), st.sampled_from((2, 3, 4, 6, 8))
    return st.one_of(
        leaf,
        st.tuples(inner, inner).map(lambda two: two[0] + two[1]),
        st.tuples(inner, inner).map(lambda two: sympy.Max(two[0] - two[1], 0)),
        st.tuples(inner, st.integers(0, 8)).map(lambda two: two[0] * two[1]),
        st.tuples(inner, chunk).map(lambda two: Div(*two)),
        st.tuples(inner.filter(lambda size: not size.has(sympy.Min, sympy.Max)), chunk).map(lambda two: Mod(*two)),
        st.tuples(inner, inner).map(lambda two: sympy.Min(*two)),
        st.tuples(inner, inner).map(lambda two: sympy.Max(*two)),
    )


RELATIONS = {"==": sympy.Eq, "!=": sympy.Ne, "<=": sympy.Le, "<": sympy.Lt, ">=": sympy.Ge, ">": sympy.Gt}
OTHERWISE = {"==": "!=", "!=": "==", "<=": ">", "<": ">=", ">=": "<", ">": "<="}


def at_all(text: str) -> list[Any]:
    """What a text is at each length, from 1 on."""
    code = compile(text, "<size>", "eval")
    return [eval(code, {"min": min, "max": max}, {"s": length}) for length in range(1, FURTHEST)]


ASKED = st.tuples(st.sampled_from([*RELATIONS]), sizes(), sizes())


@settings(max_examples=100, deadline=None)
@given(asked=st.lists(ASKED, min_size=1, max_size=3), size=sizes(), length=st.integers(LEAST, 60))
def test_what_is_known_is_as_good_as_the_answers(asked: list[Any], size: Any, length: int) -> None:
    """Whatever is asked, with the answers that an example of some length gives; then all lengths."""
    answers, all_hold = list[Any](), [True] * (FURTHEST - 1)
    for word, left, right in asked:
        texts = f"({written(left)})", f"({written(right)})"
        found = word if at_all(f"{texts[0]} {word} {texts[1]}")[length - 1] else OTHERWISE[word]
        answers.append(RELATIONS[found](left, right))
        each = zip(all_hold, at_all(f"{texts[0]} {found} {texts[1]}"), strict=True)
        all_hold = [so_far and here for so_far, here in each]
    known = Known.of(answers)
    told = [f"s == {known.fixed(S)}"] if known.fixed(S) else []
    met = at_all(" and ".join(f"({text})" for text in [*told, *conditions(known)]) or "True")
    assert met[LEAST - 1 :] == all_hold[LEAST - 1 :]
    both = zip(at_all(written(known.simplified(rounded(size)))), at_all(written(size)), strict=True)
    assert [simple == plain for holds, (simple, plain) in zip(met, both, strict=True) if holds] == [True] * sum(met)
