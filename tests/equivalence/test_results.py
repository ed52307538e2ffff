"""What is read of a model's results is right, whichever it is; and what is not read costs nothing in backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ndcompile as nd
from ndcompile.runtime import private
from ndcompile.verify.domain import base_name
from tests.equivalence.compare import distance, whole
from tests.models import llama
from tests.ranks import run

IDS = torch.randint(131, (2, 16), generator=torch.Generator().manual_seed(0))
BATCH = dict(input_ids=IDS, labels=IDS)
WEIGHTS = torch.rand(2, 16, 132, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
READS = ("loss", "logits", "both")


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    drops: dict[str, Any] = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    sizes: dict[str, Any] = dict(n_embd=32, n_layer=2, n_head=4, n_positions=32)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=132, use_cache=False, bos_token_id=0, eos_token_id=0, **sizes, **drops)
    )
    assert isinstance(model, nn.Module)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {"llama": lambda: llama(132), "gpt2": gpt2}


def read(found: Any, reads: str, rank: int = 0, ranks: int = 1) -> Tensor:
    """What a user makes of results: the loss, or a sum of logits that are weighted by their places, or both."""
    if reads == "loss":
        return found["loss"]
    logits = found["logits"]
    own = logits.to_local() if private.is_distributed(logits) else logits
    summed = (own * WEIGHTS.chunk(ranks, 1)[rank]).sum()
    return summed if reads == "logits" else found["loss"] + summed


def taken(callee: nn.Module, model: nn.Module, reads: str, rank: int = 0, ranks: int = 1) -> dict[str, Tensor]:
    """Results, and the gradients of what is read of them; all whole."""
    found = dict(callee(**BATCH).items())
    read(found, reads, rank, ranks).backward()
    kept = {key: whole(value).detach() for key, value in found.items()}
    kept |= {f"gradient {name}": whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return kept


def prepare(name: str, ranks: int, folder: Path) -> None:
    model = MODELS[name]().double()
    nd.compile(model, f"cp={ranks}", BATCH, float64=True).save(folder / f"{name}.py")
    alone = nd.compile(model, "", BATCH, float64=True).one_device(model)
    torch.save({reads: taken(alone, model, reads) for reads in READS}, folder / f"{name}.pt")


def far(folder: Path, ranks: int) -> dict[str, float]:
    """On a rank: how far results and gradients are from one device's, by model and by what is read."""
    torch.set_num_threads(1)
    distances: dict[str, float] = {}
    for name, make in MODELS.items():
        model = nd.load(folder / f"{name}.py", make().double())
        for reads, right in torch.load(folder / f"{name}.pt").items():
            ours = taken(model, model, reads, torch.distributed.get_rank(), ranks)
            assert ours.keys() == right.keys(), "the same parameters have gradients"
            distances |= {f"{name}, {reads}: {key}": distance(ours[key], x, 1e-6) for key, x in right.items()}
    return distances


@pytest.mark.equivalence
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.full), 4])
def test_results_and_gradients_are_right_whatever_is_read(ranks: int, tmp_path: Path) -> None:
    for name in MODELS:
        prepare(name, ranks, tmp_path)
    for distances in run(ranks, far, tmp_path, ranks, timeout=180.0):
        assert len(distances) > 100
        assert {what: x for what, x in distances.items() if not x < 1e-10} == {}


# ---- what is not read ----------------------------------------------------------------------------------------------


def sent_in_backward(folder: Path) -> dict[str, dict[str, int]]:
    """By what is read: how often a backward exchanges, and how often it makes zeros of the logits' size or more."""
    torch.set_num_threads(1)
    counts: dict[str, dict[str, int]] = {}
    for way in ("eager", "compiled"):
        model = nd.load(folder / "llama.py", MODELS["llama"]())
        if way == "compiled":
            model.compile(backend="aot_eager")
        for reads in (*READS, *READS):  # the first time compiles
            here = counts[f"{way}, {reads}"] = {"exchanges": 0, "zeros": 0}
            total = read(model(**BATCH), reads, torch.distributed.get_rank(), 2)
            with private.dispatched(partial(counted, here)):
                total.backward()
            model.zero_grad()
    return counts


def counted(here: dict[str, int], op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    made = op(*args, **kwargs)
    here["exchanges"] += base_name(op) == "all_to_all_single"
    here["zeros"] += "zeros" in base_name(op) and made.numel() >= WEIGHTS.numel() // 2
    return made


def test_a_result_that_is_not_read_sends_nothing_in_backward(tmp_path: Path) -> None:
    nd.compile(MODELS["llama"](), "cp=2", BATCH, cp_attention="gather").save(tmp_path / "llama.py")
    for counts in run(2, sent_in_backward, tmp_path, timeout=180.0):
        for what, found in counts.items():
            assert found == {"exchanges": 0 if what.endswith("loss") else 1, "zeros": 0}, what
