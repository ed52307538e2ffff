"""Weights are gathered for a block, their gradients reduced, and nothing gathered is kept for backward."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ndcompile.mesh import MeshSpec
from ndcompile.runtime import Bucket, Mesh, StaleWeights, private, weight
from ndcompile.runtime.harvest import Harvest
from ndcompile.runtime.weights import _Use
from tests.ranks import run

SHAPES = {"up": (7, 6), "scale": (7,), "down": (6, 7), "bias": (6,)}
"""Rows that neither 2 nor 4 divide; `down` is gathered along its other dim."""

WEIGHTS = {
    "up": weight("up", {"dp_shard": 0}, ("dp_replicate",)),
    "scale": weight("scale", {"dp_shard": 0}, ("dp_replicate",)),
    "down": weight("down", {"dp_shard": 1}, ("dp_replicate",)),
    "bias": weight("bias", {}, ("dp_replicate", "dp_shard")),
}


def whole(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}


def batch(rank: int) -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(100 + rank), dtype=torch.float64)


def compute(w: Any, x: Tensor) -> Tensor:
    return x + ((x @ w.up.T).tanh() * w.scale) @ w.down.T + w.bias


def plain(values: dict[str, Tensor]) -> SimpleNamespace:
    """The same attributes, on one device."""
    return SimpleNamespace(**{name: value.clone().requires_grad_() for name, value in values.items()})


def expected(world: int, layers: int = 1, repeat: int = 1) -> list[dict[str, Tensor]]:
    """Gradients on one device, of the sum over all ranks' batches."""
    blocks = [plain(whole(i)) for i in range(layers)]
    for rank in range(world):
        x = batch(rank)
        for block in blocks * repeat:
            x = compute(block, x)
        (x**2).sum().backward()
    return [{name: getattr(block, name).grad for name in SHAPES} for block in blocks]


def setup(spec: str, seed: int = 0, distributed: bool = True, **options: Any) -> tuple[Bucket, dict[str, nn.Parameter]]:
    """A bucket of this rank's parts of the whole weights."""
    mesh = Mesh.bound(MeshSpec.parse(spec))
    sizes = (mesh.spec.size("dp_replicate"), mesh.spec.size("dp_shard"))
    device_mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp_replicate", "dp_shard"))
    parameters = {}
    for name, value in whole(seed).items():
        placement: Placement = Replicate()
        if gather := WEIGHTS[name].gather:
            axis, dim = mesh["dp_shard"], gather["dp_shard"]
            placement = Shard(dim)
            value = value.narrow(dim, axis.start(value.shape[dim]), axis.part(value.shape[dim])).contiguous()
        if distributed:
            stride = torch.empty(SHAPES[name]).stride()
            value = DTensor.from_local(
                value,
                device_mesh,
                (Replicate(), placement),
                run_check=False,
                shape=torch.Size(SHAPES[name]),
                stride=stride,
            )
        parameters[name] = nn.Parameter(value)
    return Bucket(mesh, WEIGHTS, parameters, SHAPES, **options), parameters


def mine(value: Tensor, name: str, bucket_mesh: Mesh) -> Tensor:
    dims, axis = WEIGHTS[name].gather, bucket_mesh["dp_shard"]
    if not dims:
        return value
    size = value.shape[dims["dp_shard"]]
    return value.narrow(dims["dp_shard"], axis.start(size), axis.part(size))


def step(buckets: list[Bucket], x: Tensor, function: Callable = compute, repeat: int = 1) -> Tensor:
    for bucket in buckets * repeat:
        with bucket.gathered() as w:
            x = function(w, x)
    return (x**2).sum()


def check(parameters: Mapping[str, Tensor], gradients: dict[str, Tensor], mesh: Mesh, factor: float = 1.0) -> None:
    for name, parameter in parameters.items():
        assert parameter.grad is not None, name
        got = private.local(parameter.grad)
        torch.testing.assert_close(got, factor * mine(gradients[name], name, mesh), rtol=1e-12, atol=1e-12, msg=name)


def case_gradients(spec: str, distributed: bool) -> None:
    bucket, parameters = setup(spec, distributed=distributed)
    step([bucket], batch(dist.get_rank())).backward()
    mesh = Mesh(MeshSpec.parse(spec), dist.get_rank())
    check(parameters, expected(dist.get_world_size())[0], mesh)
    for parameter in parameters.values():
        assert isinstance(parameter.grad, DTensor) == distributed
        if distributed:
            assert isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor)
            assert parameter.grad.placements == parameter.placements


def case_weights_are_whole(spec: str) -> None:
    bucket, _ = setup(spec)
    with bucket.gathered() as w:
        for name, value in whole().items():
            assert torch.equal(getattr(w, name), value) and getattr(w, name).is_contiguous(), name
            assert getattr(w, name).storage_offset() * 8 % 128 == 0
    assert type(w) is setup(spec)[0]._type


