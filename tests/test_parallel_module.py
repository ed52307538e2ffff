"""The module that users train: signature, names, checkpoints, optimizers, compilation, precision, memory."""

from __future__ import annotations

import gc
import inspect
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

import ndcompile as nd
from ndcompile.runtime import way, weights
from ndcompile.runtime.harvest import Harvest
from tests import ranks
from tests.claims import Claims, assert_close, assert_same_gradients, own, run_claims, whole
from tests.equivalence.grouped import VOCABULARY, Grouped
from tests.models import Mlp, Stack, llama, seeded, tokens

Batch = dict[str, Tensor]


def stack(**sizes: int) -> nn.Module:
    return seeded(Stack, **sizes).double()


def parallel_stack(mesh: str, **options: Any) -> tuple[nd.ParallelModule, nn.Module]:
    """The parallel module in float64, and the model that it was made from."""
    model = stack()
    return nd.parallelize(model, mesh, tokens(), float64=True, **options), model


def assert_same_parameters(parallel: nn.Module, model: nn.Module) -> None:
    found = dict(parallel.named_parameters())
    for name, parameter in model.named_parameters():
        assert_close(found[name], parameter, what=name)


# ---- what it looks like --------------------------------------------------------------------------------------------


def forward_has_the_models_signature() -> None:
    parallel, model = parallel_stack("tp=2")
    assert inspect.signature(parallel.forward) == inspect.signature(model.forward)
    positional = parallel(*tokens().values())["loss"]
    assert_close(positional, parallel(labels=tokens()["labels"], ids=tokens()["ids"])["loss"])


