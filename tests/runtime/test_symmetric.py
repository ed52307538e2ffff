"""Weights and gradients that travel by copies: equal to one device and to collectives, however slow a rank is."""

from __future__ import annotations

import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import ndcompile as nd
from ndcompile.mesh import MeshSpec
from ndcompile.runtime import Bucket, Mesh, StaleWeights, peers, private, symmetric, weight
from ndcompile.runtime.agreement import everyones
from ndcompile.runtime.symmetric import Copies, Symmetric
from tests.claims import assert_same_gradients
from tests.equivalence.compare import own_rows
from tests.models import Residual, Stack, seeded, tokens
from tests.ranks import run
from tests.runtime import test_weights

LONGEST = 0.002
"""Seconds of a random delay at most."""


def rows(mesh: str) -> dict[str, Tensor]:
    return own_rows(tokens(), MeshSpec.parse(mesh), dist.get_rank())


@contextmanager
def slow(before_copies: Callable[[], float], after_barriers: Callable[[], float]) -> Iterator[None]:
    """This rank waits for so long before each copy, and after each barrier."""
    copy, barrier = symmetric.copy, Symmetric.barrier

    def slow_copy(to: Tensor, value: Tensor) -> None:
        time.sleep(before_copies())
        copy(to, value)

    def slow_barrier(memory: Symmetric) -> None:
        barrier(memory)
        time.sleep(after_barriers())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symmetric, "copy", slow_copy)
        patch.setattr(Symmetric, "barrier", slow_barrier)
        yield


def randomly_slow() -> Any:
    """Each rank in its own way, so that they run apart."""
    chance = random.Random(dist.get_rank())

    def seconds() -> float:
        return max(0.0, chance.uniform(-1.0, 1.0)) * LONGEST

    return slow(seconds, seconds)


# ---- buckets: uneven parts, other dims, axes together --------------------------------------------------------------


def bucket_of_copies(mesh: Mesh, weights: Any, parameters: Any, shapes: Any, **options: Any) -> Bucket:
    memory = Symmetric(mesh)
    bucket = Bucket(mesh, weights, parameters, shapes, transport=memory, **options)
    memory.open(torch.device("cpu"))
    return bucket


def cases_of_weights(spec: str) -> None:
    with pytest.MonkeyPatch.context() as patch, randomly_slow():
        patch.setattr(test_weights, "Bucket", bucket_of_copies)
        for case in test_weights.CASES:
            if case not in (test_weights.case_collectives_are_few, test_weights.case_compiled):
                case(spec)
        test_weights.case_gradients(spec, distributed=True)


WIDER = [pytest.param(spec, marks=pytest.mark.full) for spec in ("dp_shard=4", "dp_replicate=2, dp_shard=2")]


@pytest.mark.parametrize("spec", ["dp_shard=2", *WIDER])
def test_buckets(spec):
    run(MeshSpec.parse(spec).world_size, cases_of_weights, spec)


TINY = {"one": (1,), "scalar": (), "rows": (3, 2), "none": (2,)}


def parts_may_be_empty(ranks: int) -> None:
    """Of fewer elements than ranks, summed and gathered."""
    mesh, world = Mesh.bound(MeshSpec.parse(f"dp_shard={ranks}")), dist.get_world_size()
    axis = mesh["dp_shard"]
    ways = {name: weight(name, {"dp_shard": 0} if name in ("rows", "none") else {}, ()) for name in TINY}
    ways |= {name: weight(name, {}, ("dp_shard",)) for name in ("one", "scalar")}
    whole = {name: torch.arange(1.0, 1 + math.prod(shape)).view(shape) for name, shape in TINY.items()}
    held = {name: nn.Parameter(x.clone()) for name, x in whole.items()}
    for name in ("rows", "none"):
        size = len(whole[name])
        held[name] = nn.Parameter(whole[name].narrow(0, axis.start(size), axis.part(size)).clone())
    bucket = bucket_of_copies(mesh, ways, held, TINY)
    with bucket.gathered() as w:
        assert all(torch.equal(getattr(w, name), x) for name, x in whole.items())
        loss = sum(((1 + dist.get_rank()) * x).sum() for x in w)
    assert isinstance(loss, Tensor)
    loss.backward()
    total = world * (world + 1) / 2
    assert all(p.grad is not None and (p.grad == total).all() and p.grad.shape == p.shape for p in held.values())


