"""Bad input: the whole message, a ValueError, the same on every rank, without a hang, and the model left untouched."""

from __future__ import annotations

import random
import re
import tempfile
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ndcompile as nd
from ndcompile.demo.model import ByteGPT
from ndcompile.runtime import peers, private
from tests import ranks
from tests.models import Chunked, Mlp, Stack, seeded, tokens

X = torch.ones(4, 12)


def lines(*texts: str) -> str:
    return "\n".join(texts)


# ---- what compile refuses, without any process group ---------------------------------------------------------------


class Untouched:
    """Remembers a model; `check` says that nothing of it has changed."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.state = {name: (id(p), p.clone()) for name, p in model.state_dict(keep_vars=True).items()}
        self.modules = {name: (id(m), set(vars(m)), m.training) for name, m in model.named_modules()}

    def check(self) -> None:
        now = self.model.state_dict(keep_vars=True)
        assert {n: id(p) for n, p in now.items()} == {n: i for n, (i, _) in self.state.items()}
        assert all(torch.equal(now[name], value) for name, (_, value) in self.state.items())
        assert {n: (id(m), set(vars(m)), m.training) for n, m in self.model.named_modules()} == self.modules


def refusal(model: nn.Module, mesh: Any, inputs: Any = X, **options: Any) -> str:
    before = Untouched(model)
    with pytest.raises(ValueError) as caught:
        nd.compile(model, mesh, inputs, **options)
    before.check()
    return str(caught.value)


def without_line(text: str) -> str:
    return re.sub(r"\.py:\d+", ".py:LINE", text)


class HookInside(nn.Module):
    """Changes a gradient by a hook on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        y.register_hook(lambda gradient: gradient / 2)
        return y.relu()


def test_a_hook_on_a_value():
    assert without_line(refusal(HookInside(), "dp_shard=2")) == lines(
        "HookInside cannot be captured as one graph",
        "  source  test_bad_input.py:LINE   y.register_hook(lambda gradient: gradient / 2)",
        "  why     a hook changes or sees a gradient, and a graph has the forward alone",
        "  try     the same in the forward: x * a + (x - x * a).detach() has the value of x, and a times its gradient",
    )


def test_a_hook_on_a_parameter():
    hooks = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)
    for register in hooks:
        model = Mlp()
        register(model.up.weight, lambda gradient: None)
        assert refusal(model, "dp_shard=2") == lines(
            "parameter 'up.weight' has a hook",
            "  why     the emitted module has parameters of its own, whose gradients are reduced over ranks",
            "  try     remove the hook",
            "  try     put it on the parameter of the emitted module, where that is what is meant",
        )


class Lucky(nn.Module):
    """Draws by Python, or by numpy: in a graph it would be one number for good."""

    def __init__(self, drawn: Callable[[], float]) -> None:
        super().__init__()
        self.layer, self.drawn = nn.Linear(12, 12), drawn

    def forward(self, x: Tensor) -> Tensor:
        return x if self.drawn() < 0.1 else self.layer(x)


def test_numbers_that_are_drawn_by_others_than_torch():
    for drawn in (
        lambda: random.random(),
        lambda: float(numpy.random.rand()),
    ):  # a method would be copied with its state
        assert refusal(Lucky(drawn), "dp_shard=2") == lines(
            "Lucky cannot be captured as one graph",
            "  why     it draws numbers by Python's random or by numpy, and each call would have those of the trace",
            "  try     torch.rand, torch.randn or dropout, which no mesh changes",
            "  try     0 as the probability, if layers are skipped at random",
        )


class Places(nn.Module):
    """Takes places that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        return self.layer(x) + places.unsqueeze(-1)


def test_an_input_without_a_batch():
    x, places = torch.ones(4, 6, 12), torch.ones(6)
    text = without_line(refusal(Places(), "dp_shard=2", (x, places)))
    assert text.splitlines()[0] == "Places cannot be traced with the example inputs"
    assert text.splitlines()[-2:] == [
        "  try     dynamic_dims={'places': {}}, if dim 0 is not the batch, which is 4 in other inputs of the example",
        "  try     inputs with which the model runs on one device",
    ]
    assert nd.compile(Places(), "dp_shard=2", (x, places), dynamic_dims={"places": {}}).parameters


class Counted(nn.Module):
    """Makes numbers of the sizes of a dim."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.tokens, self.dim = nn.Embedding(19, 8), dim

    def forward(self, ids: Tensor) -> Tensor:
        rows = torch.ones(int(ids.shape[self.dim])).unsqueeze(1 - self.dim)
        return (self.tokens(ids) * rows.unsqueeze(-1)).square().mean()


def test_a_batch_of_which_the_model_makes_a_number():
    text = refusal(Counted(0), "dp_shard=2", torch.ones(4, 6, dtype=torch.long))
    what, source, *rest = text.splitlines()
    assert what == "the batch size of input 'ids' is fixed by the model"
    assert source.endswith("rows = torch.ones(int(ids.shape[self.dim])).unsqueeze(1 - self.dim)")
    assert rest == [
        "  why     a data-parallel rank has another batch size than the example's",
        "  try     use x.size(0) in the model instead of a number",
    ]


