"""A program on real process groups beside the untouched model on one device: run by every rank alike, under torchrun.

Whole numbers through every conversion, some training steps by the error model, and the same steps with delays around
the collectives.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ndcompile import bind
from ndcompile.api import compile, require_recordable
from ndcompile.axes import data_ranks
from ndcompile.errors import CompileError
from ndcompile.inputs import Inputs
from ndcompile.mesh import MeshLike
from ndcompile.precision import Precision
from ndcompile.program import Program
from ndcompile.request import check_option
from ndcompile.runtime.agreement import everyones, together
from ndcompile.runtime.module import ParallelModule
from ndcompile.runtime.recorded import WARM_UP
from ndcompile.verify import field_on_wires, payloads, training
from ndcompile.verify.delays import delayed, jittered
from ndcompile.verify.error_model import ErrorModel, Measured
from ndcompile.verify.execute import cotangent_scales, input_dims
from ndcompile.verify.measure import Ruler, assembled, result_dims
from ndcompile.verify.own_dtypes import depth_of
from ndcompile.verify.places import part
from ndcompile.verify.report import Claim, Report
from ndcompile.verify.training import Recipe, Trained

PRECISIONS = {"bf16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
EPS = {"bf16": 1e-3, "float32": 1e-3, "float64": 1e-8}


@dataclass(frozen=True)
class Job:
    """What is verified: a model with values, on this rank's device, the global batch, and how it is trained.

    `halves`, `transport` and `cuda_graph` are `parallelize`'s.
    """

    model: nn.Module
    inputs: Inputs
    precision: str
    recipe: Recipe
    halves: bool = False
    transport: str = "nccl"
    cuda_graph: bool = False

    @classmethod
    def of(
        cls,
        model: nn.Module,
        example_inputs: object,
        precision: str,
        steps: int,
        device: torch.device,
        **how: Any,
    ) -> Job:
        """The model in float32 (in float64 for that precision), since low precision keeps its parameters so."""
        if precision not in PRECISIONS:
            raise CompileError(f"precision {precision!r} is unknown", tries=" or ".join(PRECISIONS))
        if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
            raise CompileError(
                "the model is on the meta device", why="it is trained, so it needs values", tries="a model with weights"
            )
        inputs = training.moved(Inputs.of(example_inputs), lambda x: x.to(device))
        recipe = Recipe(steps=steps, eps=EPS[precision])
        if precision == "float64":
            return cls(model.to(device).double(), training.in_double(inputs), precision, recipe, **how)
        return cls(model.to(device).float(), inputs, precision, recipe, **how)

    @property
    def dtype(self) -> torch.dtype:
        return PRECISIONS[self.precision]

    def compiled(self, mesh: MeshLike) -> Program:
        low = Precision(compute=self.dtype, reduce=torch.float32) if self.precision == "bf16" else None
        example = self.inputs.kwargs or self.inputs.args
        return compile(self.model, mesh, example, precision=low, float64=self.precision == "float64",
                       halves=self.halves, world_size=dist.get_world_size())  # fmt: skip


@dataclass
class References:
    """The right answers, and those of one device in low precision: on the global batch, the same for every mesh."""

    exact: list[Trained]
    low: list[Trained]
    seconds: float

    @classmethod
    def of(cls, job: Job, program: Program, exact: list[Trained] | None = None) -> References:
        """`exact` may be given where it is known already, from another precision of the same model."""
        begin = time.perf_counter()

        def call(model: nn.Module) -> nn.Module:
            return program.one_device(model) if program.manifest.random else model

        def runs(steps: Iterator[Trained]) -> list[Trained]:
            try:
                return list(steps)
            except RuntimeError as error:
                raise CompileError(
                    f"the untouched {type(job.model).__name__} does not train in {job.precision} on one device",
                    why=str(error).splitlines()[0],
                    tries=[f"precision {p}" for p in PRECISIONS if p != job.precision],
                ) from error  # fmt: skip

        exact = exact or runs(training.exactly(job.model, call, job.inputs, _cotangent, job.recipe))
        if job.precision == "float64":
            return cls(exact, exact, time.perf_counter() - begin)
        cast = job.dtype if job.precision == "bf16" else None
        low = runs(training.rounded(job.model, call, job.inputs, _cotangent, job.recipe, cast))
        return cls(exact, low, time.perf_counter() - begin)


def _cotangent(name: str, shape: Sequence[int]) -> Tensor:
    """Random numbers for a whole result, the same on every rank."""
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


class OnRanks:
    """A program bound to this rank's place, and what is compared on it."""

    def __init__(self, job: Job, program: Program) -> None:
        self.job, self.program, self.mesh, self.rank = job, program, program.mesh, dist.get_rank()
        together(self._check_batch)
        self.parallel: ParallelModule = bind.bind(
            program, job.model, program.mesh, _no_other_mode, "check", job.transport
        )
        if job.cuda_graph:
            self.parallel.record()
        self.inputs = self._own_inputs()
        before = {name: p.detach().clone() for name, p in job.model.named_parameters()}
        self.ruler = Ruler(program, before, job.recipe.learning_rate, exact=job.precision == "float64")

    @property
    def device(self) -> torch.device:
        return next(self.job.model.parameters()).device

    def _tensors(self) -> dict[str, Tensor]:
        manifest = self.program.manifest
        found = manifest.tensors(self.job.inputs.args, self.job.inputs.kwargs)
        return dict(zip(manifest.inputs, found, strict=True))

    def _check_batch(self) -> None:
        ranks = data_ranks(self.mesh)
        for (name, x), dims in zip(self._tensors().items(), input_dims(self.program), strict=True):
            for dim, axes in enumerate(dims):
                if axes and x.shape[dim] % ranks:
                    raise CompileError(
                        f"input '{name}' has {x.shape[dim]} samples, which do not divide by {ranks} data ranks",
                        why="the example inputs are the global batch here", tries=f"a batch of {ranks * 2} samples",
                    )  # fmt: skip

    def _own_inputs(self) -> Inputs:
        dims = dict(zip(map(id, self._tensors().values()), input_dims(self.program), strict=True))
        return training.moved(self.job.inputs, lambda x: part(x, dims[id(x)], self.mesh, self.rank).contiguous())

    def train(self, exact: Sequence[Trained]) -> list[Trained]:
        """The steps on the mesh, from the model's own parameters; afterwards they are what they were.

        With `cuda_graph` each of them is replayed: those that come before the recorded one, and that one, are taken
        the first time, and not looked at.
        """
        whole = exact[0].results
        dims, scales = result_dims(self.program, whole), dict(zip(whole, cotangent_scales(self.program), strict=False))

        def cotangent(name: str, shape: Sequence[int]) -> Tensor:
            return part(_cotangent(name, whole[name].shape), dims[name], self.mesh, self.rank) * scales[name]

        def steps(recipe: Recipe) -> list[Trained]:
            with training.restored(self.parallel):
                return list(training.on_mesh(self.parallel, self.inputs, cotangent, recipe))

        if self.job.cuda_graph and not self.parallel.replays:
            steps(replace(self.job.recipe, steps=WARM_UP + 1))
            assert self.parallel.replays, "a step is recorded after the first ones"
        return steps(self.job.recipe)

    # ---- whole numbers -----------------------------------------------------------------------------------------------

    def payloads(self) -> Claim:
        """Every distinct conversion, and every distinct bucket of weights, forward and backward."""
        begin = time.perf_counter()
        sizes: dict[str, int] = {}
        for plan, x in zip(self.program.manifest.input_plans, self._tensors().values(), strict=True):
            sizes |= {d: n for d, n in zip(plan.dims, x.shape, strict=True) if isinstance(d, str)}
        count, mine = payloads.differences(self.program, self.parallel._mesh, self.device, sizes, self.job.transport)
        texts = _from_all(mine)
        evidence = [f"{count} conversions and buckets of weights, forward and backward: every bit is right"]
        return Claim("tested (real ranks, integers)", not texts, _few(texts) or evidence, time.perf_counter() - begin)

    def in_the_field(self) -> Claim:
        """The whole program, exact over the wires."""
        return field_on_wires.claim(
            self.program, self.job.model, self.parallel._mesh, self.device, everyones, self.job.transport
        )

    # ---- the error model ---------------------------------------------------------------------------------------------

    def measure(self, taken: Sequence[Trained], right: References) -> list[Measured]:
        """Every tensor of every step, each on the replica where it is furthest from float64."""
        return assembled(everyones(list(self.ruler.steps(self.rank, taken, right.exact, right.low))), self.mesh)

    def trained(self, right: References, how: str) -> Claim:
        """The error model over all steps."""
        begin = time.perf_counter()
        found = self.measure(self.train(right.exact), right)
        bad, zero = self.error_model.told(found), self.ruler.zero(right.exact[0].gradients)
        evidence = bad or self.error_model.evidence(found)
        if zero and not bad:
            evidence.append(f"zero by mathematics, not compared: {len(zero)} gradients ({min(zero)}, …)")
        return Claim(self._kind(how), not bad, evidence, time.perf_counter() - begin)

    @property
    def error_model(self) -> ErrorModel:
        return ErrorModel(self.job.dtype, depth_of(self.program))

    def _kind(self, how: str) -> str:
        recorded = ", recorded" if self.job.cuda_graph else ""
        return f"tested (real ranks, {self.job.precision}, {how}{recorded})"

    # ---- delays ------------------------------------------------------------------------------------------------------

    def delays(self, right: References, runs: int, how: str) -> Claim:
        """The same steps with random delays: within the error model (what is always read too early has always the same
        bits), and the same bits, where two runs without delays have the same.

        Compiled code and recorded steps are delayed from beside, and only on GPUs: to look into them would be to run
        them as they are not.
        """
        begin = time.perf_counter()
        beside = how == "compiled" or self.job.cuda_graph
        if beside and self.device.type != "cuda":
            text = f"{'a recorded step' if self.job.cuda_graph else 'compiled code'} is delayed on GPUs only"
            return Claim(self._kind(f"{how}, delays"), None, [text], 0.0)
        moves = "collectives and copies" if self.job.transport == "symmetric" else "collectives"
        disturb, where = (jittered, "stalls of streams") if beside else (delayed, moves)
        first, second = self.train(right.exact), self.train(right.exact)
        bitwise = all(everyones(not list(_unequal(first, second))))
        texts, delayed_count = [], 0
        for number in range(runs):
            with disturb(1000 * number + self.rank, self.device) as count:
                taken = self.train(right.exact)
            delayed_count += count[0]
            if bitwise:
                texts += _from_all([f"{what} has other bits with delays" for what in _unequal(first, taken)])
            texts += [f"{text}, with delays" for text in self.error_model.told(self.measure(taken, right))]
        same = "the same bits as without" if bitwise else "within the error model (two runs without delays differ)"
        evidence = [f"{delayed_count} {where} in {runs} runs with delays: {same}"]
        return Claim(self._kind(f"{how}, delays"), not texts, _few(texts) or evidence, time.perf_counter() - begin)


