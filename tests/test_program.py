"""What `nd.compile` returns: source, graph, layouts, collectives, reasons, dumps; and that it touches nothing."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import fx, nn
from torch.distributed.tensor import Replicate, Shard

import ndcompile as nd
from ndcompile.pipeline import PIPELINE
from ndcompile.program import Program
from tests.models import Mlp, Stack, llama, tokens

MLP_ON_TP = """
class Mlp(Root):
    weights = {
        "compute": dict(
            up=weight("/up.weight"),                                      # tp S(0)
            up_bias=weight("/up.bias"),                                   # tp S(0)
            down_bias=weight("/down.bias"),                               # tp I
            down=weight("/down.weight"),                                  # tp S(1)
        ),
    }

    def forward(self, x):
        with self.gathered("compute") as w:
            down = self.compute(w, x)
        return (down,)

    @staticmethod
    def compute(w, x):
        up = F.linear(x, w.up, w.up_bias)                                         # tp S(1)   models.py:21
        gelu = F.gelu(up)
        part = partial_invariant(w.down_bias, tp)                                 # tp I→P   no communication
        down = F.linear(gelu, w.down, part)                                       # tp P   models.py:21
        down = all_reduce_invariant(down, tp)                                     # tp P→I   all_reduce ⇄ –
        return down
"""


def mlp(mesh: str = "tp=2") -> Program:
    return nd.compile(Mlp(), mesh, torch.randn(4, 12))


@cache
def stack(mesh: str = "dp_shard=2, tp=2", depth: int = 2) -> Program:
    return nd.compile(Stack(depth), mesh, tokens())


@cache
def llama_on(mesh: str) -> Program:
    return nd.compile(llama(), mesh)


# ---- the source ----------------------------------------------------------------------------------------------------


def test_an_mlp_on_tp_reads_as_column_then_row_with_one_bias_and_one_reduction() -> None:
    assert str(mlp()).endswith(MLP_ON_TP)


def test_the_source_is_python_that_imports_without_a_process_group_or_the_compiler(tmp_path: Path) -> None:
    (tmp_path / "emitted.py").write_text(str(stack()))
    code = "import sys, emitted\nprint(emitted.Stack.__name__, 'ndcompile.capture' in sys.modules)"
    folders = f"import sys; sys.path[:0] = {[str(tmp_path), str(Path(__file__).parents[1])]!r}\n"
    done = subprocess.run([sys.executable, "-c", folders + code], capture_output=True, text=True)
    assert done.stdout == "Stack False\n", done.stderr


def test_the_source_knows_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = set()
    for rank in ("0", "3"):
        monkeypatch.setenv("RANK", rank)
        sources.add(str(nd.compile(Stack(), "dp_shard=2, tp=2", tokens())))
    assert len(sources) == 1


def test_sizes_stand_in_the_table_only() -> None:
    source = str(nd.compile(Stack(2, 44, 52, 67), "dp_shard=2, tp=2", tokens(vocabulary=67)))
    (table,) = re.findall(r"# sizes, of whole dims\n((?:\w+ = \d+\n)+)", source)
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    numbers = {n.value for c in classes for n in ast.walk(c) if isinstance(n, ast.Constant) and type(n.value) is int}
    assert not numbers & {44, 52, 67, 22, 26, 34, 33}, "neither whole nor local sizes"
    assert {int(line.split(" = ")[1]) for line in table.splitlines()} <= {44, 52, 67}


def test_the_text_of_other_sizes_is_the_same_but_for_the_table_and_the_comments() -> None:
    small = nd.compile(Stack(2, 12, 20, 31), "dp_shard=2, tp=2", tokens())
    large = nd.compile(Stack(2, 48, 80, 101), "dp_shard=2, tp=2", tokens(vocabulary=101))
    assert without_sizes(small) == without_sizes(large)


def without_sizes(program: Program) -> str:
    code = re.sub(r"^(\w+) = \d+$", r"\1 = …", re.sub(r" *#.*", "", str(program)), flags=re.M)
    return re.sub(r"\bn\d+\b", "n", code)


def test_there_is_one_class_for_equal_blocks_whatever_the_depth() -> None:
    shallow, deep = str(stack(depth=2)), str(stack(depth=6))
    assert re.findall(r"^class (\w+)", deep, flags=re.M) == ["Residual", "Stack"]
    assert re.sub(r"\d+", "n", deep) == re.sub(r"\d+", "n", shallow)


class BareStack(nn.Module):
    """Blocks that take the model's own input, then each other's results."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.parametrize("placement", [nd.R, nd.S(0), nd.S(1)], ids=str)
