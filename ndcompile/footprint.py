"""What a rank needs of memory, before anything runs: the emitted text on tensors without memory, which are counted.

One training step of one rank runs on the meta device, forward and backward, with torch's own autograd. So what is kept
for backward is what eager execution keeps, and each tensor lives as long as it would there.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.nn import functional as F

from ndcompile.bind import TRANSPORTS, execute
from ndcompile.codegen.emit import emit
from ndcompile.cost import NOMINAL
from ndcompile.errors import CompileError
from ndcompile.ledger import Ledger, rounded
from ndcompile.listing import amount
from ndcompile.passes.mark_recomputed import made_in, mark_recomputed
from ndcompile.pipeline import copied
from ndcompile.program import Program
from ndcompile.remat import ROOT, Kept, Policy, saved_by
from ndcompile.request import check_option
from ndcompile.runtime import Bucket, Mesh, Root, private, wires
from ndcompile.runtime.mesh import grouped
from ndcompile.runtime.peers import Peers
from ndcompile.runtime.symmetric import Symmetric
from ndcompile.runtime.transport import Collectives

ADAMW = 2
"""Tensors of a parameter's size that AdamW keeps."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank in a training step: forward and backward as eager execution does them, and a fused AdamW.

    Parts of 512 bytes are counted, as GPUs' memory is given out. What a kernel needs besides operands and results, and
    the workspaces of libraries (cuBLAS: some 32 MiB), are not.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    """Gathered weights, the most at once in forward."""
    activations: int
    """What forward leaves for backward, weights aside."""
    symmetric: int
    """Memory that all ranks of a group address, for `transport="symmetric"`: it stays."""
    peak: int
    """The most at one time, of all these and of what lives for a moment only."""

    def rows(self) -> dict[str, int]:
        """The parts by name; of symmetric memory only where a transport takes some."""
        return {name: size for name, size in vars(self).items() if size or name != "symmetric"}

    def __str__(self) -> str:
        return "\n".join(f"{name:<12}{amount(size):>12}" for name, size in self.rows().items())


def memory(
    program: Program,
    sizes: Mapping[str, int] | None = None,
    *,
    remat: Policy | None = None,
    reshard_after_forward: bool | None = None,
    transport: str = "nccl",
) -> Memory:
    """What a training step needs of rank 0's memory, which has the largest parts. Nothing runs, nothing is allocated.

    `sizes` are those of the symbols, by default the nominal ones: `b` of a data-parallel rank's batch, `s` of the whole
    sequence. `remat` and `reshard_after_forward` ask about another choice than the program's, for all blocks alike.
    `transport` is `parallelize`'s.
    """
    check_option("transport", transport, TRANSPORTS)
    text, taken = _text(program, remat, reshard_after_forward), _Wires()
    mesh = taken.over(program) if transport == "symmetric" else Mesh(program.mesh)
    ledger, manifest = Ledger(), program.manifest
    parameters = {
        name: torch.empty(
            plan.local_shape(program.mesh, mesh.rank), dtype=plan.dtype, device="meta",
            requires_grad=manifest.parameters[name].requires_grad,
        )
        for name, plan in program.parameters.items()
    }  # fmt: skip
    trained = [p for p in parameters.values() if p.requires_grad]
    buffers, inputs = _given(program, sizes or {})
    copies = _Copies(mesh, ledger) if transport == "symmetric" else None
    root = execute(text, manifest, mesh, parameters, buffers, transport=copies or Collectives())
    held = sum(ledger.add(p) for p in parameters.values())
    states = ADAMW * sum(rounded(p.untyped_storage().nbytes()) for p in trained)
    ledger.hold(states)
    for tensor in (*buffers.values(), *inputs):
        ledger.add(tensor)
    before = ledger.now
    with torch.no_grad(), on_gpu():
        root(*inputs)  # the first call learns what later ones gather ahead
    gathered = _Gathered.watching(root)
    with ledger.counting(), private.dispatched(taken.note), on_gpu():
        loss = _loss(root(*inputs))
        kept = ledger.now - before
        weights = gathered.alive()
        if loss is not None:
            loss.backward()
            del loss
    gradients = {private.storage_id(g): rounded(g.untyped_storage().nbytes()) for g in _gradients(trained)}
    shared = taken.size + (copies.size if copies else 0)
    most = ledger.most + taken.size  # which the first step has taken
    return Memory(held, sum(gradients.values()), states, gathered.most, kept - weights, shared, most)