def test_parts_may_be_empty():
    run(4, parts_may_be_empty, 4)


# ---- models --------------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """One matrix for tokens and logits, a frozen layer, and lengths that no mesh divides."""

    def __init__(self, width: int = 12, vocabulary: int = 31) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Residual(width, 20) for _ in range(2))
        self.frozen = nn.Linear(width, width)
        self.frozen.requires_grad_(False)
        self.bias = nn.Parameter(torch.ones(vocabulary))

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.frozen(self.tokens(ids))
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(x, self.tokens.weight, self.bias)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


class Run:
    """A model on one device and on the mesh, which take the same steps."""

    def __init__(self, mesh: str, kind: type[nn.Module] = Odd, **options: Any) -> None:
        self.mesh, self.model = mesh, seeded(kind).double()
        self.parallel = nd.parallelize(self.model, mesh, tokens(), float64=True, transport="symmetric", **options)
        self._optimizers = [
            torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], eps=1e-3)
            for m in (self.model, self.parallel)
        ]

    def loss(self) -> Tensor:
        return self.parallel(**rows(self.mesh))["loss"]

    def step(self, microbatches: int = 1, accumulating: bool = False) -> None:
        for number in range(microbatches):
            self.model(**tokens())["loss"].backward()
            last = number == microbatches - 1
            with self.parallel.accumulate() if accumulating and not last else nullcontext():
                self.loss().backward()
        self.finish()

    def finish(self) -> None:
        assert_same_gradients(self.parallel, self.model)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()


def steps_are_those_of_one_device(mesh: str) -> None:
    with randomly_slow():
        both = Run(mesh)
        both.step()
        both.step(microbatches=3, accumulating=True)
        broken_backwards(both)
        if mesh == "dp_shard=2":
            both.step(microbatches=2)
            evaluation(both)
            kept = Run(mesh, reshard_after_forward=False)
            kept.step()
            kept.step()


class Broken(Exception):
    pass


def broken_backwards(both: Run) -> None:
    """Before a step: forwards without a backward, and a backward that ends early; after it, a backward of before."""
    both.loss()
    loss, reduce, calls = both.loss(), Bucket._reduce, iter(range(3))

    def fails_at_last(bucket: Bucket, *args: Any) -> None:
        if next(calls) == 2:
            raise Broken
        reduce(bucket, *args)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Broken):
        patch.setattr(Bucket, "_reduce", fails_at_last)
        loss.backward()
    stale = both.loss()
    both.step()
    if "dp_shard" in both.mesh:
        with pytest.raises(StaleWeights, match="were changed after the forward"):
            stale.backward()
    both.step()


def evaluation(both: Run) -> None:
    """The program of eval() has memory of its own; changes in place are seen without an optimizer."""
    for times in (1.0, 2.0):
        for model in (both.model, both.parallel):
            model.eval()
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(times)
        with torch.no_grad():
            assert abs(both.loss().item() - both.model(**tokens())["loss"].item()) < 1e-10
    for model in (both.model, both.parallel):
        model.train()
    both.step()


TWO = ["dp_replicate=2", "dp_shard=2", "cp=2", "tp=2"]
MORE = [
    pytest.param(mesh, marks=pytest.mark.full) for mesh in ("dp_shard=2, cp=2", "dp_shard=4", "dp_replicate=2, tp=2")
]
FOUR = ["dp_shard=2, tp=2", "dp_replicate=2, dp_shard=2", *MORE]


def each(meshes: Sequence[str]) -> None:
    for mesh in meshes:
        steps_are_those_of_one_device(mesh)


def test_two_ranks():
    run(2, each, TWO, timeout=240)


@pytest.mark.parametrize("mesh", FOUR)
def test_four_ranks(mesh):
    run(4, each, [mesh], timeout=240)


# ---- numerics ------------------------------------------------------------------------------------------------------


