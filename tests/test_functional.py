"""Changes in place: the captured graph has none, and computes what the untouched model does, its buffers included."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import ndcompile as nd

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
MESH = "dp_shard=2, tp=2"


class Model(nn.Module):
    """Two layers and three buffers, used as `body` says."""

    count: Tensor
    mean: Tensor
    table: Tensor

    def __init__(self, body: Callable[[Model, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = body
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
        self.plain = torch.ones(6, dtype=torch.float64)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("table", torch.zeros(3, 6))

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def compiled(model: nn.Module, x: Tensor = X, mesh: str = "") -> nd.Program:
    return nd.compile(model.double(), mesh, x, float64=True)


def computes_what_the_model_does(model: nn.Module, x: Tensor = X, steps: int = 2) -> None:
    """Results, gradients and buffers of some steps; and the program passes its checks on a mesh."""
    compiled(copy.deepcopy(model), x, MESH)
    program, ours = compiled(model, x), copy.deepcopy(model)
    reference = program.one_device(ours)
    for _ in range(steps):
        found, expected = reference(x), model(x)
        for mine, its in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-12, atol=1e-12)
        for name, buffer in model.named_buffers():
            torch.testing.assert_close(ours.get_buffer(name), buffer.detach(), rtol=1e-12, atol=1e-12, msg=name)
            buffer.detach_()
        for mine, its in zip(gradients(ours, found), gradients(model, expected), strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-10, atol=1e-12)


def gradients(model: nn.Module, result: Any) -> list[Tensor]:
    """Of the sum of squares of everything in the result; zero where there is none."""
    total = torch.stack([y.double().pow(2).sum() for y in pytree.tree_leaves(result) if y.requires_grad]).sum()
    parameters = list(model.parameters())
    found = torch.autograd.grad(total, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters, strict=True)]


# ---- values --------------------------------------------------------------------------------------------------------


def a_slice(model: Model, x: Tensor) -> Tensor:
    y = model.one(x)
    y[:, :3].mul_(2)
    y[:, -2:] += x[:, :2]
    y[1:, ::2] -= 1
    return y


def what_a_view_shows(model: Model, x: Tensor) -> Tensor:
    y = model.one(x)
    view = y.view(-1, 2, 3)
    y.relu_()
    return view.sum(2)


def a_view_of_a_view(model: Model, x: Tensor) -> tuple[Tensor, ...]:
    y = model.one(x)
    turned = y.view(-1, 2, 3).transpose(0, 2)
    turned[1, :, 0] = 5.0
    turned.permute(1, 2, 0)[0].mul_(3)
    narrow = y.narrow(1, 2, 2)
    narrow.t()[0].fill_(0.5)
    return y, turned, narrow


def a_copy_that_is_none(model: Model, x: Tensor) -> tuple[Tensor, ...]:
    """`contiguous` and `to` share memory where they have nothing to do."""
    y = model.one(x)
    shared, own = y.contiguous().to(y.dtype), y.t().contiguous()
    shared.add_(1)
    own.mul_(3)
    return y, shared, own


def an_entry(model: Model, x: Tensor) -> Tensor:
    y = model.one(x)
    y[:, 0] = 0
    y[:, 1] = model.two(x)[:, 2]
    y[0] = x[1]
    return y


def entries_by_number(model: Model, x: Tensor) -> Tensor:
    y = model.one(x)
    y[:, torch.tensor([1, 3])] *= 2
    y[:, torch.tensor([0, 2])] = x[:, :2]
    return y


def entries_under_a_mask(model: Model, x: Tensor) -> Tensor:
    y = model.one(x)
    y[x > 0.5] = 0
    y[x[:, 0] > 0] = -1.0
    y.masked_fill_(x < -0.5, 2)
    return torch.index_put(y, (x > 0,), torch.tensor(3.0, dtype=y.dtype))


def an_overlap(model: Model, x: Tensor) -> tuple[Tensor, ...]:
    y = model.one(x)
    left, right = y[:, 1:4], y[:, 2:5]
    left.add_(right)
    right.mul_(left.sum())
    return y, left, right


def another_dtype(model: Model, x: Tensor) -> Tensor:
    y = model.one(x)
    y.mul_(x > 0).add_(torch.arange(6))
    y[:, 0] = torch.arange(x.size(0), device=x.device)
    return y


VALUES = [
    a_slice, what_a_view_shows, a_view_of_a_view, a_copy_that_is_none, an_entry, entries_by_number,
    entries_under_a_mask, an_overlap, another_dtype,
]  # fmt: skip


@pytest.mark.parametrize("body", VALUES)
def test_a_change_is_seen_by_every_name_of_the_memory(body: Callable[[Model, Tensor], Any]) -> None:
    computes_what_the_model_does(Model(body).double())


def test_an_augmented_entry_is_put_back_once() -> None:
    text = str(compiled(Model(lambda model, x: add_to_slice(model.one(x)))))
    assert text.count("torch.slice_scatter(") == 1


def add_to_slice(y: Tensor) -> Tensor:
    y[:, 1:3] += 1
    return y


# ---- buffers -------------------------------------------------------------------------------------------------------


def a_count(model: Model, x: Tensor) -> Tensor:
    model.count += 1
    return model.one(x) * model.count


def a_running_mean(model: Model, x: Tensor) -> Tensor:
    y = model.one(x)
    before = model.mean.clone()
    model.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
    return y * before + model.mean.clone()


def a_gradient_into_a_buffer(model: Model, x: Tensor) -> Tensor:
    """Within the forward the buffer carries a gradient; what is kept carries none."""
    model.mean.copy_(model.one(x).sum(0))
    return model.two(model.mean.clone()) + x


def a_part_of_a_buffer(model: Model, x: Tensor) -> Tensor:
    y = model.one(x)
    with torch.no_grad():
        model.table[1] = y.sum(0)
        model.table[:, 0].add_(1)
        model.table.clamp_(max=3)
    return y + model.table[1].clone()


def another_tensor(model: Model, x: Tensor) -> Tensor:
    model.mean = model.mean * 0.5 + model.one(x).detach().mean(0)
    return model.one(x) - model.mean


BUFFERS = [a_count, a_running_mean, a_gradient_into_a_buffer, a_part_of_a_buffer, another_tensor]


@pytest.mark.parametrize("body", BUFFERS)
def test_a_buffer_is_what_the_model_makes_of_it(body: Callable[[Model, Tensor], Any]) -> None:
    computes_what_the_model_does(Model(body).double())


def test_the_root_writes_buffers_after_the_forward() -> None:
    program = compiled(Model(a_running_mean), mesh="dp_shard=2")
    assert program.manifest.updates == ["mean"]
    assert '        self.update({\n            "mean": mean,\n        })\n        return (' in str(program)


def test_a_buffer_that_backward_needs_is_read_as_a_copy() -> None:
    text = str(compiled(Model(a_running_mean)))
    assert 'self.buffer("mean").clone()' in text
    assert 'self.buffer("count")' in str(compiled(Model(a_count)))


# ---- batch norm ----------------------------------------------------------------------------------------------------

IMAGES = torch.randn(6, 3, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize(
    "options", [{}, {"affine": False}, {"momentum": 0.4, "eps": 0.1}, {"track_running_stats": False}]
)
def test_batch_norm_in_training_is_torchs(options: dict[str, Any]) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 2, bias=False), nn.BatchNorm2d(4, **options), nn.Tanh()).double()
    computes_what_the_model_does(net, IMAGES, steps=3)


class Shared(nn.Module):
    """One batch norm under two names, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.again = self.norm

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.two(torch.tanh(self.norm(self.one(x)))))