@dataclass(frozen=True)
class Choice:
    """What backward recomputes, whether weights are gathered again, and what a rank then needs."""

    recomputed: str
    weights: str
    memory: Memory


def choices(program: Program, sizes: Mapping[str, int] | None = None, transport: str = "nccl") -> list[Choice]:
    """The program as it is, and what it would need with each choice for all its blocks."""
    own = memory(program, sizes, transport=transport)
    found = [Choice("as compiled", "", own)]
    saved = tuple(name for name in ("linear", "attention") if name in made_in(program.folded))
    policies: dict[str, Policy] = {"nothing": "none"}
    if blocks_of(program):
        policies |= {f"all but {', '.join(saved)}": saved} if saved else {}
        policies |= {"blocks": "block"}
    for title, policy in policies.items():
        for reshard in (True, False) if own.gathered else (True,):
            weights = "" if not own.gathered else "gathered again" if reshard else "kept"
            asked = memory(program, sizes, remat=policy, reshard_after_forward=reshard, transport=transport)
            found.append(Choice(title, weights, asked))
    return found


def _text(program: Program, remat: Policy | None, reshard: bool | None) -> str:
    """The program's text, or that with another choice for all blocks."""
    if remat is None and reshard is None:
        return str(program)
    graph, blocks = copied(program.folded), blocks_of(program)
    now: Any = next((n.meta for n in graph.graph.nodes if n.meta.get("block")), {})
    saved = now.get("saved") if remat is None else saved_by(remat)
    stays = now.get("gathered", False) if reshard is None else not reshard
    kept = Kept({} if saved is None else dict.fromkeys(blocks, saved), frozenset([*blocks, ROOT] if stays else ()))
    return emit(mark_recomputed(graph, kept), program.mesh, program.made.names, program.manifest.model).source


def blocks_of(program: Program) -> list[str]:
    """The blocks that its graph names: of a run the first ones stand for all."""
    return list(dict.fromkeys(n.meta["block"] for n in program.folded.graph.nodes if n.meta.get("block")))


def _given(program: Program, sizes: Mapping[str, int]) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Buffers and constants, and a rank's part of each input, without memory."""
    nodes = {n.meta["name"]: n for n in program.folded.graph.find_nodes(op="placeholder")}
    held = [node for node in nodes.values() if node.meta["role"] in ("buffer", "constant")]
    buffers = {node.meta["name"]: _empty(node, node.meta["sizes"]) for node in held}
    known = _sizes(program, sizes)
    inputs = [_empty(nodes[name], _local(nodes[name], known)) for name in program.manifest.inputs]
    if program.manifest.random:
        inputs.append(torch.empty((), dtype=torch.int64, device="meta"))
    return buffers, inputs


def _sizes(program: Program, given: Mapping[str, int]) -> dict[str, int]:
    """A size for each symbol of the inputs. Raises `CompileError` where it is none of theirs, or does not divide."""
    plans = program.manifest.input_plans
    symbols = dict.fromkeys(d for plan in plans for d in plan.dims if isinstance(d, str))
    if unknown := [name for name in given if name not in symbols]:
        raise CompileError(f"no input of the model has a size '{unknown[0]}'", tries=", ".join(symbols) or "no sizes")
    found = {name: given.get(name, NOMINAL.get(name, NOMINAL["s"])) for name in symbols}
    for name, size in found.items():
        for axis, ranks in program.manifest.multiples.get(name, {}).items():
            if size % ranks:
                raise CompileError(
                    f"size {name} = {size} does not divide by {ranks}", why=f"axis '{axis}' cuts it into equal parts",
                    tries=f"{name} = {-(-size // ranks) * ranks}",
                )  # fmt: skip
    return found


def _local(node: fx.Node, sizes: Mapping[str, int]) -> list[int]:
    """An input's shape on a rank, where `b` is a rank's batch."""
    known = {symbol: sizes[str(symbol)] for d in node.meta["sizes"] for symbol in sympy.sympify(d).free_symbols}
    return [int(sympy.sympify(d).subs(known)) for d in node.meta["sizes"]]


def _empty(node: fx.Node, shape: Sequence[Any]) -> Tensor:
    return torch.empty([int(n) for n in shape], dtype=node.meta["dtype"], device="meta", requires_grad=False)