def _unequal(one: Sequence[Trained], two: Sequence[Trained]) -> Iterator[str]:
    """What differs between two runs on this rank, in any bit."""
    for number, (a, b) in enumerate(zip(one, two, strict=True)):
        pairs: dict[str, tuple[Any, Any]] = {}
        for what in ("results", "gradients", "parameters", "buffers"):
            mine, theirs = getattr(a, what), getattr(b, what)
            pairs |= {f"{what.removesuffix('s')} {name}": (x, theirs[name]) for name, x in mine.items()}
        pairs["gradient norm"] = a.norm, b.norm
        for what, (x, y) in pairs.items():
            if isinstance(x, Tensor) and not payloads.same(x, y):
                yield f"step {number}: {what}"


def _from_all(mine: Sequence[str]) -> list[str]:
    """What any rank has to say, once."""
    texts = [f"{text} on rank {rank}" for rank, theirs in enumerate(everyones(list(mine))) for text in theirs]
    return texts


def _few(texts: Sequence[str]) -> list[str]:
    return [*texts[:5], *([f"and {len(texts) - 5} more"] if len(texts) > 5 else [])]


def _no_other_mode(training: bool) -> Program:
    raise AssertionError("verification stays in the model's present mode")


def verify_on_ranks(
    model: nn.Module,
    mesh: MeshLike,
    example_inputs: object = None,
    *,
    precision: str = "bf16",
    steps: int = 2,
    modes: Sequence[str] = ("eager",),
    delays: int = 2,
    backend: str = "inductor",
    halves: bool = False,
    transport: str = "nccl",
    cuda_graph: bool = False,
) -> Report:
    """Compile a model and test it on the process group's real ranks; called by every rank alike, under torchrun.

    `example_inputs` is the global batch, equal on every rank, as are the model's values. `precision` is bf16 (computes
    in bfloat16, reduces in float32), float32 or float64; `modes` of eager and compiled, the latter by `backend`;
    `delays` the number of runs with random delays; `halves`, `transport` and `cuda_graph` are `parallelize`'s. The
    report is the same on every rank.
    """
    bind.join_world()
    check_option("transport", transport, bind.TRANSPORTS)
    if cuda_graph:
        together(require_recordable)
    job = Job.of(
        model, example_inputs, precision, steps, bind.own_device(),
        halves=halves, transport=transport, cuda_graph=cuda_graph,
    )  # fmt: skip
    program = together(lambda: job.compiled(mesh))
    ranks = OnRanks(job, program)
    right = References.of(job, program)
    claims = [ranks.payloads(), ranks.in_the_field()]
    for how in modes:
        claims += claims_of(ranks, right, how, delays, backend)
    return report(ranks, claims)


def claims_of(ranks: OnRanks, right: References, how: str, delays: int, backend: str = "inductor") -> list[Claim]:
    """The error model and the delays, eager or compiled (after which a program stays compiled)."""
    if how == "compiled":
        ranks.parallel.compile(backend=backend)
    found = [ranks.trained(right, how)]
    return [*found, ranks.delays(right, delays, how)] if delays else found


def report(ranks: OnRanks, claims: Sequence[Claim]) -> Report:
    sizes = ", ".join(f"{name} {list(x.shape)}" for name, x in ranks._tensors().items())
    place, job = f"{dist.get_world_size()} ranks over {dist.get_backend()} on {ranks.device.type}", ranks.job
    how = ['tensors travel by transport="symmetric"'] if job.transport == "symmetric" else []
    how += [f"steps are replayed from a CUDA graph, after {WARM_UP} others"] if job.cuda_graph else []
    return Report(
        f"{ranks.program.manifest.model} on {ranks.mesh}",
        list(claims),
        ["; ".join([f"the model's own, on {place}", *how, f"the global batch is {sizes}"])],
        [text for claim in claims if claim.held is False for text in claim.evidence],
        not_checked=["the types, and the program at other sizes and on other meshes: nd.verify"],
    )
