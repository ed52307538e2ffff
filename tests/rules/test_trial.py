"""The trial has teeth: the usual mistakes in a rule are seen, by value or by gradient."""

from __future__ import annotations

import pytest
import torch

from ndcompile.rules.contract import reduction
from ndcompile.rules.notation import Rule, RuleError, line
from ndcompile.rules.registry import RULES
from tests.rules.case import Case, case, f, ints, positive

WRONG: list[tuple[str, Rule, Case]] = [
    ("a bias not tied to columns", line("* + (m k)(k n) -> m n"), case("aten.addmm.default", f(5), f(6, 4), f(4, 5))),
    ("a nonlinear op taken as linear", line("* -> *"), case("aten.gelu.default", f(6, 5))),
    ("an affine op taken as linear", line("* -> *"), case("aten.add.Scalar", f(6, 5), 2)),
    ("a product taken as a sum", line("* + * -> *"), case("aten.mul.Tensor", f(6, 5), f(6, 5))),
    ("a sum taken as a product", line("(*)(*) -> *"), case("aten.add.Tensor", f(6, 5), f(6, 5))),
    ("a denominator taken as partial", line("(*)(*) -> *"), case("aten.div.Tensor", f(6, 5), positive(6, 5))),
    ("a mean of means", reduction(linear=True), case("aten.mean.dim", f(6, 4), [1])),
    ("a sum of maxima", reduction(linear=True), case("aten.amax.default", f(6, 4), [1])),
    ("a norm over a shard", line("f(* n, n, n) -> * n"), case("aten.layer_norm.default", f(6, 4), [4], f(4), f(4))),
    ("a negative dim that is forgotten", line("* -> *"), case("aten.cumsum.default", f(6, 5), -1)),
    ("a softmax over a shard", line("f(*) -> *"), case("aten.softmax.int", f(6, 4), -1)),
    ("a lookup without a mask", line("(v h)(*) -> * h"), case("aten.embedding.default", f(6, 5), ints(4, high=6))),
    ("a loss of partial logits", line("(n v~)(n) -> n"), case("runtime.cross_entropy", f(6, 4), ints(6, high=4))),
    ("dims that are exchanged", line("* -> *"), case("aten.transpose.int", f(6, 6), 0, 1)),
    (
        "queries that see a part of the sequence",
        line("f(* s d!, * t! d!, * t! e!) -> * s e!"),
        case("aten.scaled_dot_product_attention.default", *[f(2, 4, 6, 3)] * 3, None, 0.0, True),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "given"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_a_wrong_rule_is_seen(rule: Rule, given: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, given.op, rule)
    with pytest.raises(RuleError, match="on 2 ranks: "):
        torch.manual_seed(0)
        given.trial().check(2)