def test_a_length_of_which_the_model_makes_a_number():
    text = refusal(Counted(1), "cp=2", torch.ones(4, 6, dtype=torch.long))
    what, source, *rest = text.splitlines()
    assert what == "axis 'cp' has nothing to shard"
    assert source.endswith("rows = torch.ones(int(ids.shape[self.dim])).unsqueeze(1 - self.dim)")
    assert rest == [
        "  why     this line makes a number of a length, so it is the example's in the whole program",
        "  try     x.size(1) as it is, without int(…)",
        "  try     a mesh without cp",
    ]


class Called:
    """An object that is called, and holds a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function


class Around(nn.Module):
    """Reaches its own buffer through an object that the compiler does not look into."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)
        self.register_buffer("scale", torch.tensor(2.0))
        self.called = Called(lambda y: y * self.scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.called.function(self.layer(x))


def test_a_buffer_that_is_reached_around_its_module():
    assert without_line(refusal(Around(), "dp_shard=2")) == lines(
        "forward reaches 'scale' without going through the module that has it",
        "  source  test_bad_input.py:LINE   return self.called.function(self.layer(x))",
        "  why     it would be a constant of the program: without a gradient, and never another",
        "  try     self.scale in the forward of its module",
    )


class Unregistered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scales = nn.Linear(12, 12), [nn.Parameter(torch.ones(12))]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scales[0]


def test_a_parameter_in_a_list():
    assert without_line(refusal(Unregistered(), "dp_shard=2")) == lines(
        "the model holds 'lifted_tensor_0' [12], which takes a gradient and is no parameter",
        "  source  test_bad_input.py:LINE   return self.layer(x) * self.scales[0]",
        "  why     it would be a constant of the program, without a gradient",
        "  try     nn.Parameter, or nn.ParameterList for several",
        "  try     .detach(), if it is not learned",
    )


def test_halves_need_tp():
    assert refusal(Stack(), "dp_shard=2", tokens(4), halves=True) == lines(
        "halves=True on the mesh 'dp_shard=2', which has no axis 'tp'",
        "  why     half of a batch is computed while collectives over tp travel with the other half",
        "  try     a mesh with tp, for example 'tp=2'",
        "  try     halves=False",
    )


def test_halves_need_blocks():
    assert refusal(Mlp(), "tp=2", halves=True) == lines(
        "halves=True, and the model has no blocks",
        "  why     a block is a child of an nn.ModuleList, and what is computed in halves is a block",
        "  try     halves=False",
    )


WHOLE_NUMBER = "  try  a whole number of ranks, at least 1, or -1 for the rest"
MESHES: dict[str, tuple[Any, str]] = {
    "unknown": ("dp=2", lines("unknown axis 'dp' in mesh 'dp=2'", "  try  dp_replicate, dp_shard, cp, tp")),
    "misspelt": ("tpp=2", lines("unknown axis 'tpp' in mesh 'tpp=2'", "  try  'tp'")),
    "repeated": ("tp=2, tp=2", lines("axis 'tp' is given twice in mesh 'tp=2, tp=2'", "  try  one size for each axis")),
    "zero": ("tp=0", lines("axis 'tp' has size 0 in mesh 'tp=0'", WHOLE_NUMBER)),
    "negative": ("tp=-2", lines("axis 'tp' has size -2 in mesh 'tp=-2'", WHOLE_NUMBER)),
    "a fraction": ({"tp": 2.5}, lines("axis 'tp' has size 2.5 in mesh '{'tp': 2.5}'", WHOLE_NUMBER)),
    "a word": ("tp=two", lines("axis 'tp' has size 'two' in mesh 'tp=two'", WHOLE_NUMBER)),
    "two rests": (
        "dp_shard=-1, tp=-1",
        lines("-1 stands twice in mesh 'dp_shard=-1, tp=-1'", "  try  -1 for one axis only: it takes the rest"),
    ),
}


@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_that_cannot_be_meant(name: str) -> None:
    mesh, expected = MESHES[name]
    assert refusal(Mlp(), mesh) == expected


def test_a_mesh_of_another_product_than_the_world() -> None:
    assert refusal(Mlp(), "dp_shard=2, tp=2", world_size=8) == lines(
        "mesh 'dp_shard=2, tp=2' has 4 ranks, but the world has 8",
        "  why  every rank must have one place on the mesh",
        "  try  sizes whose product is 8; one of them may be -1 (the rest)",
    )


def test_heads_that_do_not_divide() -> None:
    ids = {"ids": torch.ones(4, 8, dtype=torch.long)}
    assert refusal(ByteGPT(width=36, depth=2, heads=6, context=8), "tp=4", ids) == lines(
        "6 attention heads do not divide over 4 ranks of axis 'tp'",
        "  node    %scaled_dot_product_attention   blocks.0.attention",
        "  source  model.py:24   y = F.scaled_dot_product_attention(q, k, v, is_causal=True)",
        "  why     every rank would repeat the whole attention",
        "  try     tp = 2, 3, 6",
    )


class Linear(nn.Module):
    """A layer, for models that do something with its result."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)


class Widens(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.float())


class Branches(Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if y.sum() > 0:
            return y
        return -y


class Asserts(Linear):
    def forward(self, x: Tensor) -> Tensor:
        assert bool((x >= 0).all()), "below 0"
        return self.layer(x)


class Counts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.bincount((x > 0).long().reshape(-1), minlength=3)


class Picks(Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y[y > 0]


class Reads(Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y * y.sum().item()


class Factorises(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.qr(self.layer(x)).Q


class Shuffles(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[:, torch.randperm(12)]


def line_of(code: str) -> str:
    """`file:number   code` of a line of this file."""
    number = next(i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.strip() == code)
    return f"test_bad_input.py:{number}   {code}"


def test_control_flow_on_values() -> None:
    assert refusal(Branches(), "tp=2") == lines(
        "Branches cannot be captured as one graph",
        f"  source  {line_of('if y.sum() > 0:')}",
        "  why     its control flow depends on the values of tensors",
        "  try     torch.where instead of if on a tensor",
    )


def test_an_assert_on_values() -> None:
    assert refusal(Asserts(), "tp=2") == lines(
        "Asserts cannot be captured as one graph",
        "  source  " + line_of('assert bool((x >= 0).all()), "below 0"'),
        "  why     its control flow depends on the values of tensors",
        "  try     the assert outside of forward",
        "  try     python -O, which leaves asserts out",
    )


WIDER = lines(
    "linear gets float32 and bfloat16",
    "  node    %linear = aten.linear.default   layer",
    f"  source  {line_of('return self.layer(x.float())')}",
    "  why     torch multiplies operands of one dtype only, and Precision(compute=…) casts parameters and inputs alone",
    "  try     a cast in the model, x.to(self.layer.weight.dtype)",
    "  try     example inputs in the dtype of the parameters",
)


def test_products_of_two_dtypes() -> None:
    """torch refuses them where they run, but not on meta, where a model is traced."""
    low = nd.Precision(compute=torch.bfloat16)
    assert refusal(Widens(), "tp=2", precision=low) == WIDER
    assert refusal(nn.Linear(12, 12), "tp=2", precision=nd.Precision(torch.bfloat16, cast_inputs=False)).startswith(
        "linear gets float32 and bfloat16\n"
    )
    assert refusal(nn.Linear(12, 12), "tp=2", X.bfloat16()).startswith("linear gets bfloat16 and float32\n")
    for right in (None, low):
        (plan,) = nd.compile(nn.Linear(12, 12), "tp=2", X, precision=right).manifest.input_plans
        assert plan.dtype == "torch.float32"


def test_a_count_whose_length_may_depend_on_values() -> None:
    assert refusal(Counts(), "tp=2") == lines(
        "the shape of aten.bincount.default's result depends on the values of tensors",
        "  node    %bincount",
        f"  source  {line_of('return torch.bincount((x > 0).long().reshape(-1), minlength=3)')}",
        "  why     the parts that ranks hold must have sizes that are known before",
        "  try     torch.where(mask, x, y), or a mask that is multiplied in",
    )


def test_a_shape_that_depends_on_values() -> None:
    assert refusal(Picks(), "tp=2") == lines(
        "the shape of aten.index.Tensor's result depends on the values of tensors",
        "  node    %index",
        f"  source  {line_of('return y[y > 0]')}",
        "  why     the parts that ranks hold must have sizes that are known before",
        "  try     torch.where(mask, x, y), or a mask that is multiplied in",
    )


def test_a_number_that_is_read_out_of_a_tensor() -> None:
    assert refusal(Reads(), "tp=2") == lines(
        "forward reads a number out of a tensor",
        "  node    %item",
        f"  source  {line_of('return y * y.sum().item()')}",
        "  why     it would be that of the part that a rank holds, and is not known before",
        "  try     the tensor itself, without .item()",
    )


def test_an_op_without_a_rule() -> None:
    assert refusal(Factorises(), "tp=2") == lines(
        "no rule for aten.linalg_qr.default",
        "  node    %linalg_qr = aten.linalg_qr.default",
        f"  source  {line_of('return torch.linalg.qr(self.layer(x)).Q')}",
        "  why     without one the compiler cannot know which of its dims may be sharded",
        '  try     nd.register_rule("aten.linalg_qr.default", "… -> …")',
        "  try     write it with ops that have a rule",
    )


def test_random_numbers_of_its_own() -> None:
    assert refusal(Shuffles(), "tp=2") == lines(
        "forward draws random numbers by aten.randperm.default",
        "  node    %randperm = aten.randperm.default",
        f"  source  {line_of('return self.layer(x)[:, torch.randperm(12)]')}",
        "  why     each rank would draw others than one device does",
        "  try     pass them to forward as an input",
        "  try     torch.rand or torch.randn, which no mesh changes",
    )


def test_inputs_that_the_model_does_not_take() -> None:
    assert refusal(Mlp(), "tp=2", {"y": X}) == lines(
        "the example inputs do not fit Mlp.forward: missing a required argument: 'x'",
        "  try     example_inputs for forward(x: 'Tensor') -> 'Tensor'",
    )
    assert refusal(Mlp(), "tp=2", torch.ones(4, 13)) == lines(
        "Mlp cannot be traced with the example inputs",
        "  source  models.py:21   return self.down(F.gelu(self.up(x)))",
        "  why     RuntimeError: a and b must have same reduction dim, but got [s77, 13] X [12, 20].",
        "  try     inputs with which the model runs on one device",
    )


def test_example_inputs_are_needed_where_no_config_says_them() -> None:
    assert refusal(Mlp(), "tp=2", None) == lines(
        "example inputs are needed to compile Mlp",
        "  why     its forward(x: 'Tensor') -> 'Tensor' does not say the inputs' shapes and dtypes",
        "  try     example_inputs={...} with tensors as one call takes them; their sizes mean nothing",
    )


PINS: dict[str, tuple[Mapping[str, Any], str]] = {
    "matches nothing": (
        {"up.wieght": {"tp": nd.R}},
        lines(
            "the pin 'up.wieght' matches no parameter and no module",
            "  try     'up.weight'",
            "  try     'down.weight'",
        ),
    ),
    "contradicts": (
        {"up.weight": {"tp": nd.S(0)}, "*.weight": {"tp": nd.R}},
        lines(
            "pins contradict each other: 'up.weight' is S(0) and R on axis 'tp'",
            "  why     the last of the pins that match it is '*.weight'",
            "  try     one pin for it, or narrower wildcards",
        ),
    ),
    "is impossible": (
        {"up.weight": {"tp": nd.S(5)}},
        lines(
            "'up.weight' cannot be S(5) on axis 'tp'",
            "  why     it can be I, S(0), S(1)",
            "  try     another placement for this pin",
        ),
    ),
    "is impossible with another": (
        {"up.weight": {"tp": nd.S(1)}, "up": {"tp": nd.S(1)}},
        lines(
            "no program on axis 'tp' has all pinned placements",
            "  why     'up.weight' is pinned S(1); 'up' is pinned S(1)",
            "  try     fewer pins: program.explain(name) shows what each costs",
        ),
    ),
    "is on a data axis": (
        {"up.weight": {"dp_shard": nd.S(0)}},
        lines(
            "the pin 'up.weight' is on axis 'dp_shard'",
            "  why     data axes and cp are forced: inputs are sharded, parameters whole where they are used",
            "  try     a pin on tp",
        ),
    ),
    "is on no axis": (
        {"up.weight": {"sideways": nd.S(0)}},
        lines("the pin 'up.weight' names axis 'sideways', which no mesh has", "  try     dp_shard, tp"),
    ),
    "names no axis": (
        {"up.weight": nd.S(0)},
        lines("the pin 'up.weight' is S(0), which names no axis", '  try     {"up.weight": {"tp": nd.S(0)}}'),
    ),
    "is no placement": (
        {"up.weight": {"tp": "shard"}},
        lines("the pin 'up.weight' has 'shard' for a placement", "  try     nd.S(0)", "  try     nd.R"),
    ),
}


@pytest.mark.parametrize("name", PINS)
def test_a_pin_that(name: str) -> None:
    pins, expected = PINS[name]
    assert refusal(Mlp(), "dp_shard=2, tp=2", placements=pins) == expected


def test_a_pin_on_an_axis_that_the_mesh_has_at_size_one_changes_nothing() -> None:
    pinned = nd.compile(Mlp(), "dp_shard=2", X, placements={"up.weight": {"tp": nd.S(0)}})
    assert str(pinned) == str(nd.compile(Mlp(), "dp_shard=2", X))


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "forward": lambda module: module.register_forward_hook(print),
    "forward pre": lambda module: module.register_forward_pre_hook(print),
    "backward": lambda module: module.register_full_backward_hook(print),
    "backward pre": lambda module: module.register_full_backward_pre_hook(print),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_that_is_there_before(kind: str) -> None:
    model = Mlp()
    HOOKS[kind](model.up)
    assert refusal(model, "tp=2") == lines(
        "module 'up' has a hook",
        "  why     the emitted module has no inner calls that a hook could see",
        "  try     remove the hook",
        "  try     write its effect into forward",
    )


class OwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, y: Tensor) -> Tensor:
        return (y * self.scale).mean()


def test_a_loss_fn_that_does_not_name_its_inputs() -> None:
    for loss_fn, shown in ((lambda *args: args[0], "(*args)"), (lambda y, **batch: y, "(y, **batch)")):
        assert refusal(Mlp(), "tp=2", loss_fn=loss_fn) == lines(
            f"loss_fn{shown} does not name its inputs",
            "  why     the first parameter takes the model's outputs, and each other one is an input by its name",
            "  try     def loss_fn(outputs, labels): …",
        )


def test_a_loss_fn_with_parameters() -> None:
    assert refusal(Mlp(), "tp=2", loss_fn=OwnLoss()) == lines(
        "loss_fn OwnLoss has parameters or buffers of its own",
        "  why     only those of the model are placed on the mesh",
        "  try     a model that calls it in forward and returns the loss",
    )


def test_a_loss_fn_for_a_forward_of_the_object() -> None:
    model = Mlp()
    model.forward = lambda x: x  # type: ignore[method-assign]
    assert refusal(model, "tp=2", loss_fn=lambda y: y) == lines(
        "forward of this Mlp was replaced on the object",
        "  why     loss_fn extends the forward of the class",
        "  try     a subclass with that forward",
    )


def test_an_option_that_is_none() -> None:
    expected = lines("outputs='gathered' is no option", "  try     'sharded' or 'local'")
    assert refusal(Mlp(), "tp=2", outputs="gathered") == expected


def test_parallelize_outside_torchrun_says_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    expected = lines(
        "there is no process group, and this process was not started by torchrun",
        "  why     a parallel model needs one process a rank",
        "  try     torchrun --nproc-per-node 2 your_script.py",
        "  try     nd.compile(model, mesh, …) to see the program without running it",
    )
    for call in (lambda: nd.parallelize(Mlp(), "tp=2", X), lambda: nd.load("program.py")):
        with pytest.raises(nd.CompileError) as caught:
            call()
        assert str(caught.value) == expected


# ---- what ranks refuse together ------------------------------------------------------------------------------------


def parallel_mlp(mesh: str = "tp=2", **options: Any) -> nd.ParallelModule:
    return nd.parallelize(seeded(Mlp), mesh, X, **options)


def wrong_world(rank: int) -> None:
    parallel_mlp("dp_shard=2, tp=2")


def odd_sequence(rank: int) -> None:
    pins = {f"layers.{i}": {"tp": nd.S(1)} for i in (0, 1)}
    nd.parallelize(seeded(Stack), "tp=2", tokens(), placements=pins)(**tokens(length=7))


def unequal_batches(rank: int) -> None:
    parallel_mlp("dp_shard=2")(torch.ones(4 - rank, 12))


def unequal_inputs(rank: int) -> None:
    parallel_mlp()(X + rank)


class Divided(nn.Module):
    """Divides by a count that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor, count: Tensor) -> Tensor:
        return self.mlp(x).sum() / count