def parameters_are_dtensors_under_the_models_names() -> None:
    parallel, model = parallel_stack("dp_shard=2")
    assert [n for n, _ in parallel.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert list(parallel.state_dict()) == list(model.state_dict())
    for name, parameter in parallel.named_parameters():
        assert isinstance(parameter, DTensor) and isinstance(parameter, nn.Parameter), name
        assert parameter.shape == dict(model.named_parameters())[name].shape
    assert_same_parameters(parallel, model)


class Tied(nn.Module):
    """Tokens to logits with one matrix, and one buffer of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(31, 12)
        self.head = nn.Linear(12, 31, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("shift", torch.full((12,), 0.5))
        self.register_buffer("scale", torch.full((12,), 2.0), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head((self.tokens(ids) + self.shift) * self.scale)


def state_dict_has_the_models_names_with_ties_and_persistent_buffers() -> None:
    model = seeded(Tied)
    parallel = nd.parallelize(model, "tp=2", {"ids": tokens()["ids"]})
    assert list(parallel.state_dict()) == list(model.state_dict()) == ["shift", "tokens.weight", "head.weight"]
    assert [n for n, _ in parallel.named_parameters()] == ["tokens.weight"]
    assert [n for n, _ in parallel.named_buffers()] == ["shift", "scale"]


# ---- checkpoints ---------------------------------------------------------------------------------------------------


def a_state_dict_goes_round() -> None:
    first, model = parallel_stack("tp=2")
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.mul_(3)
    second, _ = parallel_stack("tp=2")
    second.load_state_dict(first.state_dict())
    expected = {name: whole(p) for name, p in first.named_parameters()}
    for name, parameter in second.named_parameters():
        assert_close(parameter, expected[name], what=name)
    assert_close(second(**tokens())["loss"], first(**tokens())["loss"])
    assert_same_parameters(parallel_stack("tp=2")[0], model)


def a_single_device_state_dict_loads(mesh: str) -> None:
    """Rank 0 alone holds it; the vocabulary of 31 divides over no mesh."""
    parallel, _ = parallel_stack(mesh)
    torch.manual_seed(7)
    other = Stack().double()
    state = other.state_dict() if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(parallel, state, options=options)
    assert_same_parameters(parallel, other)
    full: dict[str, Any] = get_model_state_dict(parallel, options=StateDictOptions(full_state_dict=True))
    assert all(torch.equal(full[name], value) for name, value in other.state_dict().items())


def a_single_device_state_dict_loads_on_tp() -> None:
    a_single_device_state_dict_loads("tp=2")


def a_single_device_state_dict_loads_on_dp_shard() -> None:
    a_single_device_state_dict_loads("dp_shard=2")


def a_plain_state_dict_loads(mesh: str) -> None:
    """By `load_state_dict`, on every rank; with a matrix under two names and buffers."""
    model, ids = seeded(Tied), tokens()["ids"]
    parallel = nd.parallelize(model, mesh, {"ids": ids}, outputs="local")
    with torch.no_grad():
        for tensor in (model.get_parameter("tokens.weight"), model.get_buffer("shift")):
            tensor.mul_(3)
    assert parallel.load_state_dict(model.state_dict()) == ([], [])
    assert_same_parameters(parallel, model)
    assert_close(parallel.get_buffer("shift"), model.get_buffer("shift"))
    with pytest.raises(RuntimeError, match="size mismatch"):
        parallel.load_state_dict(model.state_dict() | {"tokens.weight": torch.ones(5, 12)})


def a_plain_state_dict_loads_on_one_axis() -> None:
    for mesh in ("dp_shard=2", "dp_replicate=2", "tp=2"):
        a_plain_state_dict_loads(mesh)


def a_plain_state_dict_loads_on_both() -> None:
    a_plain_state_dict_loads("dp_shard=2, tp=2")


def copies_are_models_of_their_own() -> None:
    """As the moving average of the weights, in both modes; the copied model trains on as one device does."""
    for mesh in ("dp_shard=2", "tp=2"):
        model, x = seeded(Dropped).double(), torch.arange(48.0, dtype=torch.float64).view(4, 12) / 48
        model.dropout.p = 0.0
        parallel = nd.parallelize(model, mesh, x, float64=True)
        parallel(x.chunk(2)[dist.get_rank()] if "dp" in mesh else x)
        averages = []
        for each in (parallel, model):
            optimizer, average = torch.optim.SGD(each.parameters(), lr=0.5), AveragedModel(each)
            for _ in range(2):
                optimizer.zero_grad()
                each(x.chunk(2)[dist.get_rank()] if "dp" in mesh and each is parallel else x).backward()
                optimizer.step()
                average.update_parameters(each)
            averages.append(average)
        assert_same_parameters(parallel, model)
        assert_same_parameters(averages[0].module, averages[1].module)
        for training in (True, False):
            for average in averages:
                average.train(training)
            found = averages[0](x.chunk(2)[dist.get_rank()] if "dp" in mesh else x)
            assert_close(found, averages[1](x))
            found.backward()
            averages[1](x).backward()
        assert_same_gradients(averages[0].module, averages[1].module)


def a_checkpoint_of_one_mesh_loads_on_another() -> None:
    saved, model = parallel_stack("dp_shard=2")
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    state_dict_saver.save(saved.state_dict(), checkpoint_id=folder[0])
    loaded = nd.parallelize(stack(), "tp=2", tokens(), float64=True)
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.zero_()
    state = loaded.state_dict()
    state_dict_loader.load(state, checkpoint_id=folder[0])
    loaded.load_state_dict(state)
    assert_same_parameters(loaded, model)
    assert_close(loaded(**tokens())["loss"], model(**tokens())["loss"])


# ---- training ------------------------------------------------------------------------------------------------------


def trains_as_one_device(mesh: str) -> None:
    """Two microbatches a step, clipped, fused AdamW."""
    parallel, model = parallel_stack(mesh)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in (parallel, model)]
    for _ in range(2):
        for micro in (tokens(4), tokens(8)):
            mine = own(micro) if "dp" in mesh else micro
            (parallel(**mine)["loss"] / 2).backward()
            (model(**micro)["loss"] / 2).backward()
        assert_same_gradients(parallel, model)
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (parallel, model)]
        assert_close(norms[0], norms[1])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_parameters(parallel, model)


def accumulates_clips_and_steps_on_tp() -> None:
    trains_as_one_device("tp=2")


def accumulates_clips_and_steps_on_dp_shard() -> None:
    trains_as_one_device("dp_shard=2")


def accumulates_clips_and_steps_on_dp_replicate() -> None:
    trains_as_one_device("dp_replicate=2")


class Counter:
    """A backend of torch.compile that runs graphs as they are, and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward


def compiled_stack(depth: int, wrap: Callable[[nd.ParallelModule, Counter], Any]) -> int:
    """Graphs that a training step and a second one compile (begin, block, end, loss); loss and gradients are those of
    one device.
    """
    torch.compiler.reset()
    model, counter = seeded(Stack, depth=depth).double(), Counter()
    parallel = nd.parallelize(model, "dp_shard=2", tokens(), float64=True)
    called = wrap(parallel, counter)
    for _ in range(2):
        parallel.zero_grad()
        model.zero_grad()
        loss, expected = called(**own(tokens()))["loss"], model(**tokens())["loss"]
        assert_close(loss, expected)
        loss.backward()
        expected.backward()
        assert_same_gradients(parallel, model)
    return counter.graphs


def by_method(parallel: nd.ParallelModule, counter: Counter) -> Any:
    parallel.compile(backend=counter)
    return parallel


def by_torch(parallel: nd.ParallelModule, counter: Counter) -> Any:
    return torch.compile(parallel, backend=counter)


def compile_makes_one_graph_for_all_equal_blocks() -> None:
    assert compiled_stack(2, by_method) == compiled_stack(5, by_method) == 4


def torch_compile_makes_one_graph_for_all_equal_blocks() -> None:
    assert compiled_stack(2, by_torch) == compiled_stack(5, by_torch) == 4


def a_block_with_attention_over_ranks_is_one_graph() -> None:
    """One for all blocks, one before them, and behind them one of the logits and one of the loss; nothing cuts them."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    parallel, counter = nd.parallelize(llama(layers=3), "cp=2"), Counter()
    parallel.compile(backend=counter)
    ids = torch.arange(32).view(2, 16)
    parallel(input_ids=ids, labels=ids).loss.backward()
    assert counter.graphs == 4 and not torch._dynamo.utils.counters["graph_break"]


def aot_eager_compiles_both_ways() -> None:
    torch.compiler.reset()
    parallel, model = parallel_stack("dp_shard=2")
    expected = model(**tokens())["loss"]
    assert_close(torch.compile(parallel, backend="aot_eager")(**own(tokens()))["loss"], expected)
    parallel.compile(backend="aot_eager")
    loss = parallel(**own(tokens()))["loss"]
    loss.backward()
    expected.backward()
    assert_close(loss, expected)
    assert_same_gradients(parallel, model)


def a_model_that_is_parallelized_again_is_compiled_again() -> None:
    """torch.compile keeps what it makes of a function with its code, and that names what one module has."""
    for _ in range(2):
        parallel, model = parallel_stack("dp_shard=2")
        parallel.compile(backend="aot_eager")
        assert_close(parallel(**own(tokens()))["loss"], model(**tokens())["loss"])


def evaluates_without_gradients() -> None:
    parallel, model = parallel_stack("dp_shard=2")
    with torch.no_grad():
        found = parallel(**own(tokens()))
    assert not found["loss"].requires_grad
    assert_close(found["loss"], model(**tokens())["loss"])
    assert_close(found["logits"], rows(model))


def rows(model: nn.Module) -> Tensor:
    """This rank's rows of the logits."""
    logits = model(**tokens())["logits"]
    assert isinstance(logits, Tensor)
    return logits.chunk(2)[dist.get_rank()]


class Dropped(nn.Module):
    """A model that is another one in eval()."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.mlp(x)).square().mean()


def eval_is_a_program_of_its_own_on_the_same_parameters() -> None:
    model, x = seeded(Dropped).double(), torch.ones(4, 12, dtype=torch.float64)
    parallel = nd.parallelize(model, "tp=2", x, float64=True)
    held = {name: id(p) for name, p in parallel.named_parameters()}
    assert list(parallel._programs) == [True]
    parallel.eval()
    assert_close(parallel(x), model.eval()(x))
    assert {name: id(p) for name, p in parallel.named_parameters()} == held
    with torch.no_grad():
        for parameter in (*parallel.parameters(), *model.parameters()):
            parameter.mul_(2)
    assert_close(parallel(x), model(x))
    parallel.train()
    torch.manual_seed(0)
    assert (parallel(x) - model(x)).abs() > 1e-6, "dropout is back"
    assert sorted(parallel._programs) == [False, True]


class Partly(nn.Module):
    """One layer is frozen, one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(12, 12)
        self.used = Mlp()
        self.spare = nn.Linear(12, 5)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(self.frozen(x)).square().mean()


def frozen_and_unused(mesh: str) -> None:
    model, x = seeded(Partly).double(), torch.arange(48.0, dtype=torch.float64).view(4, 12) / 48
    parallel = nd.parallelize(model, mesh, x, float64=True)
    mine = x.chunk(2)[dist.get_rank()] if "dp" in mesh else x
    loss, expected = parallel(mine), model(x)
    loss.backward()
    expected.backward()
    assert_close(loss, expected)
    assert_same_gradients(parallel, model)
    flags = {name: p.requires_grad for name, p in parallel.named_parameters()}
    assert flags == {name: p.requires_grad for name, p in model.named_parameters()}


def frozen_and_unused_parameters_have_no_gradient_on_tp() -> None:
    frozen_and_unused("tp=2")


def frozen_and_unused_parameters_have_no_gradient_on_dp_shard() -> None:
    frozen_and_unused("dp_shard=2")


# ---- how it starts -------------------------------------------------------------------------------------------------


def a_meta_model_is_sharded_from_the_start() -> None:
    with torch.device("meta"):
        model = Stack()
    parallel = nd.parallelize(model, "dp_shard=2", tokens())
    held = sum(p.to_local().numel() for p in parallel.parameters())  # type: ignore[attr-defined]
    total = sum(p.numel() for p in model.parameters())
    assert held <= total / 2 + 16 * 12, "each rank has its part, the first one more row of an odd matrix"
    assert all(p.is_meta for p in model.parameters())
    other = seeded(Stack)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(parallel, other.state_dict() if dist.get_rank() == 0 else {}, options=options)
    assert_close(parallel(**own(tokens()))["loss"], other(**tokens())["loss"], 1e-6)


def broadcast_takes_the_values_of_rank_0() -> None:
    torch.manual_seed(dist.get_rank())
    model = Stack().double()
    before = {name: p.clone() for name, p in model.named_parameters()}
    parallel = nd.parallelize(model, "tp=2", tokens(), float64=True, init="broadcast")
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters()), "the model keeps its own"
    torch.manual_seed(0)
    assert_same_parameters(parallel, Stack().double())


