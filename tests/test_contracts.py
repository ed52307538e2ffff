"""What the module promises its user (design, section 3.7), a claim for each sentence.

Claims of other files: labels masked unequally on every mesh (`tests/equivalence`), a vocabulary that divides over
nothing and sizes that do not divide (`test_parallel_module`, `test_bad_input`), inputs that differ between ranks
(`test_bad_input`), the fairness of dropout (`tests/runtime/test_random`).
"""

from __future__ import annotations

import linecache
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F

import ndcompile as nd
from ndcompile.mesh import MeshSpec
from tests import ranks
from tests.claims import Claims, assert_close, assert_same_gradients, own, run_claims, whole
from tests.models import Mlp, Stack, seeded, tokens

BOTH = "dp_shard=2, tp=2"
X = torch.arange(48.0, dtype=torch.float64).view(4, 12) / 48 - 0.5


def stack() -> nn.Module:
    return seeded(Stack).double()


def data_index(mesh: str) -> int:
    """Which of two data-parallel batches is this rank's."""
    place = MeshSpec.parse(mesh).coordinate(dist.get_rank())
    return sum(at for axis, at in place.items() if axis.startswith("dp_"))


def masked(size: int = 4) -> dict[str, Tensor]:
    """Tokens of which the first samples have far fewer labels than the last."""
    batch = tokens(size)
    for i in range(size):
        batch["labels"][i, : 7 - 2 * i] = -100
    return batch


def mine(batch: dict[str, Tensor], mesh: str) -> dict[str, Tensor]:
    return own(batch, 2, data_index(mesh)) if "dp_" in mesh else batch


