"""Ops as an emitted text calls them, by torch's functions and methods, do what the ops do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from ndcompile.codegen.ops import SPECIAL, Writer
from ndcompile.rules.registry import RULES
from ndcompile.size import Size
from tests.rules.tries import Try, each

OF_ARGUMENTS = ("im2col", "col2im", "upsample", "softmax", "pad", "cat", "neg", "sum", "mean", "index_put")
"""Of those that are written in a way of their own these need no names of sizes."""


def is_written_of_arguments(rule: str) -> bool:
    alone = rule not in SPECIAL or rule.split(".")[1].strip("_").startswith(OF_ARGUMENTS)
    return rule.startswith("aten.") and alone


@pytest.mark.parametrize("rule", [rule for rule in RULES if is_written_of_arguments(rule)])
def test_what_is_written_does_what_the_op_does(rule: str) -> None:
    def compare(tried: Try) -> None:
        node, inputs = tried.call._node()
        torch.manual_seed(tried.number)
        values: dict[fx.Node, Any] = {n: spec.tensor() for n, spec in inputs.items()}
        if tried.call.fails or any(isinstance(x, (Size, fx.Node)) and x not in values for x in leaves(node)):
            return
        names = {n: n.name for n in values}
        text = Writer(names, None, "None").expression(node)  # type: ignore[arg-type]  # sizes are not asked for
        given = pytree.tree_map(lambda x: x.clone(), {n.name: x for n, x in values.items()})
        found = eval(text, {"torch": torch, "F": F, "device": torch.device, **given})
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values[n].clone())
        assert callable(node.target)
        pairs = zip(tensors(found), tensors(node.target(*args, **kwargs)), strict=True)
        assert all(torch.allclose(one, two, rtol=0, atol=0, equal_nan=True) and one.dtype == two.dtype
                   for one, two in pairs), text  # fmt: skip

    each(rule, 4, compare)


def leaves(node: fx.Node) -> list[Any]:
    return pytree.tree_leaves((node.args, node.kwargs), is_leaf=lambda x: isinstance(x, (Size, fx.Node)))


def tensors(results: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(results) if isinstance(x, Tensor)]