def gloos_ranks_stay_on_the_cpu_beside_gpus() -> None:
    with patch("torch.cuda.is_available", return_value=True), patch("torch.cuda.current_device", return_value=0):
        parallel, _ = parallel_stack("dp_shard=2")
    assert {whole(p).device.type for p in parallel.parameters()} == {"cpu"}


def a_device_mesh_is_a_mesh() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = stack()
    parallel = nd.parallelize(model, mesh, tokens(), float64=True)
    assert_close(parallel(**tokens())["loss"], model(**tokens())["loss"])
    assert next(parallel.parameters()).device_mesh == mesh  # type: ignore[attr-defined]


def a_device_mesh_may_have_axes_of_size_one() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp"))
    model = stack()
    parallel = nd.parallelize(model, mesh, tokens(), float64=True)
    assert_close(parallel(**tokens())["loss"], model(**tokens())["loss"])
    parallel(**tokens())["loss"].backward()
    model(**tokens())["loss"].backward()
    assert_same_gradients(parallel, model)


def a_device_mesh_may_have_names_of_other_libraries() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor_parallel_size",))
    model = stack()
    parallel = nd.parallelize(model, mesh, tokens(), float64=True)
    assert_close(parallel(**tokens())["logits"], model(**tokens())["logits"])


def a_device_mesh_has_an_axis_that_is_cut() -> None:
    """2 heads of keys on 4 ranks: trained in one mode, run in the other, saved and loaded."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    model = seeded(Grouped, 8, 2, repeat=True).double()
    given = tokens(vocabulary=VOCABULARY)
    parallel = nd.parallelize(model, mesh, given, float64=True)
    key = parallel.get_parameter("layers.0.k.weight")
    assert key.device_mesh.mesh_dim_names == ("tp.0", "tp.1")  # type: ignore[attr-defined]
    assert key.to_local().shape == (4, 16)  # type: ignore[attr-defined]
    for m in (parallel, model):
        m(**given)["loss"].backward()
    assert_same_gradients(parallel, model)
    for m in (parallel, model):
        m.eval()
    assert_close(parallel(**given)["loss"], model(**given)["loss"])
    state = {name: value.clone() for name, value in parallel.state_dict().items()}
    with torch.no_grad():
        key.zero_()
    parallel.load_state_dict(state)
    assert_close(parallel(**given)["loss"], model(**given)["loss"])


def axes_of_size_one_change_nothing() -> None:
    plain, _ = parallel_stack("tp=2")
    more, model = parallel_stack("dp_replicate=1, dp_shard=1, tp=2")
    losses = [m(**tokens())["loss"] for m in (plain, more)]
    assert torch.equal(losses[0], losses[1])
    losses[1].backward()
    model(**tokens())["loss"].backward()
    assert_same_gradients(more, model)


def a_transformers_model_needs_no_example_inputs() -> None:
    model, ids = llama(layers=1), tokens(vocabulary=131)["ids"]
    parallel = nd.parallelize(model, "tp=2")
    assert_close(parallel(input_ids=ids, labels=ids).loss, model(input_ids=ids, labels=ids).loss, 1e-6)


# ---- uneven sizes --------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Sizes of which both axes of a mesh can only make unequal parts."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(6, 10)
        self.two = nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(F.gelu(self.one(x)))


def uneven_parts_of_parts_train_as_one_device() -> None:
    model, x = seeded(Odd).double(), torch.arange(24.0, dtype=torch.float64).view(4, 6) / 24
    for pins in ({}, {"two.weight": {"tp": nd.S(0)}}):
        parallel = nd.parallelize(model, "dp_shard=2, tp=2", x, float64=True, outputs="local", placements=pins)
        model.zero_grad()
        found, expected = parallel(x.chunk(2)[dist.get_rank() // 2]), model(x)
        assert_close(found, expected.chunk(2)[dist.get_rank() // 2])
        found.square().mean().backward()
        expected.square().mean().backward()
        assert_same_gradients(parallel, model)
        assert_same_parameters(parallel, model)


# ---- precision and memory ------------------------------------------------------------------------------------------


def low_precision_keeps_float32_parameters(mesh: str) -> None:
    """‖x − ref64‖ ≤ 4 · max(‖ref_bf16 − ref64‖, u · √depth · ‖ref64‖) for the loss and each gradient."""
    precision = nd.Precision(compute=torch.bfloat16, reduce=torch.float32)
    model = seeded(Stack)
    parallel = nd.parallelize(model, mesh, tokens(), precision=precision)
    batch = own(tokens()) if "dp" in mesh else tokens()
    exact, low = seeded(Stack).double(), seeded(Stack)
    lowered = nd.compile(low, "", tokens(), precision=precision).one_device(low)
    found, expected, rounded = (m(**b)["loss"] for m, b in ((parallel, batch), (exact, tokens()), (lowered, tokens())))
    for loss in (found, expected, rounded):
        loss.backward()
    assert_within(found, expected, rounded, "loss")
    for name, parameter in parallel.named_parameters():
        assert parameter.dtype == torch.float32 and parameter.grad is not None
        assert parameter.grad.dtype == torch.float32, name
        true, low_grad = (dict(m.named_parameters())[name].grad for m in (exact, low))
        assert true is not None and low_grad is not None
        assert_within(parameter.grad, true, low_grad, name)


def assert_within(found: Tensor, expected: Tensor, rounded: Tensor, what: str, depth: int = 16) -> None:
    unit = torch.finfo(torch.bfloat16).eps / 2
    error = (whole(found).double() - expected).norm().item()
    allowed = 4 * max((rounded.double() - expected).norm().item(), unit * depth**0.5 * expected.norm().item())
    assert error <= allowed, f"{what}: {error} > {allowed}"


def low_precision_stays_near_on_tp() -> None:
    low_precision_keeps_float32_parameters("tp=2")


def low_precision_stays_near_on_dp_shard() -> None:
    low_precision_keeps_float32_parameters("dp_shard=2")


def saved_bytes(module: nn.Module, batch: Batch) -> int:
    """The bytes of the distinct storages that autograd keeps of a forward, inside a bucket's own hooks and outside."""
    kept: dict[int, Tensor] = {}
    own_pack = weights._Use.pack

    def keep(x: Any) -> Any:
        if isinstance(x, Tensor):
            plain = x.to_local() if isinstance(x, DTensor) else x
            kept[plain.untyped_storage().data_ptr()] = plain
        return x

    with (
        patch.object(weights._Use, "pack", lambda use, x: keep(own_pack(use, x))),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x),
    ):
        result = module(**batch)
    assert result["loss"].requires_grad
    return sum(x.untyped_storage().nbytes() for x in kept.values())