LOW, FLOAT = torch.bfloat16, torch.float32
DTYPES = [(None, None), (LOW, None), (LOW, FLOAT), (FLOAT, LOW), (FLOAT, FLOAT)]
"""Of compute, and of the sum."""


def gradients(spec: str, compute: torch.dtype | None, reduce: torch.dtype | None) -> list[Tensor]:
    bucket, parameters = test_weights.setup(spec, distributed=False, compute=compute, reduce=reduce)
    x = test_weights.batch(dist.get_rank())
    for _ in range(2):
        test_weights.step([bucket], x.to(compute or x.dtype)).backward()
    return [p.grad for p in parameters.values() if p.grad is not None]


def bits_are_those_of_collectives(spec: str) -> None:
    for dtypes in DTYPES:
        right = gradients(spec, *dtypes)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(test_weights, "Bucket", bucket_of_copies)
            found = gradients(spec, *dtypes)
        assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True)), (spec, dtypes)


def narrow_gradients_travel_as_they_are() -> None:
    """bfloat16 gradients that are summed in float32: half the bytes of float32, and no sum in bfloat16."""
    exchange, sent = Copies._exchange, list[set[torch.dtype]]()

    def noting(copies: Copies, *args: Any) -> symmetric.Exchange:
        made = exchange(copies, *args)
        sent.append({target.dtype for _, _, target in made.pushes})
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Copies, "_exchange", noting)
        patch.setattr(test_weights, "Bucket", bucket_of_copies)
        gradients("dp_shard=2", LOW, FLOAT)
    assert sent == [{LOW}] * 4, "of sharded weights and of the bias, in two backwards"


def weights_are_shown_once_a_step() -> None:
    shown: list[Copies] = []
    show = Copies._show

    def noting(copies: Copies, held: Sequence[Tensor]) -> None:
        shown.append(copies)
        show(copies, held)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Copies, "_show", noting)
        both = Run("dp_shard=2")
        both.step(microbatches=3)
        first = len(shown)
        assert first == len(set(shown)), "each bucket once, for all microbatches, forward and backward"
        both.step()
        assert len(shown) == 2 * first


def saved_programs_travel_so_too() -> None:
    program = nd.compile(seeded(Stack).double(), "dp_shard=2", tokens(), float64=True)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        program.save(file := f"{folder}/program.py")
        for name in ("start_all_gather_each", "start_reduce_scatter_each", "all_reduce_in_place"):
            patch.delattr(private, name)
        model = seeded(Stack).double()
        parallel = nd.load(file, model, transport="symmetric")
        model(**tokens())["loss"].backward()
        parallel(**rows("dp_shard=2"))["loss"].backward()
    assert_same_gradients(parallel, model)


def numerics() -> None:
    saved_programs_travel_so_too()
    for mesh in ("dp_shard=2", "dp_replicate=2"):
        bits_are_those_of_collectives(mesh)
    narrow_gradients_travel_as_they_are()
    weights_are_shown_once_a_step()


def test_numerics():
    run(2, numerics, timeout=240)


# ---- every barrier is needed ---------------------------------------------------------------------------------------

LATE = 0.02
"""Seconds by which a rank is late, which the other needs for much less than this."""


WHOLE = torch.arange(12.0).view(6, 2)


def plain_bucket(spec: str) -> tuple[Bucket, list[nn.Parameter]]:
    """One bucket of equal parts."""
    mesh = Mesh.bound(MeshSpec.parse(spec))
    sharded = spec.startswith("dp_shard")
    ways = {"w": weight("w", {"dp_shard": 0} if sharded else {}, () if sharded else ("dp_replicate",))}
    own = WHOLE.chunk(dist.get_world_size())[dist.get_rank()] if sharded else WHOLE
    parameters = {"w": nn.Parameter(own.clone())}
    return bucket_of_copies(mesh, ways, parameters, {"w": tuple(WHOLE.shape)}), list(parameters.values())