def _loss(results: Sequence[Any]) -> Tensor | None:
    """What backward starts from: the first scalar, or else the sum of all that has a gradient."""
    flowing = [y for y in results if isinstance(y, Tensor) and y.requires_grad]
    scalars = [y for y in flowing if y.dim() == 0]
    sums = scalars[:1] or [y.sum() for y in flowing]
    return sum(sums[1:], sums[0]) if sums else None


def _gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


class _Copies(Symmetric):
    """Copies on one tensor without memory, which stands for that of every rank and is counted once."""

    def __init__(self, mesh: Mesh, ledger: Ledger) -> None:
        super().__init__(mesh)
        self._ledger = ledger

    def open(self, device: torch.device) -> None:
        memory = torch.empty(self.size, dtype=torch.uint8, device=device)
        self._ledger.add(memory)
        self._peers = _NoPeers(memory, self.mesh.spec.world_size)


class _Wires:
    """The wires on which activations travel by copies: what each takes for the largest exchange that it has seen."""

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}

    def over(self, program: Program) -> Mesh:
        """A mesh that is not bound, with a wire in place of each group."""
        axes = grouped(program.mesh, program.manifest.flattened)
        return Mesh(program.mesh, groups={names: wires.PREFIX + ",".join(names) for names in axes})

    def note(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for kind, start in wires.STARTS.items():
            if op is start:
                x, _, ranks, group = args
                size = wires.paged(wires.room(kind, x.shape, x.dtype, ranks))
                self._slots[group] = max(self._slots.get(group, 0), size)
        return op(*args, **kwargs)

    @property
    def size(self) -> int:
        """Bytes on each rank."""
        return wires.SLOTS * sum(self._slots.values())


class _NoPeers(Peers):
    """Nobody is there to be waited for."""

    def __init__(self, memory: Tensor, ranks: int) -> None:
        self.views = [memory] * ranks

    def barrier(self) -> None:
        pass


class _Gathered:
    """Watches the gathered weights of a root's segments."""

    def __init__(self) -> None:
        self.most = 0
        self._storages: dict[int | None, tuple[weakref.ref[Any], int]] = {}
        self._last = 0

    @classmethod
    def watching(cls, root: Root) -> _Gathered:
        """Put itself around the root's gathers."""
        watch, state = cls(), root._state
        inner = state.gathered

        @contextmanager
        def gathered(bucket: Bucket, reshard: bool) -> Iterator[Any]:
            with inner(bucket, reshard) as weights:
                watch._see(weights, {private.storage_id(p) for p in state.parameters.values()})
                yield weights

        state.gathered = gathered  # type: ignore[method-assign]
        return watch

    def _see(self, weights: Sequence[Tensor], own: set[int | None]) -> None:
        before = self.alive()
        for x in weights:
            key, storage = private.storage_id(x), x.untyped_storage()
            if key not in own:
                self._storages[key] = weakref.ref(storage), rounded(storage.nbytes())
        new = self.alive() - before
        self.most = max(self.most, before + self._last + new)
        self._last = new

    def alive(self) -> int:
        """Bytes of those that are still there."""
        return sum(size for storage, size in self._storages.values() if storage() is not None)


@contextmanager
def on_gpu() -> Iterator[None]:
    """Inside, attention on tensors without memory is by the kernels that a GPU would take, also when recomputed."""
    formula = F.scaled_dot_product_attention

    def attention(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if not (q.is_meta and q.dim() == 4 and q.dtype != torch.float64):
            return formula(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if attn_mask is None and q.dtype in (torch.bfloat16, torch.float16):
            return private.ATTENTION["flash"][0](q, k, v, dropout_p, is_causal, False, scale=scale)[0]
        times = q.shape[1] // k.shape[1]
        k, v = (x if times == 1 else x.repeat_interleave(times, 1) for x in (k, v))
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill(~attn_mask, -torch.inf)
        bias = None if attn_mask is None else attn_mask.expand(*q.shape[:-1], k.shape[-2])
        return private.ATTENTION["efficient"][0](q, k, v, bias, True, dropout_p, is_causal, scale=scale)[0]

    F.scaled_dot_product_attention = attention  # type: ignore[assignment]
    try:
        yield
    finally:
        F.scaled_dot_product_attention = formula