def the_whole_model_can_be_freed() -> None:
    """Nothing of what `parallelize` leaves behind holds the parameters that it was given, nor does eval mode."""
    model = seeded(Stack)
    held = [weakref.ref(p) for p in model.parameters()]
    parallel = nd.parallelize(model, "dp_shard=2", tokens())
    del model
    gc.collect()
    assert not any(parameter() is not None for parameter in held)
    parallel.eval()
    parallel(**own(tokens()))


def gathered_weights_are_not_kept_for_backward() -> None:
    """What dp_shard keeps grows with the batch alone: nothing is left when a sample's share is taken away. The last
    bucket has its weights at hand.
    """
    model = seeded(Stack, width=64, hidden=256)
    parallel = nd.parallelize(model, "dp_shard=2", tokens())
    parallel(**tokens(2))
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    small, large = (saved_bytes(parallel, tokens(n)) for n in (2, 4))
    constant = 2 * small - large
    assert constant <= 0.02 * nbytes, f"{constant} bytes that no sample explains, of {nbytes} bytes of weights"
    assert large > small > 0
    result = parallel(**tokens(2))
    at_hand = [any(use._kept for use in bucket._uses) for bucket in parallel._program()[0]._state.order]
    assert at_hand == [False] * (len(at_hand) - 1) + [True], result
    single = [saved_bytes(model, tokens(n)) for n in (2, 4)]
    assert 2 * single[0] - single[1] >= 0.8 * nbytes, "on one device autograd keeps the weights"