def test_a_norm_that_is_called_twice_is_updated_twice_under_its_first_name() -> None:
    computes_what_the_model_does(Shared().double())
    assert set(compiled(Shared()).manifest.updates) == {f"norm.{name}" for name, _ in nn.BatchNorm1d(6).named_buffers()}


def test_batch_norm_loses_no_digits_where_the_mean_is_large() -> None:
    norm = nn.BatchNorm2d(3).double()
    x = IMAGES + 1e6
    found = compiled(norm, x).one_device(copy.deepcopy(norm))(x)
    torch.testing.assert_close(found, norm(x), rtol=1e-8, atol=1e-8)


def test_after_training_batch_norm_uses_what_it_kept() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 2, bias=False), nn.BatchNorm2d(4)).double()
    ours = copy.deepcopy(net)
    compiled(ours, IMAGES).one_device(ours)(IMAGES)
    net(IMAGES)
    net.eval()
    program = compiled(ours.eval(), IMAGES, MESH)
    assert "F.batch_norm(" in str(program) and "self.update" not in str(program)
    torch.testing.assert_close(compiled(ours, IMAGES).one_device(ours)(IMAGES), net(IMAGES))


def test_half_precision_has_statistics_in_float32() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 2, bias=False), nn.BatchNorm2d(4))
    text = str(nd.compile(net, "dp_shard=2", IMAGES.to(torch.bfloat16), precision=nd.Precision(compute=torch.bfloat16)))
    before, after = text.index(".to(torch.float32)"), text.index(".to(torch.bfloat16)")
    assert before < text.index(".sum(") < after


