"""A user's rule is tried before it is taken; a wrong one is refused with what differed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import ndcompile as nd
from ndcompile.rules.notation import RuleError
from ndcompile.rules.registry import RULES

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """What a test registers is forgotten after it."""
    before = dict(RULES)
    yield
    RULES.clear()
    RULES.update(before)


@torch.library.custom_op("ndcompile_tests::scale", mutates_args=())
def scale(x: Tensor, w: Tensor) -> Tensor:
    return x * w


@scale.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    x, w = ctx.saved_tensors
    return gradient * w, (gradient * x).sum_to_size(w.shape)


scale.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("ndcompile_tests::averages", mutates_args=())
def averages(x: Tensor, w: Tensor) -> Tensor:
    return x * w


def _averaged(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    whole, weights = _backward(ctx, gradient)
    return whole, weights * weights.numel() / gradient.numel()


averages.register_autograd(_averaged, setup_context=_save)


@torch.library.custom_op("ndcompile_tests::fails", mutates_args=())
def fails(x: Tensor) -> Tensor:
    return 2 * x


fails.register_autograd(lambda ctx, gradient: gradient[None, :1], setup_context=lambda ctx, inputs, output: None)

RIGHT = [
    (aten.mv.default, "(m k)(k) -> m"),
    (aten.dot.default, "(k)(k) -> "),
    (aten.outer.default, "(m)(n) -> m n"),
    (aten.baddbmm.default, "b m n + (b m k)(b k n) -> b m n"),
    (aten.addmv.default, "m + (m k)(k) -> m"),
    (aten.selu.default, "f(*) -> *"),
    (aten.lerp.Tensor, "f(*, *, *) -> *"),
    (aten.atan2.default, "f(*, *) -> *"),
    (aten.cumprod.default, "f(n o! *) -> n o! *"),
    (aten.take.default, "f(n!, *) -> *"),
    (aten.eq.Tensor, "f(*, *) -> *"),
    (aten.isin.Tensor_Tensor, "f(*, n!) -> *"),
    (aten.lgamma.default, "f(*) -> *"),
]

WRONG = [
    (aten.gelu.default, "* -> *", "row P → P on 2 ranks: the value differs"),
    (aten.mul.Tensor, "* + * -> *", "row P, P → P on 2 ranks: the value differs"),
    (aten.div.Tensor, "(*)(*) -> *", "row R, P → P on 2 ranks: the value differs"),
    (aten.baddbmm.default, "(b m n)(b m k)(b k n) -> b m n", "the value differs"),
    (aten.mv.default, "m k + k -> m", "the value differs"),
    (aten.cumprod.default, "f(n o *) -> n o *", "row S(1) → S(1) on 2 ranks: the value differs"),
    (aten.trace.default, "m n -> ", "on 2 ranks"),
    (aten.sort.default, "f(*) -> *", "it must return one tensor"),
    (aten.dropout.default, "f(*) -> *", "it gives another value on each call"),
    (aten.mm.default, "(m k)(q n) -> m n", "the op cannot be called with tensors of sizes"),
    (aten.embedding.default, "(v? h)(*) -> * h", "'v\\?' needs an algorithm"),
]


@pytest.mark.parametrize(("op", "text"), RIGHT, ids=str)
def test_a_right_rule_is_taken(op: torch._ops.OpOverload, text: str) -> None:
    RULES.pop(str(op), None)
    nd.register_rule(op, text)
    assert str(op) in RULES


@pytest.mark.parametrize(("op", "text", "why"), WRONG, ids=str)
def test_a_wrong_rule_is_refused(op: torch._ops.OpOverload, text: str, why: str) -> None:
    before = RULES.get(str(op))
    with pytest.raises(RuleError, match=why.replace("(1)", "\\(1\\)")) as error:
        nd.register_rule(op, text)
    assert str(op) in str(error.value) and f"'{text}'" in str(error.value), "it names the op and the rule"
    assert RULES.get(str(op)) is before, "nothing is registered"


def test_the_message_names_the_rule_the_row_and_what_differed() -> None:
    with pytest.raises(RuleError) as error:
        nd.register_rule(aten.gelu.default, "* -> *")
    assert str(error.value).startswith(
        "the rule '* -> *' of aten.gelu.default is refused: row P → P on 2 ranks: the value differs by "
    )


def test_a_wrong_gradient_is_seen_where_the_value_is_right() -> None:
    with pytest.raises(RuleError, match="the gradient of operand 1"):
        nd.register_rule(torch.ops.ndcompile_tests.averages.default, "(* n)(n) -> * n")


def test_a_gradient_that_fails_is_told() -> None:
    with pytest.raises(RuleError, match="its gradient fails on whole tensors"):
        nd.register_rule(torch.ops.ndcompile_tests.fails.default, "* -> *")


def test_a_users_op_is_taken_by_object_or_name() -> None:
    nd.register_rule(torch.ops.ndcompile_tests.scale.default, "(* n)(n) -> * n")
    assert "ndcompile_tests.scale.default" in RULES
    del RULES["ndcompile_tests.scale.default"]
    nd.register_rule("ndcompile_tests.scale", "f(* n, n) -> * n")
    assert "ndcompile_tests.scale.default" in RULES


def test_a_name_that_is_no_op_is_refused() -> None:
    with pytest.raises(RuleError, match="there is no op 'ndcompile_tests\\.nothing'"):
        nd.register_rule("ndcompile_tests.nothing", "* -> *")


def test_a_text_without_an_arrow_is_refused() -> None:
    with pytest.raises(RuleError, match="a rule is 'operands -> output'"):
        nd.register_rule(aten.selu.default, "f(*)")


def test_probing_leaves_the_random_state_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    nd.register_rule(aten.selu.default, "f(*) -> *")
    assert torch.equal(torch.rand(2), expected)