class Landed:
    """Notes every weight that was gathered, and tells the bytes of those that are alive."""

    def __init__(self) -> None:
        self._notes: list[tuple[StorageWeakRef, int]] = []

    def note(self, found: list[Tensor]) -> list[Tensor]:
        self._notes += [(StorageWeakRef(x.untyped_storage()), x.untyped_storage().nbytes()) for x in found]
        return found

    @property
    def alive(self) -> int:
        return sum({note.cdata: size for note, size in self._notes if not note.expired()}.values())


def forwards_without_a_backward_hold_what_one_holds() -> None:
    """Weights that backward would have at hand among it; and nothing once the results are gone."""
    batch, land = own(tokens()), way.Gather.land
    for backend, remat in ((None, "none"), (None, "block"), ("aot_eager", "none")):
        parallel = nd.parallelize(seeded(Stack, depth=3), "dp_shard=2", tokens(), remat=remat)
        if backend is not None:
            torch.compiler.reset()
            parallel.compile(backend=backend)
        parallel(**batch)["loss"].backward()  # learns the order of buckets
        buckets, landed = parallel._program()[0]._state.order, Landed()

        gc.collect()
        gc.disable()
        others = harvests()

        def held(buckets: Any = buckets, landed: Landed = landed, others: int = others) -> tuple[int, int, int]:
            return harvests() - others, sum(len(bucket._uses) for bucket in buckets), landed.alive

        with patch.object(way.Gather, "land", lambda gather, landed=landed: landed.note(land(gather))):
            result, first = parallel(**batch), held()
            assert first[:2] == (1, len(buckets)) and first[2] > 0
            for _ in range(9):
                result = parallel(**batch)
            assert held() == first, (backend, remat)
            with patch.object(weights.Bucket, "_reduce", refuse), pytest.raises(Broken):
                result["loss"].backward()
            del result
            torch.ones((), requires_grad=True).backward()  # torch's queue holds what was ready until the next one
            assert held() == (0, 0, 0), (backend, remat)
        gc.enable()


