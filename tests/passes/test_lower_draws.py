"""Random numbers of every kind: as torch draws them, the same on every mesh, others at each call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ndcompile as nd
from ndcompile.precision import Precision
from tests.equivalence.odd import paths, paths_in_place

Draw = Callable[[Tensor], Tensor]

DRAWS: dict[str, Draw] = {
    "rand": lambda x: torch.rand(x.shape, device=x.device, dtype=x.dtype),
    "rand of a number for each sample": lambda x: torch.rand((x.shape[0], 1), dtype=x.dtype).expand(x.shape),
    "rand_like": lambda x: torch.rand_like(x),
    "randn": lambda x: torch.randn(x.shape, dtype=x.dtype),
    "randn_like": lambda x: torch.randn_like(x),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 2),
    "uniform_ as it is": lambda x: torch.empty_like(x).uniform_(),
    "normal_": lambda x: torch.empty_like(x).normal_(1, 2),
    "normal_ as it is": lambda x: x.clone().normal_(),
    "normal of tensors": lambda x: torch.normal(x.detach(), x.detach().abs() + 1),
    "normal of a tensor and a number": lambda x: torch.normal(x.detach(), 0.5),
    "normal of a number and a tensor": lambda x: torch.normal(0.5, x.detach().abs()),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "exponential_ of another rate": lambda x: torch.empty_like(x).exponential_(3),
    "bernoulli": lambda x: torch.bernoulli(x.detach().sigmoid()),
    "bernoulli of a number": lambda x: torch.bernoulli(x, 0.3),
    "bernoulli_": lambda x: x.new_empty(x.shape).bernoulli_(0.8),
    "bernoulli_ as it is": lambda x: x.clone().bernoulli_(),
    "bernoulli_ of a tensor": lambda x: torch.empty_like(x).bernoulli_(x.detach().sigmoid()),
    "bernoulli_ of truth values": lambda x: torch.empty(x.shape, dtype=torch.bool).bernoulli_(0.4).to(x.dtype),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x.detach().view(x.shape[0], -1, 4)).view(x.shape),
    "a part": lambda x: torch.cat([torch.rand_like(x[:, :4]), torch.zeros_like(x[:, 4:]).uniform_(1, 2)], 1),
}


class Noisy(nn.Module):
    """Multiplies what it draws with its input, and returns both."""

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.draw = draw

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        drawn = self.draw(x) if self.training else x
        return {"loss": (self.layer(x) * drawn).square().mean(), "drawn": drawn}


def batch(size: int = 8) -> Tensor:
    return torch.randn(size, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("mesh", ["dp_shard=2, tp=2", "tp=3"])
@pytest.mark.parametrize("name", DRAWS)
def test_every_mesh_draws_the_same(name: str, mesh: str) -> None:
    model = Noisy(DRAWS[name])
    program = nd.compile(model, mesh, batch())
    assert program.manifest.random and "uniform(" in str(program)
    report = nd.verify(program, model, seeds=1)
    assert [claim.held for claim in report.claims] == [True] * 4, str(report)


SAMPLES = 1 << 13
FURTHEST = 2.2 * (2 / (8 * SAMPLES)) ** 0.5
"""Kolmogorov's and Smirnov's distance of two samples of one distribution is above it once in 10,000 times."""


@pytest.mark.parametrize("name", DRAWS)
def test_the_distribution_is_torchs(name: str) -> None:
    model, x = Noisy(DRAWS[name]), batch(SAMPLES)
    torch.manual_seed(1)
    found, wanted = nd.compile(model, "", x).one_device(model)(x)["drawn"], model(x)["drawn"]
    assert found.dtype == wanted.dtype and not torch.equal(found, wanted)
    rows = slice(None, None, 8) if "each sample" in name else slice(None)
    one, two = (v.flatten()[rows].sort().values.double() for v in (found, wanted))
    furthest = FURTHEST * (8 if "each sample" in name else 1) ** 0.5
    assert far(one, two) < furthest
    assert not far(one * 1.1 + 0.1, two) < furthest, "the bar tells other numbers"


def far(one: Tensor, two: Tensor) -> float:
    """The largest difference of two distributions, each of sorted numbers."""
    at = torch.cat([one, two])
    shares = [torch.searchsorted(v, at, right=True).double() / len(v) for v in (one, two)]
    return float((shares[0] - shares[1]).abs().max())


def test_moments() -> None:
    """Of 65,536 numbers, within five standard deviations."""
    x = batch(SAMPLES)
    for name, mean, variance, fourth in (
        ("rand", 1 / 2, 1 / 12, 1 / 80),
        ("randn", 0.0, 1.0, 3.0),
        ("normal_", 1.0, 4.0, 48.0),
        ("exponential_ of another rate", 1 / 3, 1 / 9, 1 / 9),
        ("bernoulli_", 0.8, 0.16, 0.16 * (1 - 3 * 0.16)),
    ):
        torch.manual_seed(2)
        model = Noisy(DRAWS[name])
        drawn = nd.compile(model, "", x).one_device(model)(x)["drawn"].double()
        assert abs(drawn.mean() - mean) < 5 * (variance / drawn.numel()) ** 0.5, name
        assert abs(drawn.var() - variance) < 5 * ((fourth - variance**2) / drawn.numel()) ** 0.5, name


def test_a_logarithm_of_an_exponential_number_is_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of the uniform numbers at both ends."""
    for bits in (0, 2**53 - 1):
        monkeypatch.setattr(
            "ndcompile.runtime.random.uniform_bits",
            lambda shape, *args, bits=bits, **kwargs: torch.full(tuple(shape), bits, dtype=torch.int64),
        )
        for name in ("exponential_", "randn", "gumbel_softmax"):
            model = Noisy(DRAWS[name])
            for precision in (Precision(), Precision(compute=torch.bfloat16), Precision(compute=torch.float16)):
                program = nd.compile(model, "", batch(), precision=precision)
                drawn = program.one_device(model)(batch())["drawn"]
                assert drawn.isfinite().all() and (name != "exponential_" or drawn.log().isfinite().all())


