"""Equal blocks are traced once and kept twice: which are equal, what a run is, and that nothing is lost by it."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import ndcompile as nd
from ndcompile import checks
from ndcompile.blocks import blocks_of
from ndcompile.borders import Borders
from ndcompile.errors import CheckError
from ndcompile.mesh import MeshSpec
from ndcompile.program import Program
from tests.equivalence.deep import DEEP, WIDTH, Inner, Layer, Stack
from tests.equivalence.deep import layers as many


def batch(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(4, WIDTH, dtype=dtype), "target": torch.randn(4, WIDTH, dtype=dtype)}


def compiled(model: nn.Module, mesh: str = "dp_shard=2, tp=2", **options: Any) -> Program:
    return nd.compile(model.double(), mesh, batch(), float64=True, **options)


def root(program: Program) -> list[str]:
    """The lines of the emitted root's forward that call blocks, with its loops."""
    text = str(program)
    forward = text[text.index("(Root)") :].split("def forward", 1)[1].split("@staticmethod")[0]
    return [line.strip() for line in forward.splitlines() if "block" in line or "for " in line]


def gradients(callee: nn.Module, model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = callee(**inputs)["loss"]
    loss.backward()
    return loss.detach(), {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", [name for name in DEEP if name != "alternating"])
def test_the_reference_graph_computes_what_the_untouched_model_computes(name: str) -> None:
    """Loss and every gradient, in float64: what was traced once is right at each of its places."""
    torch.manual_seed(0)
    model = DEEP[name]().double()
    reference = compiled(model).one_device(model)
    loss, wanted = gradients(model, model, batch())
    found, given = gradients(reference, model, batch())
    assert torch.equal(loss, found)
    assert wanted.keys() == given.keys()
    for key in wanted:
        torch.testing.assert_close(given[key], wanted[key], rtol=1e-12, atol=1e-14)


LOOPS = {
    "residuals outside": ["down = self.block(\"layers.0\")(x)", "for block in self.list(\"layers\", 1, 5):",
                          "down = block(add)"],
    "called again": ["add = self.block(\"layers.0\")(x)", "for _ in range(4):", "add = self.block(\"layers.0\")(add)"],
    "cycles": [
        'for block in self.list("layers", 0, 2, kind=Layer):', "add = block(add)",
        'add_2 = self.block("layers.2", Layer)(add)',
        'add_4 = self.block("layers.0", Layer2)(add_3)',
        'for block in self.list("layers", 1, 3, kind=Layer2):', "add_4 = block(add_4)",
        'add_5 = self.block("layers.0", Layer3)(unsqueeze)',
    ],
    "alternating": [
        "add = self.block(\"layers.0\")(x, fold(rng, 0))",
        "for i, (block, block_2) in enumerate(zip(self.list(\"layers\", 1, 6, 2), self.list(\"layers\", 2, 7, 2))):",
        "add_2 = block(add, fold(rng, 1 + 2 * i))",
        "add = block_2(add_2, fold(rng, 2 + 2 * i))",
    ],
    "numbered": ["add = self.block(\"layers.0\")(x)", "add_2 = self.block(\"layers.1\")(add)",
                 "add_3 = self.block(\"layers.2\")(add_2)", "add_4 = self.block(\"layers.3\")(add_3)"],
}  # fmt: skip
"""The first layer stands alone where its input needs no gradient and all later ones' does."""


@pytest.mark.parametrize("name", LOOPS)
def test_the_root_loops_over_a_run(name: str) -> None:
    assert root(compiled(DEEP[name]())) == LOOPS[name]


def test_a_block_that_is_called_in_several_ways_has_a_class_for_each() -> None:
    """Each call names its own; what carries no gradient is not detached once more."""
    text = str(compiled(DEEP["cycles"]()))
    table = text[text.index("blocks = {") :].split("}")[0].splitlines()[1:-1]
    assert [line.strip() for line in table] == [
        '"layers[0:1]": (Layer, Layer2, Layer3),',
        '"layers[1:3]": (Layer, Layer2),',
    ]
    without = text[text.index("class Layer(") : text.index("class Layer2(")]
    with_ = text[text.index("class Layer2(") : text.index("class Layer3(")]
    assert re.findall(r"= (\w+)\.detach\(\)", without) == ["norm", "up", "down"] and "detach" not in with_


@pytest.mark.parametrize("name", ["numbered", "counted", "skips", "collected"])
def test_what_is_no_run_is_kept_whole(name: str) -> None:
    program = compiled(DEEP[name]())
    assert len(program.folded.graph.nodes) == len(program.graph.graph.nodes)


def test_depth_does_not_change_what_the_passes_see() -> None:
    small, large = (compiled(Stack(many(depth))) for depth in (4, 12))
    assert len(small.folded.graph.nodes) == len(large.folded.graph.nodes)
    assert len(large.graph.graph.nodes) > 2 * len(small.graph.graph.nodes)
    numbers = re.compile(r"layers\.0 … \d+|\[0:\d+\]|, 1, \d+|1:\d+")
    assert numbers.sub("", str(small)) == numbers.sub("", str(large))
    assert set(large.parameters) == {name for name, _ in Stack(many(12)).named_parameters()}
    layouts = {name: p.layout for name, p in large.parameters.items()}
    assert all(layouts[f"layers.{i}.up.weight"] == layouts["layers.1.up.weight"] for i in range(12))


def test_the_whole_graph_names_every_block() -> None:
    program = compiled(Stack(many(6)))
    found = {n.meta["module"] for n in program.graph.graph.nodes if "linear" in str(n.target)}
    assert found == {f"layers.{i}.{name}" for i in range(6) for name in ("up", "down")} | {"head"}
    gathers = [c for c in program.collectives() if c.kind == "all_gather" and c.axis == ("dp_shard",)]
    assert [c.block for c in gathers] == [*(f"layers.{i}" for i in range(6)), None]


def test_a_pin_on_one_layer_takes_it_out_of_the_run() -> None:
    program = compiled(Stack(many(6)), placements={"layers.3.up.weight": {"tp": nd.R}})
    pinned = [
        name for name, p in program.parameters.items() if name.endswith("up.weight") and p.layout.on("tp") == nd.I
    ]
    assert pinned == ["layers.3.up.weight"]
    assert "layers.4" in str(program)


def test_two_rounds_that_differ_are_noticed() -> None:
    graph = compiled(Stack(many(5))).folded
    for node in graph.graph.nodes:
        if node.meta.get("place") and node.meta["place"].round == 1:
            node.meta["kind"] = 99
    with pytest.raises(CheckError, match="two rounds of a run of blocks do not do the same"):
        checks.rounds_are_equal(graph, MeshSpec.parse("dp_shard=2, tp=2"))


# ---- which calls are alike -----------------------------------------------------------------------------------------


def bodies(model: nn.Module) -> int:
    """How many blocks are traced, of those that are called with a value that takes a gradient."""
    borders = Borders(model, blocks_of(model))
    inputs = batch(torch.float32) | {"x": torch.randn(4, WIDTH, requires_grad=True)}
    with borders.marked():
        torch.export.export(model, (), inputs, strict=False)
    return len(borders.bodies)


class Held:
    """A plain object that a block holds."""

    def __init__(self, number: float) -> None:
        self.number, self.other = number, {"a": [1, 2]}


class Holding(Layer):
    """Reads a number from an object, or does not."""

    def __init__(self, held: Any, read: bool = True) -> None:
        super().__init__()
        self.held, self.read, self.place = held, read, 0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (self.held.number if self.read else 1)


def changed(count: int, change: Callable[[Any, int], None], kind: Callable[[], nn.Module] = Layer) -> Stack:
    made = many(count, kind)
    for i, layer in enumerate(made):
        change(layer, i)
    return Stack(made)


def eps(layer: Any, i: int) -> None:
    layer.norm.eps = 1e-5 * (1 + (i == 2))


def number_nobody_reads(layer: Any, i: int) -> None:
    layer.place = i


def eval_of_one(layer: Any, i: int) -> None:
    layer.train(i != 1)


def frozen(layer: Any, i: int) -> None:
    layer.up.weight.requires_grad_(i != 3)


def another_module(layer: Any, i: int) -> None:
    if i == 1:
        layer.norm = nn.RMSNorm(WIDTH)


def without_bias(layer: Any, i: int) -> None:
    if i == 1:
        layer.up = nn.Linear(WIDTH, 16, bias=False)


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (lambda: Stack(many(4)), 1),
        (lambda: changed(4, number_nobody_reads), 1),
        (lambda: changed(4, eps), 2),
        (lambda: changed(4, eval_of_one), 2),
        (lambda: changed(4, frozen), 2),
        (lambda: changed(4, another_module), 2),
        (lambda: changed(4, without_bias), 2),
        (lambda: Stack([Layer(), Inner(), Layer(), Inner()]), 2),
        (lambda: Stack([Holding(Held(2.0)) for _ in range(4)]), 1),
        (lambda: Stack([Holding(Held(2.0 + i // 2)) for i in range(4)]), 2),
        (lambda: Stack([Holding(Held(2.0 + i), read=False) for i in range(4)]), 1),
        (DEEP["counted"], 4),
        (DEEP["tied layers"], 2),
    ],
    ids=[
        "equal", "a number nobody reads", "another eps", "one in eval", "one frozen", "another class inside",
        "one without a bias", "another forward", "equal objects", "objects that differ", "objects that nobody reads",
        "a counter that all share", "tied to a neighbour",
    ],
)  # fmt: skip
def test_a_block_is_traced_again_only_where_it_may_differ(model: Callable[[], nn.Module], count: int) -> None:
    assert bodies(model()) == count


class Noting(Layer):
    """Sets an attribute of its own while it runs."""

    def forward(self, x: Tensor) -> Tensor:
        self.latest = x.shape
        return super().forward(x)


class Looking(Layer):
    """Looks at all that it is."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * len(self.__dict__)


class Drawing(Layer):
    """Draws its factor as it runs, from a generator whose state is not in its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.random.random()


@pytest.mark.parametrize("kind", [Noting, Looking, Drawing])
def test_what_cannot_be_followed_is_traced_each_time(kind: Callable[[], nn.Module]) -> None:
    assert bodies(Stack(many(3, kind))) == 3


class Handed(Layer):
    """Takes a tensor from a place that its call does not show."""

    box: list[Tensor] = []  # noqa: RUF012

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + Handed.box[0]


class Handing(Stack):
    """Puts another tensor there before each call."""

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            Handed.box[:] = [x * 2]
            x = layer(x)
        return x


def test_a_tensor_from_nowhere_makes_every_call_traced() -> None:
    torch.manual_seed(0)
    model = Handing(many(4, Handed)).double()
    reference = compiled(model).one_device(model)
    loss, wanted = gradients(model, model, batch())
    found, given = gradients(reference, model, batch())
    torch.testing.assert_close(found, loss, rtol=1e-12, atol=0)
    assert all(torch.allclose(given[k], wanted[k], rtol=1e-12, atol=1e-14) for k in wanted)


def test_the_model_is_left_as_it_was() -> None:
    model = Stack(many(3))
    before = {cls: dict(vars(cls)) for cls in (nn.Module, Layer, Stack)}
    compiled(model)
    assert {cls: dict(vars(cls)) for cls in before} == before
    with pytest.raises(nd.CompileError):
        nd.compile(Stack([nn.Linear(3, 4)]), "tp=2", batch())
    assert {cls: dict(vars(cls)) for cls in before} == before


def test_a_folded_graph_is_still_a_graph() -> None:
    program = compiled(Stack(many(5)))
    assert isinstance(program.graph, fx.GraphModule) and isinstance(program.local_graph, fx.GraphModule)
    program.graph.graph.lint()
    assert sum("stands_for" in n.meta for n in program.folded.graph.nodes) == 6
    assert not any("stands_for" in n.meta for n in program.graph.graph.nodes)


class Shifted(Layer):
    """Reads a buffer of its own."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.shift)


class Trained(Stack):
    """Its first block takes a gradient back too, so that all rounds are equal."""

    def run(self, x: Tensor) -> Tensor:
        return super().run(x * self.shift)


@pytest.mark.parametrize("depth", [2, 3])
def test_equal_blocks_read_each_its_own_buffer_also_when_all_were_equal_at_compile_time(depth: int) -> None:
    program = compiled(Trained(many(depth, Shifted)), "tp=2")
    loop, call = root(program)
    assert loop == 'for block in self.list("layers"):' and call.endswith('block(mul, block.buffer("shift"))')
    assert nd.verify(program, seeds=1, microbatches=1), "verify draws another value for each buffer"