def test_the_first_block_of_a_class_takes_its_input_as_the_later_ones_do(placement: object) -> None:
    pins = {"layers.*.up.weight": {"tp": placement}}
    program = nd.compile(BareStack(), "tp=2", torch.randn(4, 12), placements=pins)
    layouts = {str(n.meta["layout"]) for n in program.graph.graph.nodes if n.meta.get("port")}
    nodes = [(n.meta.get("block"), str(n.target)) for n in program.graph.graph.nodes]
    inside = [[target for block, target in nodes if block == f"layers.{i}"] for i in (0, 1)]
    assert len(layouts) == 1 and inside[0] == inside[1]
    assert re.findall(r"^class (\w+)", str(program), flags=re.M) == ["Mlp", "BareStack"]


# ---- what can be asked of it ---------------------------------------------------------------------------------------


def test_the_program_says_its_mesh_graph_and_layouts() -> None:
    program = mlp()
    assert program.mesh == nd.MeshSpec.parse("tp=2")
    assert isinstance(program.graph, fx.GraphModule) and isinstance(program.reference, fx.GraphModule)
    assert {name: str(layout) for name, layout in program.layouts.items()} == {
        "p_up_weight": "tp S(0)",
        "p_up_bias": "tp S(0)",
        "p_down_weight": "tp S(1)",
        "p_down_bias": "tp I",
        "x": "tp R",
        "linear": "tp S(1)",
        "gelu": "tp S(1)",
        "partial_invariant": "tp P",
        "linear_1": "tp P",
        "all_reduce_invariant": "tp I",
    }


def test_a_collective_says_where_it_comes_from_and_what_it_moves() -> None:
    gather = next(c for c in stack().collectives() if c.block == "layers.0" and c.axis == ("tp",))
    assert (gather.kind, gather.side, gather.dtype) == ("all_gather", "forward", torch.float32)
    assert gather.bytes == 12 * 4 * gather_tokens()
    assert gather.module == "layers.0.norm"
    assert gather.source == "models.py:33   return x + self.mlp(self.norm(x))"
    assert str(gather) == "all_gather(tp)"


def gather_tokens() -> int:
    from ndcompile.cost import NOMINAL

    return NOMINAL["b"] * NOMINAL["s"]


def test_the_collective_of_a_result_names_the_module_that_made_it() -> None:
    (reduction,) = mlp().collectives()
    assert (reduction.module, reduction.source) == ("down", "models.py:21   return self.down(F.gelu(self.up(x)))")


def test_explain_lists_the_alternatives_of_a_parameter_and_their_price() -> None:
    text = stack("tp=2").explain("layers.0.mlp.up.weight")
    first, second, *rows = text.splitlines()
    assert first == "layers.0.mlp.up.weight   tp S(0)"
    assert second == "  axis 'tp': S(0), of 3 that the rules allow"
    assert re.fullmatch(r"   → S\(0\) +\d+\.\d+ MB sent   \+0\.0 µs", rows[0])
    assert sorted(row[5:9].strip() for row in rows) == ["I", "S(0)", "S(1)"]
    assert all(float(re.findall(r"\+([\d.]+)", row)[0]) > 0 for row in rows[1:])


def test_explain_names_what_may_be_asked_of_where_the_name_is_unknown() -> None:
    with pytest.raises(nd.CompileError) as caught:
        mlp().explain("sideways")
    assert str(caught.value) == (
        "nothing in the program is called 'sideways'\n  try     a parameter, a module or a node of program.graph"
    )


# ---- pins ----------------------------------------------------------------------------------------------------------


def pinned(pins: dict[str, dict[str, object]]) -> Program:
    return nd.compile(Stack(), "tp=2", tokens(), placements=pins)