# ---- what is refused -----------------------------------------------------------------------------------------------


def an_input(model: Model, x: Tensor) -> Tensor:
    x.mul_(2)
    return model.one(x)


def a_part_of_an_input(model: Model, x: Tensor) -> Tensor:
    x[:, 0] = 1
    return model.one(x)


def a_parameter(model: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        model.one.bias.add_(1)
    return model.one(x)


def a_plain_tensor(model: Model, x: Tensor) -> Tensor:
    model.plain.add_(1)
    return model.one(x) * model.plain


def a_value_without_its_gradient(model: Model, x: Tensor) -> Tensor:
    y = model.one(x)
    with torch.no_grad():
        y.mul_(2)
    return y


def the_detached_name(model: Model, x: Tensor) -> Tensor:
    y = model.one(x)
    y.detach().mul_(2)
    return y


def several_values_under_a_mask(model: Model, x: Tensor) -> Tensor:
    y = model.one(x)
    y[x > 0] = y[x > 0] * 2
    return y


def a_diagonal(model: Model, x: Tensor) -> Tensor:
    y = model.one(x)
    (y.t() @ y).diagonal().zero_()
    return y


def a_parameter_itself(model: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    return model.one(x), model.two.weight


REFUSED = [
    (an_input, "forward changes input 'x' in place"),
    (a_part_of_an_input, "forward changes input 'x' in place"),
    (a_parameter, "forward changes parameter 'one.bias' in place"),
    (a_plain_tensor, "forward changes a tensor in place that is no buffer"),
    (a_value_without_its_gradient, "aten.mul_.Tensor changes a value in place where no gradient is recorded"),
    (the_detached_name, "aten.mul_.Tensor changes a value in place where no gradient is recorded"),
    (several_values_under_a_mask, "the shape of aten.index.Tensor's result depends on the values of tensors"),
    (a_diagonal, "a view by aten.diagonal.default is changed in place"),
    (a_parameter_itself, "forward returns parameter 'two.weight' itself"),
]


@pytest.mark.parametrize(("body", "what"), REFUSED)
def test_what_has_no_meaning_on_a_mesh_is_refused(body: Callable[[Model, Tensor], Any], what: str) -> None:
    with pytest.raises(nd.CompileError) as caught:
        compiled(Model(body))
    assert caught.value.what == what


def test_dropout_of_channels_drops_whole_channels() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Dropout2d(0.5)).double()
    found = compiled(net, IMAGES).one_device(net)(IMAGES)
    plain = F.conv2d(IMAGES, net[0].weight, net[0].bias)  # type: ignore[arg-type]
    ratio = (found / plain).flatten(2)
    assert bool(((ratio - ratio[..., :1]).abs() < 1e-12).all()), "one factor a sample and channel"
    assert {round(v, 9) for v in ratio[..., 0].flatten().tolist()} == {0.0, 2.0}
