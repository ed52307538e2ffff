"""Where emitted functions end: at results that the user may leave unread, and nowhere else."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ndcompile as nd
from ndcompile.codegen.names import MEMBERS
from ndcompile.runtime import Block, Root
from tests.models import Stack, tokens

X = torch.randn(4, 8)


def functions(program: nd.Program, kind: str = "") -> dict[str, str]:
    """Of the root, or of a class: what each function that is compiled takes and gives."""
    classes = [node for node in ast.parse(str(program)).body if isinstance(node, ast.ClassDef)]
    (chosen,) = [c for c in classes if c.name == kind] if kind else classes[-1:]
    found = {}
    for f in chosen.body:
        if isinstance(f, ast.FunctionDef) and f.decorator_list:
            (last,) = [ast.unparse(s.value) for s in f.body if isinstance(s, ast.Return) and s.value]
            found[f.name] = f"{', '.join(a.arg for a in f.args.args)} → {last.strip('()')}"
    return found


def calls(program: nd.Program) -> list[str]:
    """The statements of the root's forward."""
    root = [node for node in ast.parse(str(program)).body if isinstance(node, ast.ClassDef)][-1]
    forward = next(f for f in root.body if isinstance(f, ast.FunctionDef) and f.name == "forward")
    return [ast.unparse(statement) for statement in forward.body]


class Of(nn.Module):
    """A norm, two heads, and what a function makes of them."""

    def __init__(self, results: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.norm, self.one, self.two = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(8, 16)
        self.results = results

    def forward(self, x: Tensor) -> Any:
        return self.results(self, x)


def compiled(results: Callable[[Any, Tensor], Any], mesh: str = "") -> nd.Program:
    return nd.compile(Of(results), mesh, X)


def test_a_loss_is_a_function_of_its_logits() -> None:
    program = nd.compile(Stack(), "dp_shard=2", tokens())
    assert functions(program) == {
        "begin": "w, ids → tokens",
        "end": "w, x → head",
        "loss": "head, labels → loss",
    }
    assert calls(program)[-4:] == [
        "with self.gathered('end') as w:\n    head = self.end(w, x)",
        "loss = self.loss(head, labels)",
        "head = scale_gradient(head, 1 / dp_shard.size)",
        "return (loss, head)",
    ]


CASES: dict[str, tuple[Callable[[Any, Tensor], Any], dict[str, str]]] = {
    "one result": (
        lambda m, x: m.one(m.norm(x)).square().mean(),
        {"compute": "w, x → loss"},
    ),
    "a result without a gradient": (
        lambda m, x: (logits := m.one(m.norm(x)), logits.argmax(-1), logits.detach() + 1),
        {"compute": "w, x → one, argmax, detach"},
    ),
    "the loss last": (
        lambda m, x: (logits := m.one(m.norm(x)), logits.square().mean()),
        {"compute": "w, x → one", "loss": "one → loss"},
    ),
    "two losses of one norm": (
        lambda m, x: ((h := m.norm(x), m.one(h).square().mean())[1], m.two(h).square().mean()),
        {"compute": "w, x → norm", "loss": "w, norm → loss", "loss_2": "w, norm → loss"},
    ),
    "a loss that is part of another": (
        lambda m, x: ((h := m.norm(x), a := m.one(h).square().mean())[1], a + m.two(h).square().mean()),
        {"compute": "w, x → norm", "loss": "w, norm → loss", "add": "w, norm, loss → loss"},
    ),
    "what is read on the way to a value that is read too": (
        lambda m, x: ((y := x * m.norm.weight, y.square().mean())[1], m.one(m.norm(y)).square().mean()),
        {"compute": "w, x → mul", "loss": "mul → loss", "loss_2": "w, mul → loss"},
    ),
    "items of a list": (
        lambda m, x: ((h := m.one(m.norm(x)).chunk(2, -1), h[0].square().mean())[1], h[1].square().mean()),
        {"compute": "w, x → item, item_2", "loss": "item → loss", "loss_2": "item → loss"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_functions_end_where_what_is_read_decides(case: str) -> None:
    results, expected = CASES[case]
    program = compiled(results)
    assert functions(program) == expected


def test_names_of_functions_are_not_those_that_emitted_classes_have() -> None:
    public = {name for kind in (Block, Root) for name in (*vars(kind), *kind.__annotations__) if name[0] != "_"}
    assert public - {"forward"} <= MEMBERS


class Shares(nn.Module):
    """Attention that gives its shares too."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv(x).unflatten(-1, (3, 8)).unbind(-2)
        shares = (q @ k.transpose(-1, -2)).softmax(-1)
        return x + self.out(shares @ v), shares


class GivesShares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Shares() for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        every = []
        for layer in self.layers:
            x, shares = layer(x)
            every.append(shares)
        return x.square().mean(), *every


def test_a_block_ends_a_function_at_a_result_that_it_goes_on_from() -> None:
    program = nd.compile(GivesShares(), "dp_shard=2", torch.randn(4, 6, 8))
    assert functions(program, "Shares") == {
        "softmax": "w, x → item_3, softmax",
        "compute": "w, x, softmax, item → x",
    }
    assert all(claim.held for claim in nd.verify(program, seeds=1, microbatches=1).claims)