@pytest.mark.parametrize(("given", "expected"), [(Shard(1), "tp S(1)"), (Replicate(), "tp I"), (nd.S(1), "tp S(1)")])
def test_a_wildcard_pins_the_parameters_of_all_blocks_in_our_words_or_in_torchs(given: object, expected: str) -> None:
    program = pinned({"layers.*.mlp.up.weight": {"tp": given}})
    assert [str(program.parameters[f"layers.{i}.mlp.up.weight"].layout) for i in (0, 1)] == [expected] * 2
    assert re.findall(r"^class (\w+)", str(program), flags=re.M) == ["Residual", "Stack"]


def test_a_pin_on_a_module_is_on_its_result() -> None:
    free, program = stack("tp=2"), pinned({"head": {"tp": nd.R}})
    assert str(result_of(free, "head").meta["layout"]) == "tp S(2)"
    assert result_of(program, "head").meta["layout"].on("tp").whole


def result_of(program: Program, module: str) -> fx.Node:
    return [n for n in program.graph.graph.nodes if n.meta.get("module") == module and "move" not in n.meta][-1]


def test_a_pin_on_one_block_gives_it_a_class_of_its_own() -> None:
    program = pinned({"layers.1.mlp.up.weight": {"tp": nd.R}})
    assert re.findall(r"^class (\w+)", str(program), flags=re.M) == ["Residual", "Residual2", "Stack"]
    assert [str(program.parameters[f"layers.{i}.mlp.up.weight"].layout) for i in (0, 1)] == ["tp S(0)", "tp I"]


# ---- dumps, and what stays as it was -------------------------------------------------------------------------------


def test_dump_writes_each_steps_graph_as_python_headed_by_its_name_and_time(tmp_path: Path) -> None:
    nd.compile(Stack(), "tp=2", tokens(), dump=str(tmp_path / "new" / "folder"))
    steps = ["capture", *(step.name for step in PIPELINE), "localize_sizes"]
    written = sorted((tmp_path / "new" / "folder").iterdir())
    assert [path.name for path in written] == [f"{number:02}_{name}.py" for number, name in enumerate(steps)]
    for path, name in zip(written, steps, strict=True):
        text = path.read_text()
        assert re.match(rf'"""(The graph after )?{name}, which took \d+\.\d ms\."""\n|# {name}, ', text), text[:80]
        namespace: dict[str, object] = {"__name__": name}
        exec(compile(text, path.name, "exec"), namespace)
        assert "forward" in namespace or "Stack" in namespace


def test_a_dumped_reference_graph_runs(tmp_path: Path) -> None:
    model, x = Mlp(), torch.randn(4, 12)
    nd.compile(model, "tp=2", x, dump=tmp_path)
    namespace: dict[str, object] = {}
    exec((tmp_path / "00_capture.py").read_text(), namespace)
    forward = namespace["forward"]
    assert callable(forward)
    torch.testing.assert_close(forward(None, *model.parameters(), x)[0], model(x))


def test_compile_leaves_the_model_as_it_was() -> None:
    model = Stack().eval()
    model.tokens.weight.requires_grad_(False)
    before = {name: (id(p), p.clone(), p.requires_grad) for name, p in model.named_parameters()}
    keys = {name: set(vars(module)) for name, module in model.named_modules()}
    nd.compile(model, "dp_shard=2, tp=2", tokens(), precision=nd.Precision(compute=torch.bfloat16), float64=False)
    assert not model.training
    assert {name: set(vars(module)) for name, module in model.named_modules()} == keys
    for name, parameter in model.named_parameters():
        identity, value, trainable = before[name]
        assert id(parameter) == identity and parameter.grad is None and parameter.requires_grad == trainable
        assert torch.equal(parameter, value) and parameter.dtype == torch.float32


def test_a_model_on_meta_compiles_to_the_same_text() -> None:
    with torch.device("meta"):
        model = Stack()
    assert str(nd.compile(model, "dp_shard=2, tp=2", tokens())) == str(stack())
    assert all(p.is_meta for p in model.parameters())


# ---- collectives, pinned -------------------------------------------------------------------------------------------


def of_block(program: Program, block: str) -> Counter[str]:
    return Counter(f"{c.side} {c}" for c in program.collectives() if c.block == block)