def harvests() -> int:
    return sum(type(x) is Harvest for x in gc.get_objects())


class Broken(RuntimeError):
    """What a test raises in a backward."""


def refuse(*args: object) -> None:
    raise Broken


# ---- programs on disk ----------------------------------------------------------------------------------------------


def save_a_program(path: str) -> float:
    model = stack()
    program = nd.compile(model, "dp_shard=2", tokens(), float64=True)
    if dist.get_rank() == 0:
        program.save(path)
    parallel = nd.parallelize(model, "dp_shard=2", tokens(), float64=True)
    return float(parallel(**own(tokens()))["loss"])


def load_a_program(path: str) -> list[float]:
    losses = [float(nd.load(path, stack())(**own(tokens()))["loss"])]
    empty = nd.load(path)
    assert all(not whole(p).any() for p in empty.parameters())
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(empty, stack().state_dict() if dist.get_rank() == 0 else {}, options=options)
    return [*losses, float(empty(**own(tokens()))["loss"])]


def test_a_saved_program_gives_equal_losses_in_other_processes(tmp_path: Path) -> None:
    path = str(tmp_path / "program.py")
    expected = ranks.run(2, save_a_program, path)
    assert ranks.run(2, load_a_program, path) == [[expected[0]] * 2] * 2


# ---- all of the above in one set of processes each -----------------------------------------------------------------

