"""Capture: the reference graph computes what the untouched model computes on one device, results and gradients."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from transformers.modeling_outputs import CausalLMOutputWithPast

import ndcompile as nd
from tests.models import seeded

Calls = Callable[[nn.Module], Any]


def float64(tree: Any) -> Any:
    return pytree.tree_map(lambda v: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v, tree)


def call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def gradients(model: nn.Module, result: Any) -> dict[str, Tensor | None]:
    """Of the sum of everything in the result."""
    model.zero_grad()
    flows = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor) and x.requires_grad]
    torch.stack([x.sum() for x in flows]).sum().backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def captures(model: nn.Module, inputs: Any, mesh: str = "", **options: Any) -> nd.Program:
    """Compile, then compare with the model, in float64, the structure and the gradients too."""
    model, inputs = model.double(), float64(inputs)
    program = nd.compile(model, mesh, inputs, float64=True, **options)
    reference = program.one_device(model)
    found, expected = call(reference, inputs), call(model, inputs)
    assert pytree.tree_structure(found) == pytree.tree_structure(expected)
    for mine, its in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
        torch.testing.assert_close(mine, its) if isinstance(its, Tensor) else None
        assert isinstance(its, Tensor) or mine == its
    ours, its_own = gradients(model, found), gradients(model, expected)
    for name, gradient in its_own.items():
        torch.testing.assert_close(ours[name], gradient, msg=name)
    return program


X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
IDS = torch.tensor([[1, 2, 3, 4, 5], [5, 4, 3, 2, 1], [0, 0, 8, 8, 7], [6, 1, 6, 1, 6]])


class Layers(nn.Module):
    """Two layers for models that use them in some way."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Linear(6, 6)
        self.two = nn.Linear(6, 6)


# ---- parameters, buffers, attributes -------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(9, 6)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.tokens(ids))


def test_tied_parameters_are_one_with_one_gradient() -> None:
    program = captures(Tied(), {"ids": IDS})
    assert list(program.parameters) == ["tokens.weight"]
    assert len([n for n in program.graph.graph.nodes if n.meta.get("role") == "parameter"]) == 1


class Holds(Layers):
    """A persistent buffer, one that is not, and plain tensors: two of one shape, in a list, in a dict, in the text."""

    kept: Tensor
    lost: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.randn(6))
        self.register_buffer("lost", torch.randn(6), persistent=False)
        self.first, self.second = torch.randn(6), torch.randn(6)
        self.listed, self.named = [torch.randn(6)], {"a": torch.randn(6)}

    def forward(self, x: Tensor) -> Tensor:
        literal = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], dtype=x.dtype)
        y = self.one(x * self.kept + self.lost) * self.second - self.first
        return y * self.listed[0] + self.named["a"] * literal


def test_buffers_and_plain_tensors_keep_their_values() -> None:
    captures(Holds(), X)


class ByFunction(Layers):
    """Functions that hold the module or a part of it: in a closure, in a default, in a function that one holds."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.ends = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.randn(6))
        self.register_buffer("shift", torch.tensor(0.5))
        times = lambda x: x * self.scale  # noqa: E731

        def ended(x: Tensor, layers: ByFunction = self) -> Tensor:
            return layers.two(times(x)) * layers.ends

        self.ended, self.listed = ended, [functools.partial(lambda x, y: x + y * self.shift, y=self.ends)]

    def forward(self, x: Tensor) -> Tensor:
        return self.listed[0](self.ended(self.one(x)))


class Held:
    """An object of Python's that holds a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function