@pytest.mark.parametrize("block", ["model.layers.0", "model.layers.1"])
def test_a_llama_block_on_tp_has_the_hand_made_optimum(block: str) -> None:
    program = llama_on("tp=2")
    assert of_block(program, block) == {
        "forward all_gather(tp)": 2,
        "backward reduce_scatter(tp)": 2,
        "forward reduce_scatter(tp)": 2,
        "backward all_gather(tp)": 2,
        "backward all_reduce(tp)": 1,
    }
    (norms,) = (c for c in program.collectives() if c.block == block and c.kind == "all_reduce")
    assert norms.bytes == 2 * 32 * 4, "the two norm weights, in one bucket"


def test_a_llama_block_on_dp_shard_is_one_gather_and_one_reduce_scatter() -> None:
    expected = {"forward all_gather(dp_shard)": 1, "backward reduce_scatter(dp_shard)": 1}
    assert of_block(llama_on("dp_shard=2"), "model.layers.1") == expected


def test_a_llama_block_on_dp_replicate_is_one_all_reduce_of_gradients() -> None:
    assert of_block(llama_on("dp_replicate=2"), "model.layers.1") == {"backward all_reduce(dp_replicate)": 1}


def test_an_mlp_on_tp_has_one_all_reduce_forward() -> None:
    model = nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 12))
    program = nd.compile(model, "tp=2", torch.randn(4, 12))
    assert [f"{c.side} {c}" for c in program.collectives()] == ["forward all_reduce(tp)"]


def test_the_duty_table_says_who_reduces_each_gradient() -> None:
    rows = {(duty.parameter, duty.axis): duty for duty in stack("dp_shard=2, tp=2").duties()}
    norm = rows["layers.0.norm.weight", "tp"]
    assert (norm.cotangent, norm.reductions) == (nd.P(), ("all_reduce",))
    up = rows["layers.0.mlp.up.weight", "tp"]
    assert up.cotangent.kind == "S" and up.reductions == ()
    assert rows["layers.0.mlp.up.weight", "dp_shard"].reductions == ("reduce_scatter",)


class Shadowed(nn.Module):
    """A layer that is called as the size of a dim is, and its result reshaped to that size."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.n20, self.vocab = nn.Linear(width, 20), nn.Embedding(12, width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.n20(self.vocab(ids)).unflatten(1, (2, -1)).flatten(0, 1).reshape(-1, 20)
        return y


@pytest.mark.parametrize("mesh", ["dp_shard=2", "dp_shard=2, tp=2"])
def test_a_layer_may_be_called_as_a_size_is(mesh: str) -> None:
    program = nd.compile(Shadowed(8), mesh, torch.zeros(4, 6, dtype=torch.long))
    assert "n20 = F.linear" in str(program) and "n20_ = 20" in str(program)
    assert nd.verify(program, seeds=1).equal


def test_a_range_without_a_step_is_written_without_one() -> None:
    class Places(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(9, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = x + self.table(torch.arange(3, 7)).sum(0) + self.table(torch.arange(3, 9, 2)).sum(0)
            return y

    text = str(nd.compile(Places(), "dp_shard=2", torch.zeros(4, 4)))
    assert "torch.arange(3, 7, device=x.device)" in text and "torch.arange(3, 9, 2, device=x.device)" in text


def test_whole_numbers_with_a_step_that_is_a_float() -> None:
    class Numbered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(12, 12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            one, two = (torch.arange(0, 6, step, dtype=torch.int64) for step in (1.0, 2.0))
            y: torch.Tensor = x + self.table(one).sum(0) + self.table(two).sum(0)
            return y

    model = Numbered()
    program = nd.compile(model, "tp=2", torch.zeros(4, 12))
    assert "torch.arange(0, 6, 2.0, dtype=torch.int64, device=x.device)" in str(program)
    assert nd.verify(program, model, seeds=1).equal


def test_what_begins_with_nothing_is_joined_without_it() -> None:
    """As a cache of keys that begins with `torch.tensor([])`."""

    class Joins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(12, 12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.cat([torch.tensor([]), self.layer(x)], dim=-2)
            return torch.cat([y, torch.tensor([]), x], dim=-2)

    model = Joins()
    program = nd.compile(model, "dp_shard=2", torch.zeros(4, 6, 12))
    assert str(program).count("torch.cat") == 1 and "literal" not in str(program)
    assert nd.verify(program, model, seeds=1).equal