def unequal_counts(rank: int) -> None:
    parallel = nd.parallelize(seeded(Divided), "dp_shard=2", dict(x=X, count=torch.tensor(4)))
    parallel(X[:2], torch.tensor(2 + rank))


def unequal_meshes(rank: int) -> None:
    parallel_mlp("tp=2" if rank else "dp_shard=2")


def unequal_pins(rank: int) -> None:
    parallel_mlp(placements={"up.weight": {"tp": nd.S(rank)}})


def unequal_weights(rank: int) -> None:
    model = Mlp()
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.0)
    nn.init.constant_(model.down.weight, float(rank))
    nd.parallelize(model, "tp=2", X)


def meta_on_one_rank(rank: int) -> None:
    with torch.device("meta" if rank else "cpu"):
        model = Mlp()
    nd.parallelize(model, "tp=2", X, init="broadcast")


def compile_error_on_one_rank(rank: int) -> None:
    nd.parallelize(seeded(Mlp), "tp=2", X, placements={"up.weight": {"tp": nd.S(5)}} if rank else None)


def missing_input_on_one_rank(rank: int) -> None:
    model = parallel_mlp()
    model(X) if rank else model()


def another_dtype(rank: int) -> None:
    parallel_mlp()(X.double())


def another_shape(rank: int) -> None:
    parallel_mlp()(torch.ones(4, 13))