class ByOthers(Layers):
    """Parameters in a list, where another tensor has their shape, and in an object that nobody looks into."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.ends = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.randn(6))
        self.plain, self.listed = torch.randn(6), [self.ends]
        self.held = Held(lambda x: x * self.scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.held.function(self.one(x)) * self.listed[0] + self.plain * self.ends


class InBlocks(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("kind", [ByFunction, ByOthers])
def test_what_is_reached_around_a_module_is_what_the_module_has(kind: type[nn.Module]) -> None:
    """Functions to a copy are the original's, and to the tracer a parameter in a list is a constant: its gradient would
    be lost, and no comparison of programs could see it.
    """
    for model in (kind(), InBlocks(kind)):
        assert set(captures(model, X, "tp=2").parameters) == set(dict(model.named_parameters()))


def test_functions_hold_the_model_also_where_it_has_a_loss() -> None:
    model = ByFunction()
    program = nd.compile(model, "dp_shard=2", X, loss_fn=lambda y: y.square().mean())
    program.one_device(model)(X).backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    model(X).square().mean().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, msg=name)


class Registers(Layers):
    """Keeps what it made for the next call, as rotary embeddings and biases of positions do."""

    places: Tensor
    ends: Tensor
    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ends", None)
        self.register_buffer("steps", None)

    def forward(self, x: Tensor) -> Tensor:
        self.register_buffer("places", torch.arange(x.size(1), dtype=x.dtype), persistent=False)
        self.register_buffer("ends", self.places + 1)
        self.steps = self.places + 2
        return (self.one(x) + self.places) * self.ends / self.steps


def test_a_buffer_that_a_forward_registers_is_made_in_each_call() -> None:
    """The tracer writes it to what stands at its place among the inputs, here to `x`."""
    program = captures(Registers(), X)
    assert not [node for node in program.reference.graph.nodes if "copy_" in str(node.target)]
    assert not program.manifest.updates


class Large(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.randn(20, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) + self.table[0]


def test_a_large_tensor_that_is_no_buffer_is_refused_with_the_call_that_helps() -> None:
    with pytest.raises(nd.CompileError) as error:
        nd.compile(Large(), "tp=2", X)
    assert (
        str(error.value)
        == """\
the model holds 'table' [20, 6], which is neither parameter nor buffer
  why     it is too large for text
  try     register_buffer(name, tensor, persistent=False)"""
    )


class Makes(Layers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x) + torch.arange(x.size(1), dtype=x.dtype)
        return y * torch.ones(6, dtype=x.dtype) + torch.full((6,), 0.5, dtype=x.dtype)


def test_tensors_that_are_made_without_a_device_are_made_where_the_inputs_are() -> None:
    captures(Makes(), X)


class Frozen(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.one.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x))


def test_frozen_parameters_have_no_gradient() -> None:
    captures(Frozen(), X)


# ---- modes and regions ---------------------------------------------------------------------------------------------


class Dropped(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.one(x), 0.5, self.training)


def test_train_and_eval_are_two_captures() -> None:
    model = Dropped()
    trained, evaluated = nd.compile(model.train(), "", X), nd.compile(model.eval(), "", X)
    assert "dropout(" in str(trained) and "dropout(" not in str(evaluated)
    assert (trained.manifest.training, evaluated.manifest.training) == (True, False)
    torch.testing.assert_close(evaluated.one_device(model)(X), model(X))
    zeros = (trained.one_device(model)(X) == 0).float().mean().item()
    assert 0.2 < zeros < 0.8


class NoGrad(Layers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        with torch.no_grad():
            z = (self.two(y) * 2).relu()
        return y * z + self.two(x)


class GradInside(Layers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.one(x)
            with torch.enable_grad():
                z = self.two(y)
        return z + y


class Detached(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) * self.two(x).detach()


class Data(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) * self.two(x).data


class Inference(Layers):
    """No gradient passes an inference mode, which torch.export forgets."""

    @torch.inference_mode()
    def seen(self, x: Tensor) -> Tensor:
        return self.two(x)

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            y = self.two(x)
            with torch.inference_mode(False):
                z = self.one(x)
        return self.one(x) * y.clone() + z * self.seen(x).clone()


@pytest.mark.parametrize("kind", [NoGrad, GradInside, Detached, Data, Inference])
@pytest.mark.parametrize("mesh", ["", "tp=2"])
def test_no_gradient_passes_where_the_model_stops_it(kind: type[nn.Module], mesh: str) -> None:
    captures(kind(), X, mesh)


class Mixed(Layers):
    """Ops that autocast lowers, ops that it keeps in float32, and ops that take both dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        low = self.one(x)
        wide = torch.cat([low, x], 1)
        attended = F.softmax(low @ self.two(x).t(), -1) @ self.two(x)
        mixed = self.norm(low) + x * attended
        return {"wide": wide, "mixed": mixed, "loss": F.mse_loss(attended, y) + F.cross_entropy(low, y.argmax(-1))}