class Two(nn.Module):
    """Two blocks, each of which draws twice."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            one, two = torch.randn_like(x), torch.randn_like(x)
            return self.layer(x) * one + two, one, two

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Two.Block() for _ in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        drawn = []
        for block in self.blocks:
            x, *both = block(x)
            drawn += both
        return [x.square().mean(), *drawn]


def test_each_draw_of_each_block_and_call_is_another() -> None:
    model, x = Two(), batch(SAMPLES)
    run = nd.compile(model, "", x).one_device(model)
    torch.manual_seed(3)
    drawn = [v.detach().flatten() for _ in range(2) for v in run(x)[1:]]
    together = torch.corrcoef(torch.stack(drawn)) - torch.eye(len(drawn))
    assert together.shape == (12, 12) and together.abs().max() < 5 / drawn[0].numel() ** 0.5
    torch.manual_seed(3)
    assert all(torch.equal(a, b.flatten()) for a, b in zip(drawn, run(x)[1:], strict=False)), "of one seed the same"


@pytest.mark.parametrize("remat", ["none", "block"])
def test_what_is_recomputed_draws_the_same_again(remat: str) -> None:
    model = Two()
    program = nd.compile(model, "dp_shard=2, tp=2", batch(), remat=remat)
    assert nd.verify(program, model, seeds=1).equal


class Skips(nn.Module):
    """Stochastic depth: a number for each sample."""

    def __init__(self, path: Callable[[Tensor, float], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.path = path

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(x)))
        return x + (self.path(y, 0.75) if self.training else y)


@pytest.mark.parametrize("path", [paths, paths_in_place])
@pytest.mark.parametrize("mesh", ["dp_shard=2, tp=2", "dp_shard=2, cp=2", "dp_replicate=2, dp_shard=2", "cp=2, tp=2"])
def test_stochastic_depth(path: Callable[[Tensor, float], Tensor], mesh: str) -> None:
    model, x = Skips(path), torch.randn(8, 6, 8)
    program = nd.compile(model, mesh, x, dynamic_dims={"x": {0: "b", 1: "s"}})
    shards = "{0: data}" if "replicate" in mesh else "{0: dp_shard}" if "dp" in mesh else "{}"
    assert f"uniform((b, 1, 1), rng, 0, torch.float32, shards={shards})" in str(program)
    assert nd.verify(program, model, seeds=1).equal
    assert "uniform" not in str(nd.compile(model.eval(), mesh, x, dynamic_dims={"x": {0: "b", 1: "s"}}))


@pytest.mark.parametrize("path", [paths, paths_in_place])
def test_a_sample_is_skipped_or_scaled(path: Callable[[Tensor, float], Tensor]) -> None:
    model, x = Skips(path), torch.randn(4000, 3, 8)
    torch.manual_seed(4)
    added = (nd.compile(model, "", x).one_device(model)(x) - x).detach()
    full = (model.eval()(x) - x).detach() / 0.75
    kept = added.flatten(1).any(1)
    torch.testing.assert_close(added[kept], full[kept], rtol=1e-4, atol=1e-5)
    assert abs(float(kept.double().mean()) - 0.75) < 5 * (0.75 * 0.25 / 4000) ** 0.5


def joined(x: Tensor) -> Tensor:
    y = x.flatten(0, 1)
    return (y * torch.rand_like(y)).view(x.shape)


def test_tokens_of_all_sequences_in_one_dim_are_sharded_by_sequences() -> None:
    model, x = Noisy(joined), torch.randn(4, 8, 8)
    program = nd.compile(model, "dp_shard=2, cp=2", x, dynamic_dims={"x": {0: "b", 1: "s"}})
    assert "shards={0: dp_shard, 1: cp}, balanced=(1,)" in str(program)
    assert nd.verify(program, model, seeds=1).equal


def test_a_draw_that_nothing_reads_is_not_in_the_program() -> None:
    def draw(x: Tensor) -> Tensor:
        torch.rand_like(x)
        return x

    assert not nd.compile(Noisy(draw), "tp=2", batch()).manifest.random


@pytest.mark.parametrize("compute", [torch.bfloat16, None])
def test_numbers_of_the_dtype_that_is_asked_for(compute: torch.dtype | None) -> None:
    model = Noisy(torch.rand_like)
    program = nd.compile(model, "tp=2", batch(), precision=Precision(compute=compute))
    assert f"rng, 0, {compute or torch.float32}, shards" in str(program)
    assert nd.verify(program, model, seeds=1).equal


WHOLE: dict[str, Draw] = {
    "randint.low": lambda x: torch.randint(0, 3, x.shape).to(x.dtype),
    "randperm.default": lambda x: x[:, torch.randperm(8)],
    "multinomial.default": lambda x: torch.multinomial(x.detach().softmax(-1), 8).to(x.dtype),
}


@pytest.mark.parametrize("name", WHOLE)
def test_whole_numbers_are_refused(name: str) -> None:
    with pytest.raises(nd.CompileError, match=f"forward draws random numbers by aten.{name}"):
        nd.compile(Noisy(WHOLE[name]), "tp=2", batch())