def values(spec: str) -> list[Tensor]:
    """What a rank gathers while weights change, and its gradients of two reductions in a row."""
    bucket, parameters = plain_bucket(spec)
    found = []
    for _ in range(3):
        with torch.no_grad(), bucket.gathered() as w:
            found.append(w.w.clone())
        with torch.no_grad():
            parameters[0].mul_(2)
    losses = []
    for scale in (1.0, 10.0, 100.0):
        with bucket.gathered() as w:
            losses.append((w.w * scale * (1 + dist.get_rank())).sum())
    for loss in losses:
        loss.backward()
        found.append(parameters[0].grad.clone())
    return found


Site = tuple[str, int]


@contextmanager
def without(dropped: Site | None, met: set[Site]) -> Iterator[None]:
    """Barriers but the one that stands there."""
    barrier = Symmetric.barrier

    def some(memory: Symmetric) -> None:
        caller = sys._getframe(2)
        site = caller.f_code.co_name, caller.f_lineno
        met.add(site)
        if site != dropped:
            barrier(memory)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Symmetric, "barrier", some)
        yield


def holds(spec: str, late: int, dropped: Site | None, met: set[Site], patches: Callable[[ExitStack], None]) -> bool:
    """Whether all values are right on all ranks, where one of them is late."""
    seconds = LATE if dist.get_rank() == late else 0.0
    with ExitStack() as stack:
        stack.enter_context(without(dropped, met))
        stack.enter_context(slow(lambda: seconds, lambda: seconds))
        patches(stack)
        found = values(spec)
    dist.barrier()
    once = float(sum(range(1, dist.get_world_size() + 1)))
    right = [WHOLE * 2**i for i in range(3)] + [torch.full_like(found[-1], once * x) for x in (1.0, 11.0, 111.0)]
    return all(everyones(all(torch.equal(a, b) for a, b in zip(found, right, strict=True))))


def one_slot(stack: ExitStack) -> None:
    stack.enter_context(pytest.MonkeyPatch.context()).setattr(Symmetric, "next_turn", lambda memory: 0)


def nothing(stack: ExitStack) -> None:
    pass


def each_barrier_is_needed(ranks: int) -> list[str]:
    needless = []
    for spec in (f"dp_shard={ranks}", f"dp_replicate={ranks}"):
        met: set[Site] = set()
        assert all(holds(spec, late, None, met, nothing) for late in range(ranks)), spec
        for site in sorted(met):
            if all(holds(spec, late, site, set(), nothing) for late in range(ranks)):
                needless.append(f"{site[0]} on {spec}")
    if all(holds(f"dp_shard={ranks}", late, None, set(), one_slot) for late in range(ranks)):
        needless.append("two slots")
    return sorted([*needless, f"{len(met)} barriers with dp_replicate"])


@pytest.mark.parametrize(("ranks", "barriers"), [(2, 1), pytest.param(3, 2, marks=pytest.mark.full)])
def test_each_barrier_and_the_second_slot_are_needed(ranks, barriers):
    """A pair exchanges everything at once; with more ranks shares are summed, and exchanged after another barrier."""
    assert run(ranks, each_barrier_is_needed, ranks, timeout=240)[0] == [f"{barriers} barriers with dp_replicate"]


# ---- what is refused on GPUs, as far as a CPU can tell ---------------------------------------------------------------


def refusal(**patches: Any) -> str:
    """What `require` says on a world of two GPUs whose other rank gives the same answers, on another device."""

    def both(own: Any) -> list[Any]:
        return [own, (own[0], 1)] if isinstance(own, tuple) and own[1] == 0 else [own, own]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "everyones", both)
        patch.setattr(private, "has_symmetric_memory", lambda: patches.get("has", True))
        patch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: patches.get("peers", True))
        try:
            peers.require(torch.device("cuda", 0))
        except nd.CompileError as error:
            return str(error)
    return ""


def test_gpus_that_cannot_share_memory_are_refused():
    assert refusal() == ""
    assert refusal(has=False).splitlines()[0] == "transport='symmetric' and a torch without it"
    assert refusal(peers=False).splitlines() == [
        "transport='symmetric' on GPUs that are not peers",
        "  why     rank 0's GPU cannot address the memory of that of rank 1",
        "  try     transport='nccl'",
    ]