def case_chain_with_prefetch(spec: str) -> None:
    """Three blocks, each twice in a forward (shared), two accumulated forwards, backward with a kept graph."""
    made = [setup(spec, seed) for seed in range(3)]
    buckets = [bucket for bucket, _ in made]
    for left, right in itertools.pairwise(buckets):
        left.next, right.previous = right, left
    x, mesh = batch(dist.get_rank()), Mesh(MeshSpec.parse(spec), dist.get_rank())
    first, second = step(buckets, x, repeat=2), step(buckets, x, repeat=2)
    first.backward(retain_graph=True)
    gradients = expected(dist.get_world_size(), 3, 2)
    for (_, parameters), want in zip(made, gradients, strict=True):
        check(parameters, want, mesh)
    second.backward()
    first.backward()
    for (_, parameters), want in zip(made, gradients, strict=True):
        check(parameters, want, mesh, factor=3)


def case_compiled(spec: str) -> None:
    bucket, parameters = setup(spec)
    traced = torch.compile(compute, backend="aot_eager", fullgraph=True)
    step([bucket], batch(dist.get_rank()), traced).backward()
    check(parameters, expected(dist.get_world_size())[0], Mesh(MeshSpec.parse(spec), dist.get_rank()))


def case_bytes_saved(spec: str) -> None:
    """Backward keeps what one device keeps, less the weights; without the bucket's hooks it would keep them too."""
    x, single = batch(dist.get_rank()).requires_grad_(), plain(whole())
    with saved_tensors_hooks(note := Note(), lambda saved: saved):
        compute(single, x).sum()
    weights = {private.storage_id(getattr(single, name)) for name in SHAPES}
    kept = sum(size for storage, size in note.sizes.items() if storage not in weights)
    assert note.total - kept == 8 * (7 * 6 + 7 + 6 * 7), "one device keeps up, scale and down"

    bucket, _ = setup(spec)
    note = Note()
    original = _Use.pack
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Use, "pack", lambda use, saved: note(original(use, saved)))
        with bucket.gathered() as w:
            compute(w, x).sum()
    assert note.total == kept


class Note:
    """Notes the storages that it is called with, and their bytes."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self.held: list[object] = []

    def __call__(self, saved: object) -> object:
        self.held.append(saved)
        if isinstance(saved, Tensor):
            self.sizes[private.storage_id(saved)] = saved.untyped_storage().nbytes()
        return saved

    @property
    def total(self) -> int:
        return sum(self.sizes.values())


def case_nothing_gathered_is_kept(spec: str) -> None:
    """A weak reference to the buffer's storage dies with the block, though its graph lives."""
    from torch.multiprocessing.reductions import StorageWeakRef

    bucket, parameters = setup(spec)
    x = batch(dist.get_rank())
    with bucket.gathered() as w:
        reference = StorageWeakRef(w.up.untyped_storage())
        y = (compute(w, x) ** 2).sum()
        assert not reference.expired()
    del w
    assert reference.expired(), "the gathered weights outlive their block"
    kept = []
    use = next(iter(bucket._uses))
    y.register_hook(lambda g: kept.append(use._again))
    y.backward()
    assert kept == [None] and use._again is None, "weights gathered for backward are freed when its gradients are there"
    check(parameters, expected(dist.get_world_size())[0], Mesh(MeshSpec.parse(spec), dist.get_rank()))


class Broken(RuntimeError):
    """What a test raises in a backward."""


def refuse(gradient: Tensor) -> None:
    raise Broken


def case_nothing_outlives_its_outputs(spec: str) -> None:
    """Without a backward, or after one that raised, all goes with the outputs: there is no cycle to be collected."""
    made = [setup(spec, seed) for seed in range(2)]
    buckets = [bucket for bucket, _ in made]
    buckets[0].next, buckets[1].previous = buckets[1], buckets[0]
    traced = torch.compile(compute, backend="aot_eager", fullgraph=True)
    gc.collect()
    gc.disable()
    try:
        for function, breaks in itertools.product((compute, traced), (False, True)):
            between = []
            x = batch(dist.get_rank())
            for bucket in buckets:
                with bucket.gathered(keep=bucket is buckets[-1]) as w:
                    x = function(w, x)
                between.append(x)
            assert [len(bucket._uses) for bucket in buckets] == [1, 1]
            if breaks:
                between[0].register_hook(refuse)
                with pytest.raises(Broken):
                    x.sum().backward()
            del w, x, between
            assert [len(bucket._uses) for bucket in buckets] == [0, 0], (function, breaks)
            assert not any(type(x) is Harvest for x in gc.get_objects()), (function, breaks)
    finally:
        gc.enable()


def case_collectives_are_few(spec: str) -> None:
    """One gather forward; one gather, one reduce-scatter and an all-reduce an axis backward."""
    counts: dict[str, int] = {}

    def counted(name: str) -> Callable:
        original = getattr(private, name)

        def call(*args: object) -> Tensor:
            counts[name] = counts.get(name, 0) + 1
            return original(*args)

        return call

    bucket, _ = setup(spec)
    gather, scatter, add = names = ["start_all_gather_each", "start_reduce_scatter_each", "all_reduce_in_place"]
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(private, name, counted(name))
        loss = step([bucket], batch(dist.get_rank()))
        assert counts == {gather: 1}
        loss.backward()
    sums = sum(axis.size > 1 for axis in bucket._ways[-1].reduce)
    assert counts == {gather: 2, scatter: 1, add: sums}