def same(found: Any, expected: Any) -> None:
    for mine, its in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
        assert mine.dtype == its.dtype
        exact = its.dtype == torch.bfloat16
        torch.testing.assert_close(mine, its, rtol=0 if exact else 1e-6, atol=0 if exact else 1e-6)


def test_the_autocast_around_compile_is_resolved_as_torch_does() -> None:
    model, inputs = Mixed(), (X, X.roll(1, 0))
    with torch.autocast("cpu", torch.bfloat16):
        program = nd.compile(model, "", inputs)
        expected = model(*inputs)
    reference = program.one_device(model)
    same(reference(*inputs), expected)
    found = gradients(model, {k: v for k, v in reference(*inputs).items() if k == "loss"})
    for name, gradient in gradients(model, expected["loss"]).items():
        mine = found[name]
        if gradient is not None and mine is not None:
            assert (mine - gradient).norm() <= 2**-8 * gradient.norm(), f"{name}: more than one rounding to bfloat16"


class Region(Mixed):
    """Autocast inside forward, without one inside, and a no-grad region inside."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            found = super().forward(x, y)
            with torch.autocast("cpu", enabled=False):
                exact = self.one(x)
            with torch.no_grad():
                scale = self.two(x)
        return found | {"exact": exact, "scaled": self.one(x) * scale}


def test_an_autocast_region_inside_forward_is_resolved_as_torch_does() -> None:
    model, inputs = Region(), (X, X.roll(1, 0))
    same(nd.compile(model, "", inputs).one_device(model)(*inputs), model(*inputs))


def test_a_region_without_autocast_stays_without_one_under_another() -> None:
    model, inputs = Region(), (X, X.roll(1, 0))
    with torch.autocast("cpu", torch.bfloat16):
        program, expected = nd.compile(model, "", inputs), model(*inputs)
    same(program.one_device(model)(*inputs), expected)
    assert expected["exact"].dtype == torch.float32 and expected["scaled"].dtype == torch.bfloat16


class WhereInputsAre(Layers):
    """Autocast on or off for the device of a tensor, as rotary embeddings do it."""

    def __init__(self, enabled: bool) -> None:
        super().__init__()
        self.enabled = enabled

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=self.enabled):
            exact = self.one(x)
        return exact * self.two(x)


def test_autocast_is_off_for_the_device_of_the_inputs() -> None:
    model = WhereInputsAre(False)
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            same(nd.compile(model, "", X).one_device(model)(X), model(X))


def test_autocast_is_not_on_for_a_device_that_is_not_known() -> None:
    with pytest.raises(nd.CompileError) as caught:
        nd.compile(WhereInputsAre(True), "", X)
    what, source, *rest = str(caught.value).splitlines()
    assert what == "WhereInputsAre cannot be captured as one graph"
    assert "with torch.autocast(x.device.type" in source
    assert rest == [
        "  why     what autocast does depends on the device, and it is on for the device of a tensor that is traced",
        '  try     the device by its name: torch.autocast("cuda", dtype=torch.bfloat16)',
        "  try     torch.autocast around nd.compile",
    ]


def test_the_emitted_source_casts_and_the_manifest_remembers_the_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        program = nd.compile(Mixed(), "tp=2", (X, X))
    assert ".to(torch.bfloat16)" in str(program)
    assert program.manifest.autocast == torch.bfloat16
    assert nd.compile(Mixed(), "tp=2", (X, X)).manifest.autocast is None


# ---- inputs --------------------------------------------------------------------------------------------------------


class Takes(Layers):
    """Positional, keyword, None, int, bool and str inputs."""

    def forward(
        self, x: Tensor, y: Tensor | None = None, times: int = 2, flag: bool = True, mode: str = "sum"
    ) -> Tensor:
        z = self.one(x) * times
        z = z if y is None else z + self.two(y)
        return (z if flag else -z).sum(1) if mode == "sum" else z


@pytest.mark.parametrize(
    "inputs",
    [
        X,
        (X,),
        (X, X * 2),
        (X, None, 3),
        {"x": X, "y": None, "times": 3, "flag": False},
        {"mode": "none", "flag": False, "y": X * 2, "x": X},
    ],
    ids=["one", "tuple", "two", "constant", "keywords", "keywords in another order"],
)
def test_inputs_come_as_a_call_gives_them(inputs: Any) -> None:
    captures(Takes(), inputs)


def test_constants_are_baked_in_so_that_another_value_is_refused() -> None:
    model = Takes()
    reference = nd.compile(model, "", {"x": X, "times": 3, "mode": "none"}).one_device(model)
    torch.testing.assert_close(reference(X, times=3, mode="none"), model(X, times=3, mode="none"))
    torch.testing.assert_close(reference(X, None, 3, True, "none"), model(X, times=3, mode="none"))
    with pytest.raises(ValueError) as caught:
        reference(X, times=4, mode="none")
    assert str(caught.value) == (
        "input 'times' = 4 is not one that the model was compiled for\n"
        "  why  it was compiled with x as tensors and {'times': 3, 'mode': 'none'}\n"
        "  try  example_inputs that hold 'times'"
    )
    with pytest.raises(ValueError, match="input 'y' = a tensor of"):
        reference(X, X, 3, True, "none")


def test_a_constant_that_is_left_out_is_not_the_one_that_was_baked_in() -> None:
    model = Takes()
    reference = nd.compile(model, "", {"x": X, "times": 3}).one_device(model)
    with pytest.raises(ValueError, match=re.escape("input 'times' = 2 is not one that the model was compiled for")):
        reference(X)


class Nested(Layers):
    def forward(self, parts: dict[str, Any], *more: Tensor, scale: Tensor) -> Tensor:
        return self.one(parts["a"]) + self.two(parts["b"][0]) * scale + sum(more)


def test_inputs_may_be_nested() -> None:
    captures(Nested(), {"parts": {"a": X, "b": [X * 2]}, "scale": X})


class Variadic(Layers):
    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        return self.one(x) + self.two(more[0]) * more[1]


def test_any_number_of_positional_inputs() -> None:
    captures(Variadic(), (X, X * 2, X * 3))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(9, 9)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.tokens(input_ids).flatten(0, 1), labels.flatten())


def test_one_tensor_passed_twice_is_two_inputs() -> None:
    program = captures(Pair(), {"input_ids": IDS, "labels": IDS})
    model = Pair().double()
    other = {"input_ids": IDS, "labels": IDS.flip(0)}
    torch.testing.assert_close(program.one_device(model)(**other), model(**other))


@pytest.mark.parametrize("shape", [(8, 8), (1, 5), (4, 1), (1, 1), (4, 6), (9, 9)], ids=str)
def test_example_sizes_mean_nothing(shape: tuple[int, int]) -> None:
    """Batch equal to sequence, sizes of 1, sizes that the model has too: the program is the same."""
    program = captures(Tied(), {"ids": torch.zeros(shape, dtype=torch.long)}, "dp_shard=2, tp=2")
    assert str(program) == str(nd.compile(Tied().double(), "dp_shard=2, tp=2", {"ids": IDS}, float64=True))
    model = Tied().double()
    torch.testing.assert_close(program.one_device(model)(ids=IDS), model(ids=IDS))


class Patches(nn.Module):
    """Square images, cut in four square patches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(48, 8)

    def forward(self, images: Tensor) -> Tensor:
        b = images.size(0)
        patches = images.reshape(b, 3, 2, 4, 2, 4).permute(0, 2, 4, 1, 3, 5).reshape(b, 4, 48)
        return self.embed(patches).mean(1)