def another_argument(rank: int) -> None:
    parallel_mlp()(X, 3)


def replaced_parameter(rank: int) -> None:
    model = parallel_mlp()
    model(X)
    model.up.weight = nn.Parameter(torch.ones(20, 12))
    model(X)


def added_parameter(rank: int) -> None:
    model = parallel_mlp()
    model.up.extra = nn.Parameter(torch.ones(1))
    model(X)


def cast_parameters(rank: int) -> None:
    parallel_mlp().to(torch.bfloat16)(X.bfloat16())


def hook_added(rank: int) -> None:
    model = parallel_mlp()
    model(X)
    model.up.register_forward_hook(print)
    model(X)


def trained_though_frozen_before(rank: int) -> None:
    model = seeded(Mlp)
    model.up.requires_grad_(False)
    parallel = nd.parallelize(model, "tp=2", X)
    parallel(X)
    parallel.requires_grad_(True)
    with torch.no_grad():
        parallel(X)
    parallel(X)


def an_input_with_a_new_gradient(rank: int) -> None:
    parallel_mlp()(X.clone().requires_grad_())


def second_derivative(rank: int) -> None:
    x = X.clone().requires_grad_()
    parallel = nd.parallelize(seeded(Mlp), "dp_shard=2", x)
    torch.autograd.grad(parallel(x).sum(), x, create_graph=True)


