"""`Program.memory` beside what running ranks keep and need: Llama, GPT-2 and a ViT on several meshes."""

from __future__ import annotations

import gc
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import ndcompile as nd
from ndcompile import ledger
from ndcompile.axes import data_axes, data_ranks
from ndcompile.ledger import Ledger, rounded
from ndcompile.mesh import MeshSpec
from ndcompile.program import Program
from ndcompile.runtime import private, wires
from ndcompile.runtime.agreement import everyones
from ndcompile.runtime.peers import Peers
from ndcompile.runtime.symmetric import Symmetric
from tests import ranks
from tests.equivalence.compare import own_rows
from tests.models import seeded, tokens
from tests.runtime.test_symmetric import Odd

SAVED = ("linear", "attention")


def llama() -> tuple[nn.Module, dict[str, Tensor], dict[str, int]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config), words(96), {"b": 4, "s": 64}


def gpt2() -> tuple[nn.Module, dict[str, Tensor], dict[str, int]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    drop: dict[str, Any] = dict(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.0)
    config = GPT2Config(vocab_size=96, n_positions=64, n_embd=64, n_layer=3, n_head=4, use_cache=False, **drop)
    return GPT2LMHeadModel(config).train(), words(96), {"b": 4, "s": 64}


def vit() -> tuple[nn.Module, dict[str, Tensor], dict[str, int]]:
    from transformers import ViTConfig, ViTForImageClassification

    sizes: dict[str, Any] = dict(
        image_size=32, patch_size=4, num_labels=16, hidden_size=64, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=128, hidden_dropout_prob=0.0,
    )  # fmt: skip
    config = ViTConfig(**sizes)
    images = torch.randn(4, 3, 32, 32)
    return ViTForImageClassification(config), {"pixel_values": images, "labels": torch.arange(4)}, {"b": 4}


def words(vocabulary: int) -> dict[str, Tensor]:
    ids = torch.arange(4 * 64).view(4, 64) % vocabulary
    return {"input_ids": ids, "labels": ids}


MODELS = {"Llama": llama, "GPT-2": gpt2, "ViT": vit}


@dataclass(frozen=True)
class Case:
    model: str
    mesh: str
    remat: str | tuple[str, ...] = "none"
    reshard: bool = True
    transport: str = "nccl"


CASES = {
    2: [
        Case("Llama", "dp_shard=2"),
        Case("Llama", "dp_replicate=2", "block", transport="symmetric"),
        Case("Llama", "cp=2", "block"),
        Case("ViT", "dp_shard=2", reshard=False),
    ],
    4: [
        Case("Llama", "dp_shard=2, tp=2", "block"),
        Case("GPT-2", "dp_replicate=2, dp_shard=2", reshard=False),
        Case("ViT", "dp_replicate=2, tp=2"),
    ],
}
MORE = [Case("Llama", "tp=2", SAVED), Case("GPT-2", "tp=2", "block")]


@dataclass
class Measured:
    """Bytes that a rank's autograd saves, that forward leaves, and at most; and what was told before."""

    case: Case
    saved: int
    kept: int
    peak: int
    told: dict[str, int]


@contextmanager
def savings() -> Iterator[list[tuple[weakref.ref[Any], int, int | None]]]:
    """The storage of each tensor that is saved for backward inside, whichever hooks see it, if it is saved as such."""
    found: list[tuple[weakref.ref[Any], int, int | None]] = []
    plain = saved_tensors_hooks.__init__

    def note(packed: Any) -> Any:
        if isinstance(packed, Tensor):
            storage = packed.untyped_storage()
            found.append((weakref.ref(storage), storage.nbytes(), private.storage_id(packed)))
        return packed

    def hooks(self: Any, pack: Any, unpack: Any) -> None:
        plain(self, lambda x: note(pack(x)), unpack)

    saved_tensors_hooks.__init__ = hooks  # type: ignore
    try:
        with saved_tensors_hooks(lambda x: x, lambda x: x):
            yield found
    finally:
        saved_tensors_hooks.__init__ = plain  # type: ignore


def measure(cases: list[Case]) -> list[Measured]:
    """On a rank: a step, without the optimizer."""
    torch.set_num_threads(1)
    ledger.UNIT = 1
    return [measured(case) for case in cases]


def measured(case: Case) -> Measured:
    torch.manual_seed(0)
    model, batch, sizes = MODELS[case.model]()
    options: dict[str, Any] = dict(remat=case.remat, reshard_after_forward=case.reshard)
    program = nd.compile(model, case.mesh, batch, **options)
    with tempfile.TemporaryDirectory() as folder:
        program.save(Path(folder) / "program.py")
        parallel = nd.load(Path(folder) / "program.py", model, transport=case.transport)
    mine = own(program, batch)
    own_batch = {"b": len(next(iter(mine.values())))}
    told = program.memory({**sizes, **own_batch}, transport=case.transport)
    parallel(**mine)["loss"].backward()
    parallel.zero_grad()
    gc.collect()
    held = [private.local(p) for p in parallel.parameters()] + list(parallel.buffers()) + list(mine.values())
    with savings() as found:
        loss = parallel(**mine)["loss"]
    gc.collect()
    given = {private.storage_id(x) for x in held}
    alive = {key: size for storage, size, key in found if storage() is not None and key not in given}
    loss.backward()
    del loss
    parallel.zero_grad()
    counter = Ledger()
    for tensor in held:
        counter.add(tensor)
    before = counter.now
    with counter.counting():
        loss = parallel(**mine)["loss"]
        kept = counter.now - before
        loss.backward()
        del loss
    return Measured(case, sum(alive.values()), kept, counter.most, vars(told))


def own(program: Program, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    place, index, count = program.mesh.coordinate(dist.get_rank()), 0, 1
    for axis in data_axes(program.mesh):
        index, count = index * program.mesh.size(axis) + place[axis], count * program.mesh.size(axis)
    return {name: x.chunk(count)[index].contiguous() for name, x in batch.items()}


@pytest.mark.equivalence
@pytest.mark.parametrize(
    ("world_size", "cases"),
    [(2, CASES[2]), pytest.param(2, MORE, marks=pytest.mark.full), pytest.param(4, CASES[4], marks=pytest.mark.full)],
    ids=["2", "2, more", "4"],
)
def test_what_is_told_is_what_a_running_rank_keeps_and_needs(world_size: int, cases: list[Case]) -> None:
    """Activations within 1 % of the bytes that autograd saves; the peak within a tenth of a real step's. What is there
    after forward is activations and those weights that stay, of which the last segment's always do.
    """
    for found in ranks.run(world_size, measure, cases, timeout=500)[0]:
        told, slack = found.told, 0.01 * found.kept
        assert -slack <= found.kept - told["activations"] <= told["gathered"] + slack, found
        if found.case.remat != SAVED:  # results that are saved by name are in a cache, and not saved by autograd
            assert abs(found.saved - told["activations"]) <= slack, found
        assert abs(found.peak - (told["peak"] - told["optimizer"])) <= 0.1 * found.peak, found


# ---- memory that all ranks address -----------------------------------------------------------------------------------

COPIED = {
    2: ["dp_shard=2", "dp_replicate=2", "tp=2"],
    4: ["dp_shard=4", "dp_replicate=4", "dp_replicate=2, dp_shard=2", "dp_shard=2, tp=2"],
}
PRECISIONS = [None, nd.Precision(torch.bfloat16, torch.float32), nd.Precision(torch.float32, torch.bfloat16)]


def odd() -> nn.Module:
    """No mesh divides its lengths, and parts differ by more than what they are rounded up by."""
    return seeded(Odd, 33, 61)


def own_sizes(mesh: MeshSpec) -> dict[str, int]:
    return {"b": 4 // data_ranks(mesh), "s": 8}


def take(programs: list[tuple[str, Path]]) -> tuple[list[list[int]], list[list[int]]]:
    """The bytes that ranks have after a step, and those that each asks for weights by itself: by rank, by program."""
    asked, taken, opened = list[int](), list[int](), Symmetric.open
    wires.PAGE = 1

    def noting(memory: Symmetric, device: torch.device) -> None:
        asked.append(memory.size)
        opened(memory, device)
        taken.append(_bytes(memory._peers))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Symmetric, "open", noting)
        for mesh, file in programs:
            for wire in wires._wires.values():  # programs on one group share it
                wire._size, wire._peers = 0, None
            parallel = nd.load(file, odd(), transport="symmetric")
            parallel(**own_rows(tokens(), MeshSpec.parse(mesh), dist.get_rank()))["loss"].backward()
            taken[-1] += sum(_bytes(wire._peers) for wire in wires._wires.values())
    return everyones(taken), everyones(asked)


def _bytes(peers: Peers | None) -> int:
    return 0 if peers is None else peers.views[0].numel()


@pytest.mark.parametrize("world_size", [2, 4])
def test_symmetric_memory_is_told_to_the_byte(world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wires, "PAGE", 1)
    told: dict[tuple[str, Path], int] = {}
    for mesh in COPIED[world_size]:
        for number, precision in enumerate(PRECISIONS):
            program = nd.compile(odd(), mesh, tokens(), precision=precision)
            program.save(file := tmp_path / f"{mesh} {number}.py")
            told[mesh, file] = program.memory(own_sizes(program.mesh), transport="symmetric").symmetric
    taken, asked = ranks.run(world_size, take, list(told))[0]
    assert taken == [list(told.values())] * world_size
    assert len(set(told.values())) > len(COPIED[world_size]), "precision counts"
    if world_size == 4:
        assert len(set(map(tuple, asked))) > 1, "some ranks would take less than rank 0 by themselves"


def test_symmetric_memory_is_in_the_peak_and_has_a_row() -> None:
    program = nd.compile(odd(), "dp_shard=2", tokens())
    plain, copied = (program.memory({"b": 2, "s": 8}, transport=way) for way in ("nccl", "symmetric"))
    assert plain.symmetric == 0 and "symmetric" not in plain.rows() and "symmetric" not in str(plain)
    assert copied.rows() == vars(copied)
    assert 0.5 * copied.symmetric <= copied.peak - plain.peak <= rounded(copied.symmetric), "less what collectives need"
    with pytest.raises(nd.CompileError, match="transport='copies' is no option"):
        program.memory(transport="copies")
