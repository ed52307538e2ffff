"""The axis of sequences: what it refuses, and in which words; what its text says; what `cp_attention` asks for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ndcompile as nd
from ndcompile.axes import KINDS, parts
from ndcompile.mesh import GATHERED, HEAD_TAIL
from ndcompile.verify.domain import Float64
from ndcompile.verify.execute import on_one_device
from ndcompile.verify.localise import Fault, localise
from ndcompile.verify.places import entries
from ndcompile.verify.sample import draw

IDS = torch.zeros(4, 8, dtype=torch.long)


class Attends(nn.Module):
    """One layer of attention, with fewer heads of keys where asked, which are repeated by hand."""

    def __init__(self, heads: int = 4, kv_heads: int = 4) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        self.tokens = nn.Embedding(32, 4 * heads)
        self.q, self.k, self.v = (nn.Linear(4 * heads, 4 * n) for n in (heads, kv_heads, kv_heads))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        q, k, v = (f(x).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        k, v = (self._repeated(y) for y in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return F.cross_entropy((x + y).flatten(0, 1), ids.flatten())

    def _repeated(self, y: Tensor) -> Tensor:
        b, g, s, d = y.shape
        times = self.heads // g
        return y if times == 1 else y[:, :, None].expand(b, g, times, s, d).reshape(b, g * times, s, d)


def lines(program: nd.Program, *pieces: str) -> list[str]:
    """The lines of a program's text that have all these pieces, without what stands beside them."""
    code = [line.split("  # ")[0].strip() for line in str(program).splitlines()]
    return [line for line in code if all(piece in line for piece in pieces)]


def test_the_kinds_agree_with_the_mesh() -> None:
    """What the runtime knows by name is what the kinds say."""
    from ndcompile.axes.data import used_whole

    assert [name for name, kind in KINDS.items() if kind.parameter_uses is used_whole] == list(GATHERED)
    assert [name for name, kind in KINDS.items() if kind.attends] == list(HEAD_TAIL)
    assert [parts("cp", 2), parts("cp × tp", 4), parts("tp", 2)] == [4, 4, 2]


def test_each_rank_takes_its_tokens_and_only_attention_communicates() -> None:
    program = nd.compile(Attends(), "cp=2", IDS)
    assert lines(program, "shard(") == ["ids = shard(ids, cp, dim=1, balanced=True)"]
    assert len(lines(program, "context_attention(", "causal=True")) == 1
    assert [line.partition(" = ")[2] for line in lines(program, " = all_reduce")] == [
        "all_reduce(total_2, cp)", "all_reduce_invariant(loss, cp)",
    ], "how many tokens count, and their sum"  # fmt: skip
    assert not lines(program, "all_gather(")


def test_lengths_are_told_that_would_do() -> None:
    program = nd.compile(Attends(), "cp=2", IDS)
    assert program.manifest.multiples == {"s": {"cp": 4}}
    with pytest.raises(ValueError, match="has size 6 at dim 1, which does not divide by 4") as error:
        program.manifest.check([IDS[:, :6]])
    assert "try  size 4 or 8" in str(error.value)


@pytest.mark.parametrize("how", ["gather", "ring", "heads"])
def test_a_way_that_is_asked_for_is_taken(how: str) -> None:
    program = nd.compile(Attends(), "cp=2", IDS, cp_attention=how)
    assert len(lines(program, f'how="{how}"')) == 1
    assert nd.verify(program, seeds=1).equal


def test_the_way_that_sends_least_is_taken() -> None:
    """Over 2 ranks keys and values are less than all of it, over 4 more heads are."""
    assert lines(nd.compile(Attends(), "cp=2", IDS), 'how="gather"')
    assert lines(nd.compile(Attends(), "cp=4", IDS), 'how="heads"')
    assert lines(nd.compile(Attends(heads=3, kv_heads=3), "cp=4", IDS), 'how="gather"')


def test_keys_that_are_repeated_for_each_head_are_sent_once() -> None:
    program = nd.compile(Attends(kv_heads=2), "cp=2", IDS)
    assert not lines(program, "expand(")
    assert nd.verify(program, seeds=1).equal
    assert lines(nd.compile(Attends(kv_heads=2), "tp=2", IDS), "expand("), "other meshes leave them to the kernel"


def test_a_data_axis_in_parts_is_gathered_over_all_of_them() -> None:
    program = nd.compile(Attends(), "dp_shard.0=2, dp_shard.1=2", IDS)
    assert nd.verify(program, seeds=1).equal


REFUSED: dict[str, tuple[nn.Module, dict[str, Any], str]] = {
    "heads that do not divide": (Attends(3, 3), dict(cp_attention="heads"), "a rank's 3 heads over 3 of keys"),
    "no such way": (Attends(), dict(cp_attention="round"), "cp_attention='round' is no option"),
    "a pin": (Attends(), dict(placements={"q.weight": {"cp": nd.S(0)}}), "the pin 'q.weight' is on axis 'cp'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case: str) -> None:
    model, options, words = REFUSED[case]
    with pytest.raises(nd.CompileError) as error:
        nd.compile(model, "cp=2", IDS, **options)
    assert str(error.value).startswith(words)


def test_a_model_without_a_sequence_is_refused() -> None:
    with pytest.raises(nd.CompileError, match="axis 'cp' has nothing to shard"):
        nd.compile(nn.Linear(4, 4), "cp=2", torch.zeros(2, 4))


def looked_at(program: nd.Program, source: str | None = None) -> Fault | None:
    """Where a text goes wrong first, with every value looked at where it lies."""
    domain = Float64(0)
    sample = draw(program, domain, microbatches=1)
    on_one_device(program, sample, domain)
    return localise(program, sample, domain, source)


def test_verify_knows_where_sequences_lie() -> None:
    """Head–tail, also for each sample of a dim that joins them: of a right program no value is wrong."""
    program = nd.compile(Attends(), "dp_shard=2, cp=2", IDS, float64=True)
    assert "in 2·b" in " ".join(str(n.meta.get("layout")) for n in program.graph.graph.nodes)
    assert looked_at(program) is None
    fault = looked_at(program, str(program).replace("shard(ids, cp, dim=1, balanced=True)", "shard(ids, cp, dim=1)"))
    assert fault is not None and fault.side == "forward" and "ids = shard(ids, cp, dim=1)" in fault.text


def test_entries_of_a_dim() -> None:
    assert [entries(torch.arange(8), 2, rank, True).tolist() for rank in (0, 1)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [entries(torch.arange(7), 4, rank, False).tolist() for rank in range(4)] == [[0, 1], [2, 3], [4, 5], [6]]