def eval_of_a_part(rank: int) -> None:
    model = parallel_mlp()
    model(X)
    model.up.eval()
    model(X)


def optimizer_of_the_given_model(rank: int) -> None:
    model = seeded(Mlp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    nd.parallelize(model, "dp_shard=2", X)(X + rank).sum().backward()
    optimizer.step()


def unequal_batches_later(rank: int) -> None:
    """Both ranks' sizes change, and again, to the same; then to others."""
    model = parallel_mlp("dp_shard=2")
    for size in (4, 3, 4, 2 - rank):
        model(torch.ones(size, 12) + rank)


def another_batch_on_one_rank(rank: int) -> None:
    """The other rank's call, which has the size of the one before, would be under way by now."""
    model = parallel_mlp("dp_shard=2")
    model(X + rank)
    if rank:
        patience = private.store().timeout  # type: ignore[attr-defined]
        private.store().set_timeout(timedelta(seconds=1))
        try:
            model(X[:1])
        finally:
            private.store().set_timeout(patience)


def unequal_copies(rank: int) -> None:
    with torch.device("meta"):
        model = Mlp()
    parallel = nd.parallelize(model, "tp=2", X)
    torch.manual_seed(rank)
    for parameter in parallel.parameters():
        nn.init.normal_(parameter)
    parallel(X)


def parallelized_twice(rank: int) -> None:
    nd.parallelize(parallel_mlp(), "tp=2", X)


class Shifted(Mlp):
    """Has a buffer that no state dict holds."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.ones(12), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.shift)


def meta_buffer(rank: int) -> None:
    with torch.device("meta"):
        model = Shifted()
    nd.parallelize(model, "tp=2", X)


def buffers_without_a_model(rank: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        nd.compile(seeded(Shifted), "tp=2", X).save(f"{folder}/program.py")
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            nd.load("program.py")


def unknown_init(rank: int) -> None:
    parallel_mlp(init="random")


def recorded_without_a_gpu(rank: int) -> None:
    parallel_mlp("dp_replicate=2", cuda_graph=True)


def unknown_transport(rank: int) -> None:
    parallel_mlp(transport="copies")


def unequal_transports(rank: int) -> None:
    parallel_mlp(transport="symmetric" if rank else "nccl")


def several_hosts(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "_host", lambda: (f"host-{rank}", ""))
        parallel_mlp(transport="symmetric")


def odd_batch(rank: int) -> None:
    parallel = nd.parallelize(seeded(Stack), "tp=2", tokens(4), halves=True)
    parallel(**tokens(3))


class LongWay(nn.Module):
    """Scales what is longer than 16, or of more than 6 samples, in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.mlp(x)
        return y if x.shape[1] <= 16 and x.shape[0] <= 6 else y * 3


LONG_WAY = {"x": {0: "b", 1: "s"}}


def another_way(rank: int) -> None:
    parallel = nd.parallelize(seeded(LongWay), "dp_shard=2", torch.ones(4, 10, 12), dynamic_dims=LONG_WAY)
    parallel(torch.ones(3, 16, 12) + rank)
    parallel(torch.ones(2, 17, 12))


def no_whole_chunks(rank: int) -> None:
    parallel = nd.parallelize(seeded(Chunked), "dp_shard=2", torch.ones(4, 16, 12), dynamic_dims=LONG_WAY)
    parallel(torch.ones(3, 24, 12) + rank)
    parallel(torch.ones(2, 20, 12))


def another_way_for_a_larger_batch(rank: int) -> None:
    parallel = nd.parallelize(seeded(LongWay), "dp_shard=2", torch.ones(4, 10, 12), dynamic_dims=LONG_WAY)
    parallel(torch.ones(4, 10, 12) + rank)


def missing_file(rank: int) -> None:
    nd.load("nowhere.py")


SAME_PROGRAM = (
    "  why  every rank must run the same program",
    "  try  the same model, mesh, options and library versions on every rank",
)
REPLACED = (
    "  why  the program uses the tensors that it was bound to",
    "  try  copy_(…) under torch.no_grad(), load_state_dict, or the change before nd.parallelize",
)
ON_RANKS: dict[Callable[[int], None], str | list[str]] = {
    wrong_world: lines(
        "mesh 'dp_shard=2, tp=2' has 4 ranks, but the world has 2",
        "  why  every rank must have one place on the mesh",
        "  try  sizes whose product is 2; one of them may be -1 (the rest)",
    ),
    another_way: lines(
        "for inputs of this size the model's forward takes another way: s = 17",
        "  why  it asked whether s <= 16, and was traced where that holds",
        "  try  example_inputs of this size, for a program of its own",
    ),
    no_whole_chunks: lines(
        "for inputs of this size the model's forward takes another way: s = 20",
        "  why  it asked whether s % 8 == 0, and was traced where that holds",
        "  try  example_inputs of this size, for a program of its own",
    ),
    another_way_for_a_larger_batch: lines(
        "for inputs of this size the model's forward takes another way: b = 8",
        "  why  it asked whether b <= 6, and was traced where that holds",
        "  try  example_inputs of this size, for a program of its own",
    ),
    odd_batch: lines(
        "input 'ids' has 3 samples on a rank, which are not two halves",
        "  why  the program was compiled with halves=True",
        "  try  4 samples a rank, or 2",
    ),
    odd_sequence: lines(
        "input 'ids' has size 7 at dim 1, which does not divide by 2",
        "  why  axis 'tp' cuts it into 2 equal parts",
        "  try  size 6 or 8",
        "  try  nd.parallelize(…, pad_inputs=True), for sequences",
    ),
    unequal_batches: lines(
        "input 'x' is [3, 12] on rank 1 and [4, 12] on rank 0",
        "  why  every data-parallel rank must have a batch of the same size",
        "  try  drop_last=True, or pad the last batch",
    ),
    unequal_inputs: lines(
        "input 'x' differs between ranks 0 and 1, which share one data-parallel batch",
        "  why  ranks that differ only in tp work on the same samples",
        "  try  seed the loader by the data-parallel index, not by the rank",
    ),
    unequal_counts: lines(
        "input 'count' differs between ranks 0 and 1",
        "  why  it has no batch, so the program takes it to be the same on every rank",
        "  try  the global one: a count of tokens is the sum over data-parallel ranks",
    ),
    unequal_meshes: lines(
        "programs differ between ranks 0 and 1",
        "  rank 0   Mlp on dp_shard=2",
        "  rank 1   Mlp on tp=2",
        *SAME_PROGRAM,
    ),
    unequal_pins: lines(
        "programs differ between ranks 0 and 1",
        "  rank 0   up.weight [20, 12] torch.float32, dim 0 on tp",
        "  rank 1   up.weight [20, 12] torch.float32, dim 1 on tp",
        *SAME_PROGRAM,
    ),
    unequal_weights: lines(
        "the values of 'down.weight' differ between ranks 0 and 1",
        "  rank 0   …",
        "  rank 1   …",
        "  why  each rank shards its own copy, so all copies must be equal",
        "  try  torch.manual_seed(0) before the model is made on every rank, or init='broadcast'",
    ),
    meta_on_one_rank: lines(
        "models differ between ranks 0 and 1",
        "  rank 0   with values",
        "  rank 1   on the meta device",
        "  why  each rank gives its own copy's values",
        "  try  values on every rank, or the meta device on every rank",
    ),
    compile_error_on_one_rank: [
        lines(
            "rank 1 failed: 'up.weight' cannot be S(5) on axis 'tp'",
            "  why     it can be I, S(0), S(1)",
            "  try     another placement for this pin",
        ),
        lines(
            "'up.weight' cannot be S(5) on axis 'tp'",
            "  why     it can be I, S(0), S(1)",
            "  try     another placement for this pin",
        ),
    ],
    missing_input_on_one_rank: [
        "Mlp.forward: missing a required argument: 'x'",
        "rank 0 failed: Mlp.forward: missing a required argument: 'x'",
    ],
    another_dtype: "input 'x' is torch.float64 of 2 dims, the model was compiled for torch.float32 of 2",
    another_shape: "input 'x' has size 13 at dim 1, the model takes 12",
    another_argument: "Mlp.forward: too many positional arguments",
    replaced_parameter: lines("parameter 'up.weight' was replaced after the model was compiled", *REPLACED),
    added_parameter: lines("parameter 'up.extra' was replaced after the model was compiled", *REPLACED),
    cast_parameters: lines("parameter 'up.weight' was replaced after the model was compiled", *REPLACED),
    hook_added: lines(
        "module 'up' has a hook",
        "  why  the emitted module makes no inner calls that a hook could see",
        "  try  a hook on the whole model, or write its effect into the model before it is compiled",
    ),
    trained_though_frozen_before: lines(
        "parameter 'up.weight' requires a gradient, and did not when the model was compiled",
        "  why  the program reduces no gradient on the way to what was frozen",
        "  try  requires_grad_(True) before nd.parallelize; freeze it afterwards, and train it at any time",
    ),
    an_input_with_a_new_gradient: lines(
        "input 'x' requires a gradient, and did not in the example inputs",
        "  why  the program reduces no gradient on the way to it",
        "  try  example_inputs in which it requires one; a call without is fine then",
        "  try  x.detach(), if none is wanted",
    ),
    second_derivative: lines(
        "create_graph=True in a backward through a parallel model",
        "  why  what its backward sends has no derivative, so that a gradient of its gradient would lack parts",
        "  try  the same without create_graph; a penalty on gradients needs a model that is not parallelized",
    ),
    eval_of_a_part: lines(
        "module 'up' is in eval(), and the whole model in train()",
        "  why  a program computes all of the model in one mode, that of the whole",
        "  try  the module's own mode before nd.parallelize, which then is part of the program",
        "  try  train() of the whole model, for its parts too",
    ),
    optimizer_of_the_given_model: lines(
        "step of an optimizer over the parameters of the model that nd.parallelize was given",
        "  why  they have no gradients: the parallel model has parameters of its own, which are trained",
        "  try  the optimizer after nd.parallelize, over the parallel model's parameters()",
    ),
    unequal_batches_later: lines(
        "inputs differ in size between ranks: 'x' [1, 12] and 'x' [2, 12]",
        "  why  every data-parallel rank must have a batch of the same size",
        "  try  drop_last=True, or pad the last batch",
    ),
    another_batch_on_one_rank: [
        "no error",
        lines(
            "inputs have other sizes than in the call before, and on other ranks they have not: 'x' [1, 12]",
            "  why  every data-parallel rank must have a batch of the same size",
            "  try  drop_last=True, or pad the last batch",
        ),
    ],
    unequal_copies: lines(
        "parameter 'down.bias' differs between ranks 0 and 1, which hold copies of one tensor",
        "  why  each changed its own, and equal gradients keep copies as far apart as they are",
        "  try  equal values before nd.parallelize",
        "  try  load_state_dict of one state on all ranks, after values were made on the mesh",
    ),
    parallelized_twice: lines(
        "the model is a parallel one already",
        "  why     its parameters lie on a mesh, and it computes a program that was compiled",
        "  try     the model that it was made from, which nd.parallelize leaves as it was",
    ),
    meta_buffer: lines(
        "buffer 'shift' is on the meta device, and in no state dict",
        "  why     parameters get their values from load_state_dict, and this buffer from the model's __init__ alone",
        "  try     with accelerate.init_empty_weights(): in place of torch.device('meta'), which leaves buffers",
        "  try     the module that has the buffer made anew, outside of torch.device('meta')",
    ),
    buffers_without_a_model: lines(
        "program.py has buffers, 'shift' among them, and no model was given to take them from",
        "  why     without a model parameters are zeros until load_state_dict, and not all buffers are in a state dict",
        "  try     nd.load(path, model); its parameters may be on the meta device",
    ),
    unknown_init: lines("init='random' is no option", "  try     'check' or 'broadcast'"),
    recorded_without_a_gpu: lines(
        "cuda_graph=True, and this rank has no GPU of its own",
        "  why     a CUDA graph is recorded from a GPU's streams",
        "  try     cuda_graph=False, or a process group over NCCL with a GPU for each rank",
    ),
    unknown_transport: lines("transport='copies' is no option", "  try     'nccl' or 'symmetric'"),
    unequal_transports: lines(
        "transports differ between ranks 0 and 1",
        "  rank 0   nccl",
        "  rank 1   symmetric",
        "  why  a rank that sends by collectives and one that copies wait for each other",
        "  try  the same transport=… on every rank",
    ),
    several_hosts: lines(
        "transport='symmetric' on ranks of several hosts",
        "  why     ranks copy from each other's memory, which one host has",
        "  try     transport='nccl'",
    ),
    missing_file: lines("there is no file nowhere.py", "  try     the path that program.save was given"),
}


def refusals_of_this_rank() -> dict[str, str]:
    found = {}
    for case in ON_RANKS:
        try:
            case(dist.get_rank())
            found[case.__name__] = "no error"
        except ValueError as error:
            found[case.__name__] = str(error)
    return found


@pytest.fixture(scope="module")
def refusals() -> list[dict[str, str]]:
    return ranks.run(2, refusals_of_this_rank, timeout=60)


@pytest.mark.parametrize("case", ON_RANKS, ids=lambda case: case.__name__)
def test_all_ranks_refuse(case: Callable[[int], None], refusals: list[dict[str, str]]) -> None:
    expected = ON_RANKS[case]
    wanted = [expected] * 2 if isinstance(expected, str) else expected
    assert [re.sub(r"\b[0-9a-f]{12}\b", "…", theirs[case.__name__]) for theirs in refusals] == wanted


def untouched_by_parallelize() -> None:
    for init in ("check", "broadcast"):
        model = seeded(Stack)
        before = Untouched(model)
        parallel = nd.parallelize(model, "tp=2", tokens(), init=init)
        parallel(**tokens())["loss"].backward()
        before.check()
        assert all(p.grad is None for p in model.parameters())
        refused = Untouched(model)
        with pytest.raises(ValueError):
            nd.parallelize(model, "tp=2", tokens(), placements={"nothing": {"tp": nd.R}})
        refused.check()


def test_parallelize_leaves_the_model_untouched() -> None:
    ranks.run(2, untouched_by_parallelize)