ON_TWO: Claims = (
    forward_has_the_models_signature,
    parameters_are_dtensors_under_the_models_names,
    state_dict_has_the_models_names_with_ties_and_persistent_buffers,
    a_state_dict_goes_round,
    a_single_device_state_dict_loads_on_tp,
    a_single_device_state_dict_loads_on_dp_shard,
    a_checkpoint_of_one_mesh_loads_on_another,
    a_plain_state_dict_loads_on_one_axis,
    copies_are_models_of_their_own,
    accumulates_clips_and_steps_on_tp,
    accumulates_clips_and_steps_on_dp_shard,
    accumulates_clips_and_steps_on_dp_replicate,
    compile_makes_one_graph_for_all_equal_blocks,
    torch_compile_makes_one_graph_for_all_equal_blocks,
    a_block_with_attention_over_ranks_is_one_graph,
    aot_eager_compiles_both_ways,
    a_model_that_is_parallelized_again_is_compiled_again,
    evaluates_without_gradients,
    eval_is_a_program_of_its_own_on_the_same_parameters,
    frozen_and_unused_parameters_have_no_gradient_on_tp,
    frozen_and_unused_parameters_have_no_gradient_on_dp_shard,
    a_meta_model_is_sharded_from_the_start,
    broadcast_takes_the_values_of_rank_0,
    gloos_ranks_stay_on_the_cpu_beside_gpus,
    a_device_mesh_is_a_mesh,
    a_device_mesh_may_have_axes_of_size_one,
    a_device_mesh_may_have_names_of_other_libraries,
    axes_of_size_one_change_nothing,
    a_transformers_model_needs_no_example_inputs,
    low_precision_stays_near_on_tp,
    low_precision_stays_near_on_dp_shard,
    the_whole_model_can_be_freed,
    gathered_weights_are_not_kept_for_backward,
    forwards_without_a_backward_hold_what_one_holds,
)
ON_FOUR: Claims = (
    uneven_parts_of_parts_train_as_one_device,
    a_device_mesh_has_an_axis_that_is_cut,
    a_plain_state_dict_loads_on_both,
)


@pytest.fixture(scope="module")
def two() -> list[dict[str, str]]:
    return ranks.run(2, run_claims, ON_TWO, timeout=240)


@pytest.fixture(scope="module")
def four() -> list[dict[str, str]]:
    return ranks.run(4, run_claims, ON_FOUR, timeout=120)


@pytest.mark.parametrize("claim", ON_TWO, ids=lambda claim: claim.__name__)
def test_on_two_ranks(claim: Callable[[], None], two: list[dict[str, str]]) -> None:
    assert [theirs[claim.__name__] for theirs in two] == ["", ""]


@pytest.mark.parametrize("claim", ON_FOUR, ids=lambda claim: claim.__name__)
def test_on_four_ranks(claim: Callable[[], None], four: list[dict[str, str]]) -> None:
    assert [theirs[claim.__name__] for theirs in four] == [""] * 4