@pytest.mark.parametrize("size", [8, 2])
def test_square_images_in_a_batch_of_any_size(size: int) -> None:
    program = captures(Patches(), {"images": torch.randn(size, 3, 8, 8)})
    model, images = Patches().double(), torch.randn(5, 3, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(program.one_device(model)(images=images), model(images=images))


class TwoLengths(nn.Module):
    """Attention of one sequence's tokens to another's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(9, 6)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x, y = self.tokens(ids), self.tokens(labels)
        places = torch.arange(labels.shape[1], device=ids.device)
        return F.softmax(y @ x.transpose(1, 2), -1) @ x * places[:, None]


@pytest.mark.parametrize("mesh", ["", "tp=2", "dp_shard=2, tp=2"])
def test_sequences_of_two_lengths_are_two_symbols(mesh: str) -> None:
    program = captures(TwoLengths(), {"ids": IDS, "labels": IDS[:, :3]}, mesh)
    assert [plan.dims for plan in program.manifest.input_plans] == [("b", "s"), ("b", "t")]
    model, longer = TwoLengths().double(), {"ids": IDS, "labels": torch.cat([IDS, IDS], 1)}
    torch.testing.assert_close(program.one_device(model)(**longer), model(**longer))


def test_one_length_is_one_length() -> None:
    program = captures(TwoLengths(), {"ids": IDS, "labels": IDS})
    program.manifest.check([IDS, IDS])
    with pytest.raises(ValueError) as caught:
        program.manifest.check([IDS, IDS[:, :3]])
    assert str(caught.value) == (
        "input 'labels' has size 3 at dim 1, where 'ids' has 5\n"
        "  why  the program was compiled for one size 's' of both\n"
        "  try  example inputs of different sizes, or dynamic_dims={'labels': {1: '…'}}"
    )


class UsesSizes(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.one(x).sum(0) / x.size(0) + x.shape[1] ** -0.5


class PerToken(nn.Module):
    """A sum divided by counts that start as the float 0."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        total, count = torch.zeros((), device=x.device), 0.0
        for _ in range(2):
            total, count = total + self.inner(x).pow(2).sum(), count + x.shape[0]
        return total / count


@pytest.mark.parametrize("mesh", ["", "dp_shard=2", "tp=2"])
def test_a_size_as_a_float_is_that_size(mesh: str) -> None:
    captures(seeded(PerToken), X, mesh)


class Valued(nn.Module):
    """Tensors of values, made in the forward with and without a device, and a list of places."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)[:, [2, 0, -2]]
        least = torch.tensor(0.25, device=x.device, dtype=x.dtype)
        scale = torch.as_tensor([1.0, 2.0, 3.0], device=x.device)
        return torch.where(x > least, x * scale, x * torch.tensor([3.0, 4.0, 5.0]) + torch.scalar_tensor(2.0))


@pytest.mark.parametrize("mesh", ["", "dp_shard=2", "tp=3"])
def test_tensors_of_values_keep_them_whatever_device_they_name(mesh: str) -> None:
    captures(seeded(Valued), X, mesh)


class Repeats(nn.Module):
    """Copies along old dims and new ones, as often as the batch is large; the plain names of expand and transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        row = self.inner(x)[0:1].repeat(x.shape[0], 2)
        many = self.inner.weight.T.repeat(x.shape[0], 1, 3)
        return (
            row.sum(-1, keepdim=True) * torch.broadcast_to(self.inner.bias, row[:, :4].shape)
            + many.tanh().sum(1)[:, :4]
        )


@pytest.mark.parametrize("mesh", ["", "dp_shard=2", "tp=2", "dp_shard=2, tp=2"])
def test_copies_are_an_expanded_dim(mesh: str) -> None:
    program = captures(seeded(Repeats), X, mesh)
    model, x = seeded(Repeats).double(), torch.randn(8, 6, dtype=torch.float64)
    torch.testing.assert_close(program.one_device(model)(x), model(x))


def test_sizes_in_the_model_are_the_whole_ones() -> None:
    program = captures(UsesSizes(), X)
    model, x = UsesSizes().double(), torch.randn(7, 6, dtype=torch.float64)
    torch.testing.assert_close(program.one_device(model)(x), model(x))


# ---- results -------------------------------------------------------------------------------------------------------


@dataclass
class Written:
    """A result that torch knows how to take apart."""

    logits: Tensor
    extra: Tensor | None = None


torch.export.register_dataclass(Written, serialized_type_name="tests.test_capture.Written")


@dataclass
class Unknown:
    logits: Tensor


class Named(NamedTuple):
    first: Tensor
    second: Tensor


def output_of_transformers(model: Layers, x: Tensor) -> Any:
    return CausalLMOutputWithPast(loss=model.one(x).sum(), logits=model.two(x))


RESULTS: dict[str, Callable[[Layers, Tensor], Any]] = {
    "tensor": lambda m, x: m.one(x),
    "dict": lambda m, x: {"b": m.one(x), "a": m.two(x)},
    "tuple": lambda m, x: (m.one(x), m.two(x)),
    "list with constants": lambda m, x: [m.one(x), 3, "text", None],
    "nested with None": lambda m, x: {"a": m.one(x), "none": None, "more": (m.two(x), [{"x": x}])},
    "dataclass": lambda m, x: Written(m.one(x)),
    "named tuple": lambda m, x: Named(m.one(x), m.two(x)),
    "ModelOutput": output_of_transformers,
    "one value twice": lambda m, x: (lambda y: (y, y))(m.one(x)),
    "an input": lambda m, x: (m.one(x), x),
    "integers": lambda m, x: (m.one(x), x.argmax(-1)),
}


class Returns(Layers):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        return RESULTS[self.kind](self, x)


@pytest.mark.parametrize("kind", RESULTS)
def test_results_come_back_in_their_structure(kind: str) -> None:
    captures(Returns(kind), X)


def test_a_result_that_cannot_be_written_down_can_be_run_but_not_saved(tmp_path: Path) -> None:
    program = nd.compile(Returns("named tuple"), "", X)
    with pytest.raises(nd.CompileError, match="results are of a class that cannot be written down"):
        program.save(tmp_path / "program.py")
    nd.compile(Returns("dataclass"), "", X).save(tmp_path / "program.py")


class ReturnsUnknown(Layers):
    def forward(self, x: Tensor) -> Unknown:
        return Unknown(self.one(x))


def test_a_dataclass_that_torch_does_not_know_is_refused_with_the_call_that_helps() -> None:
    with pytest.raises(nd.CompileError) as caught:
        nd.compile(ReturnsUnknown(), "", X)
    assert caught.value.what == "ReturnsUnknown returns or takes a class that cannot be taken apart"
    assert caught.value.tries == ("torch.export.register_dataclass(TheClass), or a dict",)


# ---- changes in place ----------------------------------------------------------------------------------------------


class InPlace(Layers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x).add_(1)
        same = y
        y += self.two(x)
        y.mul_(2).clamp_(min=-1)
        z = same * self.one(x)
        return z.relu_()


@pytest.mark.parametrize("mesh", ["", "tp=2"])
def test_in_place_ops_on_values_are_as_others(mesh: str) -> None:
    captures(InPlace(), X, mesh)


# ---- structure -----------------------------------------------------------------------------------------------------


class Twice(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.one(F.gelu(self.one(x)))


@pytest.mark.parametrize("mesh", ["", "tp=2", "dp_shard=2, tp=2"])
def test_a_module_may_be_called_more_than_once(mesh: str) -> None:
    captures(Twice(), X, mesh)


def test_a_model_on_meta_is_captured_alike() -> None:
    with torch.device("meta"):
        model = Twice()
    assert str(nd.compile(model, "tp=2", X)) == str(nd.compile(seeded(Twice), "tp=2", X))


def test_a_model_that_keeps_keys_and_values_is_refused_with_the_option_that_helps() -> None:
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    ids = torch.zeros(2, 8, dtype=torch.long)
    model = transformers.LlamaForCausalLM(config)
    with pytest.raises(nd.CompileError, match="cannot be taken apart") as caught:
        nd.compile(model, "", {"input_ids": ids})
    assert caught.value.tries == (
        "model.config.use_cache = False, as keys and values of past tokens are for generation",
    )
    model.config.use_cache = False
    nd.compile(model, "", {"input_ids": ids})


class Defaults(nn.Module):
    """Makes a mask where none is given, but for a tracer, as T5's encoder does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        if attention_mask is None and not torch.compiler.is_compiling():
            attention_mask = torch.ones_like(x[:, 0])
        y: Tensor = self.linear(x) * attention_mask[:, None]
        return y


def test_what_a_model_makes_itself_may_have_to_be_given() -> None:
    x = torch.ones(4, 4)
    assert Defaults()(x).shape == (4, 4)
    with pytest.raises(nd.CompileError, match="inputs that it makes itself where none are given, as attention_mask="):
        nd.compile(Defaults(), "dp_shard=2", x)
    program = nd.compile(Defaults(), "dp_shard=2", dict(x=x, attention_mask=torch.ones(4)))
    assert nd.verify(program, seeds=1).equal