def case_dtypes(spec: str) -> None:
    """Weights are cast before the gather, gradients before the sum; what comes back has the parameter's dtype."""
    bucket, parameters = setup(spec, compute=torch.bfloat16, reduce=torch.float32)
    with bucket.gathered() as w:
        assert {x.dtype for x in w} == {torch.bfloat16}
        for name, value in whole().items():
            assert torch.equal(getattr(w, name), value.bfloat16())
        big = 256.0 if dist.get_rank() == 0 else 1.0
        loss = sum((x * big).sum() for x in w)
    loss.backward()
    total = 256.0 + dist.get_world_size() - 1
    for parameter in parameters.values():
        assert parameter.grad is not None and parameter.grad.dtype == torch.float64
        assert (private.local(parameter.grad) == total).all(), "a bf16 sum would lose the ones"


def case_prefetch_is_dropped_after_a_step(spec: str) -> None:
    """A gather that was started ahead brings old values once the optimizer has stepped."""
    bucket, parameters = setup(spec)
    bucket._start()
    step([bucket], batch(dist.get_rank())).backward()
    bucket._start()
    torch.optim.AdamW(parameters.values(), lr=0.5, foreach=True).step()
    with bucket.gathered() as w:
        up = w.up.detach().clone()
    assert not torch.equal(up, whole()["up"])
    assert isinstance(held := parameters["up"], DTensor) and torch.equal(up, held.full_tensor())
    bucket._start()
    bucket.release()
    assert bucket._started is None


def case_stale_weights_are_an_error(spec: str) -> None:
    bucket, parameters = setup(spec)
    loss = step([bucket], batch(dist.get_rank()))
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.mul_(2)
    with pytest.raises(StaleWeights, match="were changed after the forward"):
        loss.backward()


def case_frozen_and_unused(spec: str) -> None:
    """A frozen weight gets no gradient; one that compute did not use has none, as on one device."""
    bucket, parameters = setup(spec)
    parameters["up"].requires_grad_(False)
    x = batch(dist.get_rank())
    with bucket.gathered() as w:
        assert not w.up.requires_grad and w.down.requires_grad
        loss = (((x @ w.up.T) @ w.down.T) ** 2).sum()
    loss.backward()
    assert parameters["up"].grad is None and parameters["scale"].grad is None
    single = plain(whole())
    for rank in range(dist.get_world_size()):
        (((batch(rank) @ single.up.detach().T) @ single.down.T) ** 2).sum().backward()
    check({"down": parameters["down"]}, {"down": single.down.grad}, Mesh(MeshSpec.parse(spec), dist.get_rank()))


def case_without_gradients(spec: str) -> None:
    bucket, _ = setup(spec)
    with torch.no_grad(), bucket.gathered() as w:
        assert not any(x.requires_grad for x in w)
        x = torch.ones(2, 7, dtype=torch.float64)
    assert not bucket._uses or not any(use.waiting for use in bucket._uses), x


CASES = [
    case_weights_are_whole,
    case_chain_with_prefetch,
    case_compiled,
    case_bytes_saved,
    case_nothing_gathered_is_kept,
    case_nothing_outlives_its_outputs,
    case_collectives_are_few,
    case_dtypes,
    case_prefetch_is_dropped_after_a_step,
    case_stale_weights_are_an_error,
    case_frozen_and_unused,
    case_without_gradients,
]


def all_cases(spec: str) -> None:
    case_gradients(spec, True)
    case_gradients(spec, False)
    for case in CASES:
        case(spec)


@pytest.mark.parametrize(
    "spec", ["dp_shard=2", pytest.param("dp_shard=4", marks=pytest.mark.full), "dp_replicate=2, dp_shard=2"]
)
def test_buckets(spec):
    """All cases above in one world."""
    run(MeshSpec.parse(spec).world_size, all_cases, spec)


def test_without_a_sharding_axis_weights_are_the_parameters_memory():
    mesh = Mesh(MeshSpec.parse(""))
    parameters = {name: nn.Parameter(value) for name, value in whole().items()}
    with Bucket(mesh, WEIGHTS, parameters, SHAPES).gathered() as w:
        assert w.up.data_ptr() == parameters["up"].data_ptr()
        (w.up.sum() * 3).backward()
    gradient = parameters["up"].grad
    assert gradient is not None and torch.equal(gradient, torch.full((7, 6), 3.0, dtype=torch.float64))
    assert parameters["down"].grad is None


def test_a_shape_that_does_not_fit_is_an_error():
    parameters = {name: nn.Parameter(value) for name, value in whole().items()}
    with pytest.raises(ValueError, match=r"parameter 'up' has a local tensor of shape \(7, 6\), .* expects \(4, 6\)"):
        Bucket(Mesh(MeshSpec.parse("dp_shard=2")), WEIGHTS, parameters, SHAPES)