def everywhere(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


# ---- inputs --------------------------------------------------------------------------------------------------------


def dtensor_inputs_are_taken_as_they_are() -> None:
    """Over the whole mesh, or over tp alone with this rank's own batch."""
    model, batch = stack(), masked()
    parallel = nd.parallelize(model, BOTH, batch, float64=True)
    mesh = next(parallel.parameters()).device_mesh  # type: ignore[attr-defined]
    plain, share = parallel(**mine(batch, BOTH))["loss"], mine(batch, BOTH)
    over_all = {k: DTensor.from_local(v, mesh, [Shard(0), Replicate()]) for k, v in share.items()}
    over_tp = {k: DTensor.from_local(v, mesh["tp"], [Replicate()]) for k, v in share.items()}
    assert torch.equal(parallel(**over_all)["loss"], plain) and torch.equal(parallel(**over_tp)["loss"], plain)


def a_dtensor_input_that_lies_elsewhere_is_refused() -> None:
    parallel = nd.parallelize(stack(), BOTH, masked(), float64=True)
    mesh = next(parallel.parameters()).device_mesh  # type: ignore[attr-defined]
    share = mine(masked(), BOTH)
    wrong = share | dict(ids=DTensor.from_local(share["ids"][:, :4], mesh["tp"], [Shard(1)]))
    with pytest.raises(ValueError) as caught:
        parallel(**wrong)
    assert str(caught.value) == (
        "input 'ids' is a DTensor that is Shard(dim=1) on axis 'tp'\n"
        "  why  the program takes it Replicate() there, and DTensor inputs are taken as they are\n"
        "  try  redistribute it to Replicate()"
    )


def an_input_has_its_own_rows_of_the_gradient() -> None:
    model, x = seeded(Mlp).double(), X.clone().requires_grad_()
    share = X.chunk(2)[data_index(BOTH)].clone().requires_grad_()
    parallel = nd.parallelize(model, BOTH, x, loss_fn=lambda y: y.square().mean(), float64=True)
    parallel(share).backward()
    model(x).square().mean().backward()
    assert share.grad is not None and x.grad is not None
    assert_close(share.grad, x.grad.chunk(2)[data_index(BOTH)])
    assert_same_gradients(parallel, model)


class MlpLoss(Mlp):
    """Ends in a loss."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


def two_models_in_a_row_on(mesh: str) -> None:
    """What one computes goes into another, with a loss outside or its own: both have the gradients of one device; of
    the second, frozen in between, the first's alone, as in adversarial training.
    """
    for kind in (Mlp, MlpLoss):
        models = [seeded(Mlp).double(), seeded(kind).double()]
        examples = X, X.clone().requires_grad_()
        parallels = [
            nd.parallelize(m, mesh, x, float64=True, outputs="local") for m, x in zip(models, examples, strict=True)
        ]
        for trained in (True, False, True):
            for (first, second), x in ((parallels, mine({"x": X}, mesh)["x"]), (models, X)):
                second.requires_grad_(trained)
                second(first(x).sin()).square().mean().backward()
            for parallel, model in zip(parallels, models, strict=True):
                assert_same_gradients(parallel, model)


def two_models_in_a_row() -> None:
    for mesh in ("dp_shard=2", "dp_replicate=2", "tp=2"):
        two_models_in_a_row_on(mesh)


def two_models_in_a_row_on_both() -> None:
    two_models_in_a_row_on(BOTH)


class NoNans(Mlp):
    """Takes zeros for what is not a number."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.nan_to_num())


def an_input_may_hold_what_is_not_a_number() -> None:
    model, x = seeded(NoNans).double(), X.clone()
    x[0, 0], x[1, 1], x[2, 2] = torch.nan, torch.inf, -torch.inf
    parallel = nd.parallelize(model, "tp=2", x, float64=True)
    assert_close(parallel(x), model(x))


class Turned(nn.Module):
    """Takes `[s, b, 12]`, and mixes what stands at one place of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.mlp(x) + x.cumsum(0)
        return {"loss": y.square().mean(), "y": y}


def a_batch_may_be_at_another_dim() -> None:
    model, x = seeded(Turned).double(), torch.stack([X, X.exp(), X.sin()])
    parallel = nd.parallelize(model, "dp_shard=2", {"x": x}, float64=True, dynamic_dims={"x": {0: "s", 1: "b"}})
    found, expected = parallel(x.chunk(2, 1)[dist.get_rank()]), model(x)
    found["loss"].backward()
    expected["loss"].backward()
    assert_close(found["loss"], expected["loss"])
    assert_close(found["y"], expected["y"].chunk(2, 1)[dist.get_rank()])
    assert_same_gradients(parallel, model)


class Names(nn.Module):
    """Takes what it is given by name."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor, **more: Tensor) -> Tensor:
        return (self.mlp(x) * more["weight"]).mean()


def further_keywords_are_inputs() -> None:
    model, batch = seeded(Names).double(), dict(x=X, weight=X.exp()[:, :1])
    parallel = nd.parallelize(model, BOTH, batch, float64=True)
    assert_close(parallel(**mine(batch, BOTH)), model(**batch))


# ---- outputs -------------------------------------------------------------------------------------------------------


class Various(nn.Module):
    """Results of all kinds: scalars, by sample, without a batch, and with the batch at dim 1."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack()

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found = self.stack(ids, labels)
        logits = found["logits"]
        tall, wide = logits.sum((0, 1)), logits.transpose(0, 1)
        return {"loss": found["loss"], "largest": logits.amax(), "by class": tall, "turned": wide, "logits": logits}


def scalars_are_equal_on_every_rank_and_those_of_the_global_batch() -> None:
    """Plain tensors, also where the batches have unequally many labels."""
    model, batch = seeded(Various).double(), masked()
    counts = [int((part["labels"] != -100).sum()) for part in (own(batch, 2, 0), own(batch, 2, 1))]
    assert counts == [4, 12]
    for mesh in (BOTH, "dp_replicate=2, tp=2", "dp_replicate=2, dp_shard=2"):
        parallel = nd.parallelize(model, mesh, batch, float64=True)
        share = mine(batch, mesh) if "tp" in mesh else own(batch, 4)
        found, expected = parallel(**share), model(**batch)
        for name in ("loss", "largest"):
            assert type(found[name]) is Tensor
            assert len({float(value) for value in everywhere(found[name].detach())}) == 1
            assert_close(found[name], expected[name], what=name)


def other_results_are_of_the_own_batch_and_dtensors_over_tp_only() -> None:
    model, batch = seeded(Various).double(), masked()
    parallel = nd.parallelize(model, BOTH, batch, float64=True)
    found, expected = parallel(**mine(batch, BOTH)), model(**batch)
    logits, at = found["logits"], data_index(BOTH)
    assert isinstance(logits, DTensor) and logits.device_mesh.mesh_dim_names == ("tp",)
    assert logits.shape == (2, 8, 31) and logits.to_local().shape[2] == (16, 15)[dist.get_rank() % 2]
    assert_close(logits, expected["logits"].chunk(2)[at])
    assert_close(found["turned"], expected["turned"].chunk(2, 1)[at])
    assert_close(found["by class"], expected["by class"])


def local_results_are_plain_tensors() -> None:
    model, batch = seeded(Various).double(), masked()
    parallel = nd.parallelize(model, BOTH, batch, float64=True, outputs="local")
    found, expected = parallel(**mine(batch, BOTH)), model(**batch)
    assert all(type(value) is Tensor for value in found.values())
    assert_close(found["logits"], expected["logits"].chunk(2)[data_index(BOTH)])
    found["loss"].backward()
    expected["loss"].backward()
    assert_same_gradients(parallel, model)


# ---- gradients -----------------------------------------------------------------------------------------------------


def outside(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(whole(logits).flatten(0, 1), labels.flatten())


def a_loss_outside_on(mesh: str, outputs: str = "sharded") -> nn.Module:
    """The gradient is that of the mean over data-parallel ranks, whatever else the mesh has."""
    model, batch = stack(), masked()
    parts = 2 if "dp_" in mesh else 1
    parallel = nd.parallelize(model, mesh, {"ids": batch["ids"]}, float64=True, outputs=outputs)
    share = mine(batch, mesh)
    outside(parallel(share["ids"])["logits"], share["labels"]).backward()
    losses = [outside(model(b["ids"])["logits"], b["labels"]) for b in (own(batch, parts, i) for i in range(parts))]
    torch.stack(losses).mean().backward()
    assert_same_gradients(parallel, model)
    return parallel


def a_loss_outside_on_one_axis() -> None:
    for mesh in ("dp_shard=2", "dp_replicate=2", "tp=2"):
        a_loss_outside_on(mesh)
    a_loss_outside_on("tp=2", "local")


def a_loss_outside_on_both() -> None:
    a_loss_outside_on(BOTH, "local")
    a_loss_outside_on("dp_replicate=2, tp=2")


def gradients_of_a_loss_outside(mesh: str) -> dict[str, Tensor]:
    gradients = {name: p.grad for name, p in a_loss_outside_on(mesh).named_parameters()}
    return {name: whole(gradient) for name, gradient in gradients.items() if gradient is not None}


def token_loss(outputs: dict[str, Tensor], labels: Tensor) -> dict[str, Tensor]:
    logits = outputs["logits"]
    return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Ids(Stack):
    """A model that returns logits and knows no labels."""

    def forward(self, ids: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return super().forward(ids)


def loss_fn_is_exact_on(mesh: str) -> None:
    """Unlike a loss outside it counts the labels of all ranks; the results are those of `loss_fn`."""
    model, batch = seeded(Ids).double(), masked()
    parallel = nd.parallelize(model, mesh, batch, loss_fn=token_loss, float64=True)
    share = mine(batch, mesh)
    found, expected = parallel(share["ids"], labels=share["labels"]), token_loss(model(batch["ids"]), batch["labels"])
    assert_close(found["loss"], expected["loss"])
    assert_close(
        found["logits"], expected["logits"].chunk(2)[data_index(mesh)] if "dp_" in mesh else expected["logits"]
    )
    found["loss"].backward()
    expected["loss"].backward()
    assert_same_gradients(parallel, model)
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (parallel, model)]
    assert_close(norms[0], norms[1])
    by_rank = [outside(model(b["ids"])["logits"], b["labels"]) for b in (own(batch, 2, i) for i in range(2))]
    assert abs(float(torch.stack(by_rank).mean() - expected["loss"])) > 1e-3, "the mean of means is another number"


def loss_fn_is_exact_on_one_axis() -> None:
    for mesh in ("dp_shard=2", "dp_replicate=2", "tp=2"):
        loss_fn_is_exact_on(mesh)


def loss_fn_is_exact_on_both() -> None:
    loss_fn_is_exact_on(BOTH)


def a_loss_of_torch_is_a_loss_fn() -> None:
    """As a function and as a module; its target is a keyword of the emitted module."""
    model, target = seeded(Mlp).double(), X.flip(0)
    bent = (F.smooth_l1_loss, nn.SmoothL1Loss(beta=0.0), nn.HuberLoss(reduction="sum", delta=0.5))
    for loss_fn in (F.mse_loss, nn.MSELoss(), *bent):
        parallel = nd.parallelize(model, "dp_shard=2", dict(x=X, target=target), loss_fn=loss_fn, float64=True)
        share = own(dict(x=X, target=target))
        found, expected = parallel(share["x"], target=share["target"]), loss_fn(model(X), target)
        model.zero_grad()
        for loss in (found, expected):
            loss.backward()
        assert_close(found, expected)
        assert_same_gradients(parallel, model)


def a_saved_program_has_its_loss_fn() -> None:
    model, batch = seeded(Ids).double(), masked()
    folder = everywhere(tempfile.mkdtemp() if dist.get_rank() == 0 else None)[0]
    if dist.get_rank() == 0:
        nd.compile(model, "dp_shard=2", batch, loss_fn=token_loss, float64=True).save(f"{folder}/program.py")
    dist.barrier()
    share = own(batch)
    for given in (model, None):
        parallel = nd.load(f"{folder}/program.py", given)
        found = parallel(share["ids"], labels=share["labels"])["loss"]
        if given is not None:
            assert_close(found, token_loss(model(batch["ids"]), batch["labels"])["loss"])
    assert type(model) is Ids, "the model has no loss of its own now"


# ---- train and eval ------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Another program in eval: dropout computes nothing there."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.dropout, self.down = nn.Linear(12, 20), nn.GELU(), nn.Dropout(0.5), nn.Linear(20, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(self.act(self.up(x)))).square().mean()


def text_of(parallel: nd.ParallelModule) -> str:
    root, _ = parallel._program()
    return "".join(linecache.getlines(type(root).compute.__code__.co_filename))


def both_modes_have_all_pins() -> None:
    """Of parameters, where they lie already; of what modules compute; of modules that compute nothing in one mode."""
    model = seeded(Mixed).double()
    pins: dict[str, Any] = {"u*.weight": {"tp": nd.S(0)}, "act": {"tp": nd.R}, "dropout": {"tp": nd.R}}
    for first in (True, False):
        given = pins if first else {name: pin for name, pin in pins.items() if name != "dropout"}
        parallel = nd.parallelize(model.train(first), "tp=2", X, float64=True, placements=given)
        for training in (first, not first):
            parallel.train(training)
            assert "all_gather(up, tp, dim=1)" in text_of(parallel)
            parallel(X)
        assert_close(parallel.eval()(X), model.eval()(X))


class Normed(nn.Module):
    """Its buffers are updated in train, and used in eval."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.BatchNorm1d(12), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.norm(x)).exp().mean()


def an_update_of_a_buffer_is_that_of_the_global_batch() -> None:
    """On every rank the same, after two steps; eval takes the updated buffers, and changes none."""
    for mesh in ("dp_shard=2", "tp=2"):
        model = seeded(Normed).double()
        parallel = nd.parallelize(model, mesh, X, float64=True)
        for x in (X, 2 * X + 1):
            parallel(mine({"x": x}, mesh)["x"]).backward()
            model(x).backward()
        parallel.eval()
        assert_close(parallel(mine({"x": X}, mesh)["x"]), model.eval()(X))
        assert_same_gradients(parallel, model)
        expected = dict(model.named_buffers())
        assert parallel.state_dict().keys() == model.state_dict().keys()
        for name, buffer in parallel.named_buffers():
            assert_close(buffer, expected[name], what=name)
            assert len({tuple(values) for values in everywhere(buffer.flatten().tolist())}) == 1
        assert int(expected["norm.num_batches_tracked"]) == 2


# ---- random numbers ------------------------------------------------------------------------------------------------


def dropout_is_a_function_of_rank_0s_seed_and_the_global_index() -> None:
    """The same on every mesh, whatever the other ranks' seeds; a new key each step."""
    model = seeded(Mixed).double()
    reference = nd.compile(model, "", X, float64=True).one_device(model)
    torch.manual_seed(3)
    expected = [float(reference(X)) for _ in range(2)]
    assert expected[0] != expected[1]
    for mesh in (BOTH, "dp_replicate=2, tp=2"):
        parallel = nd.parallelize(model, mesh, X, float64=True)
        torch.manual_seed(3 if dist.get_rank() == 0 else 100 + dist.get_rank())
        for value in expected:
            assert_close(parallel(X.chunk(2)[data_index(mesh)]), torch.tensor(value, dtype=torch.float64))


# ---- all of the above in one set of processes each -----------------------------------------------------------------

ON_TWO: Claims = (
    a_loss_outside_on_one_axis,
    loss_fn_is_exact_on_one_axis,
    a_loss_of_torch_is_a_loss_fn,
    a_saved_program_has_its_loss_fn,
    both_modes_have_all_pins,
    an_update_of_a_buffer_is_that_of_the_global_batch,
    a_batch_may_be_at_another_dim,
    two_models_in_a_row,
    an_input_may_hold_what_is_not_a_number,
)
ON_FOUR: Claims = (
    dtensor_inputs_are_taken_as_they_are,
    a_dtensor_input_that_lies_elsewhere_is_refused,
    an_input_has_its_own_rows_of_the_gradient,
    two_models_in_a_row_on_both,
    further_keywords_are_inputs,
    scalars_are_equal_on_every_rank_and_those_of_the_global_batch,
    other_results_are_of_the_own_batch_and_dtensors_over_tp_only,
    local_results_are_plain_tensors,
    a_loss_outside_on_both,
    loss_fn_is_exact_on_both,
    dropout_is_a_function_of_rank_0s_seed_and_the_global_index,
)
Found = tuple[dict[str, str], dict[str, Tensor]]


def run_with_gradients(claims: Claims, mesh: str) -> Found:
    return run_claims(claims), gradients_of_a_loss_outside(mesh)


@pytest.fixture(scope="module")
def two() -> list[Found]:
    return ranks.run(2, run_with_gradients, ON_TWO, "dp_shard=2", timeout=240)


@pytest.fixture(scope="module")
def four() -> list[Found]:
    return ranks.run(4, run_with_gradients, ON_FOUR, BOTH, timeout=240)


@pytest.mark.parametrize("claim", ON_TWO, ids=lambda claim: claim.__name__)
def test_on_two_ranks(claim: Callable[[], None], two: list[Found]) -> None:
    assert [theirs[claim.__name__] for theirs, _ in two] == ["", ""]


@pytest.mark.parametrize("claim", ON_FOUR, ids=lambda claim: claim.__name__)
def test_on_four_ranks(claim: Callable[[], None], four: list[Found]) -> None:
    assert [theirs[claim.__name__] for theirs, _ in four] == [""] * 4


def test_a_loss_outside_has_one_gradient_with_and_without_tp(two: list[Found], four: list[Found]) -> None:
    (_, expected), *_ = two
    for _, found in four:
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            assert_close(found[name], gradient, what=name)


def test_the_emitted_module_is_called_with_what_the_loss_needs(tmp_path: Path) -> None:
    program = nd.compile(seeded(Ids), "dp_shard=2", masked(), loss_fn=token_loss)
    assert program.manifest.inputs == ["ids", "labels"]
    assert str(program.manifest.signature) == "(ids, *, labels)"
    shared = nd.compile(seeded(Stack), "", masked(), loss_fn=lambda found, labels: found["loss"] + labels.sum())
    assert shared.manifest.inputs == ["ids", "labels"], "an input of forward is not taken twice"
