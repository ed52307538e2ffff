"""Programs that random search found to be wrong, or to end in no clear error, each as small as it became."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from tests.programs.judge import judge
from tests.programs.sketch import Body, Input, Sketch, Statement

X = (Input("x", ("b", "s", 8)),)
IDS_OF = (Input("x", ("b", "s", 8)), Input("labels", ("b", "s"), 8))
LINEAR = ("self.m = nn.Linear(8, 8)",)
SPLIT = "q = self.m(x).unflatten(-1, (4, 2)).transpose(1, 2)"
AUX = Body(
    "Aux", ("x",), ("self.a = nn.Linear(8, 8)", "self.b = nn.Linear(8, 8)"),
    (Statement((), "h = x + self.a(x)"),), "(h, self.b(h))",
)  # fmt: skip
SECOND = Body("Second", ("x", "y"), ("self.a = nn.Linear(8, 8)",), (), "self.a(y)")
CARRIED = Body(
    "Carried", ("x", "k"), ("self.a = nn.Linear(8, 8)", "self.b = nn.Linear(8, 8)"),
    (Statement((), "h = x + self.a(x)"),), "(h, self.b(h) + k)",
)  # fmt: skip
DROPPED = Body(
    "Dropped", ("x",), (), (Statement((), "v = x + F.dropout(x, 0.5, self.training)"),), "v.permute(0, 1, 2)"
)
SAME = Body("Same", ("x",), (), (), "x")
VIEWED = Body(
    "Viewed", ("x",), ("self.a = nn.Linear(8, 8)",), (), "self.a(x).view(x.shape[0], x.shape[1], 2, 4).flatten(2)"
)
WITHOUT_GRADIENT = Body(
    "WithoutGradient", ("x",), (), (Statement((), "with torch.no_grad():\n    v = x.softmax(1)"),), "x + v"
)

DETACHED = Body(
    "Detached", ("x",), ("self.a = nn.LayerNorm(8)",),
    (Statement((), "y = self.a(x)\nwith torch.no_grad():\n    v = y.softmax(1)"),), "x + v",
)  # fmt: skip
WIDER = Body(
    "Wider", ("x",), ("self.a = nn.Linear(3, 24)", "self.b = nn.Linear(24, 3)"), (), "x + self.b(self.a(x).relu())"
)
ATTENDS = Body(
    "Attends", ("x",), ("self.a = nn.Linear(8, 8)",),
    (Statement((), "q = self.a(x).unflatten(-1, (4, 2)).transpose(1, 2)"),),
    "x + F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)",
)  # fmt: skip
TURNED = Body("Turned", ("x",), ("self.a = nn.Linear(8, 8)",), (Statement((), "x.flatten(0, 1).neg_()"),), "self.a(x)")
DEEP = Body(
    "Deep", ("x",), (*(f"self.{n} = nn.Linear(6, 16)" for n in "qkv"), "self.o = nn.Linear(16, 6)"),
    (Statement((), "q, k, v = (f(x).unflatten(-1, (4, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))"),),
    "self.o((q @ k.mT * 1.5).softmax(-1).matmul(v).transpose(1, 2).flatten(2))",
)  # fmt: skip
NORM = Body("Norm", ("x",), ("self.a = nn.BatchNorm1d(4)",), (), "self.a(x)")


@dataclass(frozen=True)
class Found:
    """A forward of `x` in lines, of which the last is the result."""

    forward: str
    setup: tuple[str, ...] = LINEAR
    mesh: str = "dp_shard=2"
    inputs: tuple[Input, ...] = X
    parts: tuple[Body, ...] = ()

    def sketch(self) -> Sketch:
        *lines, result = self.forward.splitlines()
        body = Body(
            "Model", tuple(x.name for x in self.inputs), self.setup, (Statement((), "\n".join(lines)),), result
        )  # fmt: skip
        return Sketch((*self.parts, body), self.inputs, self.mesh)


def blocks(kind: str, count: int = 3) -> tuple[str, ...]:
    return (*LINEAR, f"self.blocks = nn.ModuleList({kind}() for _ in range({count}))")


FOUND = {
    "the batch less one as a number": Found("y = self.m(x)\ny.sum(0) / (x.shape[0] - 1)"),
    "one over the batch": Found("y = self.m(x)\ny + 1 / x.shape[0]"),
    "a power of the batch": Found("y = self.m(x)\ny * x.shape[0] ** -0.5"),
    "the remainder of a length": Found("y = self.m(x)\ny * (x.shape[1] % 4)", mesh="tp=2"),
    "the larger of two lengths": Found("y = self.m(x)\ny * max(x.shape[1], 4)", mesh="tp=2"),
    "a mean over batch by batch": Found("y = self.m(x).sum(1)\n(y @ y.t()).mean()", mesh="dp_replicate=3"),
    "a mean over neighbours in the batch": Found("y = self.m(x)\n(y[1:] - y[:-1]).square().mean((0, 1))"),
    "a mean over half a sequence": Found("y = self.m(x)\ny[:, : x.shape[1] // 2].mean(1)", mesh="tp=2"),
    "a view of neighbours in the batch": Found(
        "y = self.m(x)\ny = y[1:] * y[:-1]\ny.view(y.shape[0], y.shape[1], 1, 8)", mesh="dp_replicate=2"
    ),
    "a constant cut from a sequence": Found("y = self.m(x)\ny[:, :2] = y[:, :2] * 2\ny", mesh="tp=2"),
    "the end of a sequence": Found("self.m(x)[:, -2:]", mesh="tp=2"),
    "one element changed through a slice": Found("y = self.m(x) + 0.5\nv = y[:, :1]\nv.mul_(2)\ny"),
    "losses that are not reduced": Found(
        "F.cross_entropy(self.m(x).transpose(1, 2), labels, reduction='none')", inputs=IDS_OF
    ),
    "losses of tokens, weighted by hand": Found(
        "y = F.cross_entropy(self.m(x).flatten(0, 1), labels.flatten(), reduction='none').view(x.shape[:2])\n"
        "(y * (labels > 2)).sum() / (labels > 2).sum()",
        inputs=IDS_OF, mesh="dp_shard=2, tp=2",
    ),
    "repeated keys of one head": Found(
        f"{SPLIT}\nk = self.k(x).unflatten(-1, (1, 2)).transpose(1, 2).repeat_interleave(4, dim=1)\nq @ k.mT",
        (*LINEAR, "self.k = nn.Linear(8, 2)"), "tp=2",
    ),
    "repeated keys on an axis in parts": Found(
        f"{SPLIT}\nk = self.k(x).unflatten(-1, (2, 2)).transpose(1, 2).repeat_interleave(2, dim=1)\nq @ k.mT",
        (*LINEAR, "self.k = nn.Linear(8, 4)"), "tp.0=2, tp.1=2",
    ),
    "blocks that lead to unused dropout alone": Found(
        "y = self.m(x)\nz = y\nfor block in self.blocks:\n    z = block(z, y)\n"
        "F.dropout(z, 0.2, True)\nself.e(y).tanh()",
        (*blocks("Second"), "self.e = nn.Linear(8, 8)"), parts=(SECOND,),
    ),
    "blocks that do not read the one before": Found(
        "y = self.m(x)\nz = y\nfor block in self.blocks:\n    z = block(z, y)\nz",
        blocks("Second"), "tp=2", parts=(SECOND,),
    ),
    "a second result, of the last block alone": Found(
        "x = self.m(x)\nfor block in self.blocks:\n    x, y = block(x)\n    z = y.tanh()\nz",
        blocks("Aux"), parts=(AUX,),
    ),
    "equal blocks of which other results are used": Found(
        "x = self.m(x)\nk = x\nfor block in self.blocks:\n    x, k = block(x, k)\nk",
        blocks("Carried"), parts=(CARRIED,),
    ),
    "a value that an op takes in two layouts": Found("y = self.m(x)\ntorch.einsum('bid,bjd->bij', y, y)", mesh="tp=2"),
    "blocks with dropout that nothing reads": Found(
        "z = self.m(x)\nfor block in self.blocks:\n    z = block(z)\nself.e(x)",
        (*blocks("Dropped", 2), "self.e = nn.Linear(8, 8)"), "tp=2", parts=(DROPPED,),
    ),
    "a change in place after dropout that drops nothing": Found(
        "y = self.m(x)\nz = F.dropout(y, 0.0, True)\nz[:, -1] = 0\ny.tanh()", mesh="tp=2"
    ),
    "a mean of what dropout gives": Found("F.dropout(self.m(x), 0.5, self.training).mean()"),
    "a run of blocks at the end": Found(
        "y = self.m(x)\nz = y\nfor block in self.blocks:\n    z = block(z) + y\nz", blocks("Same"), parts=(SAME,)
    ),
    "blocks of a doubled sequence": Found(
        "y = torch.cat([self.m(x), x], 1)\nfor block in self.blocks:\n    y = y + block(y)\ny",
        blocks("Viewed"), "tp=2", parts=(VIEWED,),
    ),
    "a no-grad region in a block": Found(
        "self.blocks[0](self.m(x))", blocks("WithoutGradient", 1), "tp=2", parts=(WITHOUT_GRADIENT,)
    ),
    "what stands between blocks, in two layouts": Found(
        "y = self.e(x)\nz = y\nfor block in self.blocks:\n    z = block(z) + y\nz",
        ("self.e = nn.Linear(8, 3)", "self.blocks = nn.ModuleList(Wider() for _ in range(3))"), "tp=2", parts=(WIDER,),
    ),
    "a length less one in blocks": Found(
        "y = self.m(x)\ny = y[:, 1:] + y[:, :-1]\nfor block in self.blocks:\n    y = block(y)\ny",
        blocks("Viewed"), "tp=2", parts=(VIEWED,),
    ),
    "a change in place of a part of what a batch norm gives": Found(
        "y = self.n(x)\ny[:, :2].zero_()\ny", ("self.n = nn.BatchNorm1d(8)",), inputs=(Input("x", ("b", 8)),)
    ),
    "a mean over dims from the end, of which one is uneven": Found(
        "self.e(labels).mean(dim=(-2, -1))", ("self.e = nn.Embedding(8, 9)",), "tp=2", IDS_OF
    ),
    "blocks that change a view of what they take": Found(
        "y = self.m(x) * 2\nfor block in self.blocks:\n    y = y + block(y)\ny", blocks("Turned", 2), parts=(TURNED,)
    ),
    "a change of a part of what equal blocks give": Found(
        "y = self.m(x)\nfor block in self.blocks:\n    y = block(y)\ny[:, :2].zero_()\ny",
        blocks("Attends", 2), parts=(ATTENDS,),
    ),
    "the square of the batch as a size": Found(
        "b = x.shape[0]\n(x @ x.transpose(-1, -2)).view(b * b)", (), inputs=(Input("x", ("b", 16)),)
    ),
    "blocks with attention that nothing reads": Found(
        "z = self.m(x)\nfor block in self.blocks:\n    z = block(z)\nself.e(x)",
        (*blocks("Attends"), "self.e = nn.Linear(8, 8)"), "tp=2", parts=(ATTENDS,),
    ),
    "weights of a block that backward does not come to": Found(
        "y = self.m(x)\nfor block in self.blocks:\n    y = block(y)\nself.e(y)",
        (*blocks("Detached", 1), "self.e = nn.Linear(8, 8)"), parts=(DETACHED,),
    ),
    "the batch where one data axis is partial": Found(
        "for block in self.blocks:\n    x = block(x)\nx",
        ("self.blocks = nn.ModuleList(Norm() for _ in range(2))",), "dp_replicate=4, dp_shard=2",
        (Input("x", ("b", 4)),), (NORM,),
    ),
    "places that are listed, of a gradient": Found("self.m(x)[:, :, [0, 3, 3]]"),
    "no gradient at all": Found("y = self.m(x)\nx.masked_fill(y.mean() > 0.5, 0.0)", mesh="tp=2"),
    "a bias of keys, whose gradient is 0": Found(
        "q, k = (f(x).unflatten(-1, (4, 2)).transpose(1, 2) for f in (self.m, self.k))\n"
        "F.scaled_dot_product_attention(q, k, q)",
        (*LINEAR, "self.k = nn.Linear(8, 8)"), "dp_replicate=2, dp_shard=2",
    ),
    "labels of two losses, of which one ignores a class": Found(
        "y = self.m(x).flatten(0, 1)\n"
        "F.cross_entropy(y, labels.flatten()) + F.cross_entropy(y.tanh(), labels.flatten(), ignore_index=3)",
        ("self.m = nn.Linear(8, 9)",), "tp=4", IDS_OF,
    ),
    "a scale that a norm along the sequence takes out again": Found(
        "F.normalize(self.m(x), dim=-2)", ("self.m = nn.RMSNorm(8)",)
    ),
    "one number as the scale of what is normed": Found(
        "self.m(x[..., :4] * 3 * (1 + self.p))", ("self.m = nn.RMSNorm(4)", "self.p = nn.Parameter(torch.ones(()))"),
        inputs=(Input("x", ("b", "s", 6)),),
    ),
    "the sum of a softmax over a norm of two": Found(
        "y = target[:, :, 1:] @ self.p\nz = torch.einsum('bid,bjd->bij', self.n(y), y).softmax(-1)\n"
        "z = z[torch.arange(z.shape[0]), place]\n(z[1:] - z[:-1]).sum(), z.detach()",
        ("self.p = nn.Parameter(torch.randn(15, 2) / 3)", "self.n = nn.LayerNorm(2, elementwise_affine=False)"),
        "tp=2", (Input("x", ("b", "s", 16)), Input("target", ("b", "s", 16)), Input("place", ("b",), 2)),
    ),
    "blocks in which attention is nearly on one key": Found(
        "for block in self.blocks:\n    x = block(x)\nx",
        ("self.blocks = nn.ModuleList(Deep() for _ in range(4))",), "tp=2", (Input("x", ("b", "s", 6)),), (DEEP,),
    ),
    "the sum of what two batch norms give": Found(
        "self.n(x).sum() - self.n(x.tanh()).sum()", ("self.n = nn.BatchNorm1d(4)",), "tp=2", (Input("x", ("b", 4, 4)),)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_found_programs_are_equal_now(name: str) -> None:
    torch.set_num_threads(1)
    verdict = judge(FOUND[name].sketch())
    assert verdict.kind == "equal", f"{verdict.detail}\n{FOUND[name].sketch()}"


def test_lengths_that_a_number_of_the_model_ties_are_refused() -> None:
    """`math.sqrt` of a length is a number of the example's."""
    inputs = (*X, Input("y", ("b", "s", 8)))
    found = Found("z = torch.cat([x, y], 1)\nself.m(z) * math.sqrt(z.shape[1])", mesh="tp=2", inputs=inputs)
    verdict = judge(found.sketch())
    assert verdict.kind == "refused" and "is tied to other sizes by the model" in verdict.detail.splitlines()[0]


def test_a_sketch_prints_as_what_runs() -> None:
    sketch = replace(FOUND["one over the batch"].sketch(), pins=(("m.weight", "tp", "nd.S(0)"),))
    assert str(sketch).splitlines()[8:] == [
        "",
        "class Model(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        "        self.m = nn.Linear(8, 8)",
        "",
        "    def forward(self, x):",
        "        y = self.m(x)",
        "        return y + 1 / x.shape[0]",
        "",
        "",
        "torch.manual_seed(0)",
        "model = Model()",
        "inputs = dict(x=torch.randn(4, 6, 8))",
        "program = nd.compile(model, 'dp_shard=2', inputs, dynamic_dims={'x': {0: 'b', 1: 's'}},",
        '                     placements={"m.weight": {"tp": nd.S(0)}})',
        "print(nd.verify(program, model, seeds=1))",
    ]
