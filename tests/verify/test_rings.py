"""The lemma of the ring: with an exp that is a homomorphism a ring is one attention, and a wrong ring is not."""

from __future__ import annotations

import inspect
import math
import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

import ndcompile as nd
from ndcompile.runtime import context, merged, ring
from ndcompile.runtime.masks import Mask
from ndcompile.verify import rings
from ndcompile.verify.domain import NotInDomain
from ndcompile.verify.exponents import Exponents
from ndcompile.verify.lockstep import run_one
from ndcompile.verify.rings import Ring, as_one, compared
from tests.axes.test_cp import IDS, Attends

MASKS: dict[str, Mask] = {
    "all": Mask(),
    "causal": Mask(causal=True),
    "window": Mask(causal=True, window=3),
    "documents": Mask(causal=True, documents=torch.arange(16).expand(2, 16) // 3),
    "rows that see nothing": Mask(causal=True, padding=torch.arange(16) >= torch.tensor([[5], [0]])),
    "prefix": Mask(causal=True, prefix=5),
}


def of(mask: str, ranks: int = 4, heads: int = 4, groups: int = 2, balanced: bool = True, e: int = 3) -> Ring:
    """16 tokens of 2 samples, keys of 4 numbers and values of `e`."""
    t = 16 // ranks
    return Ring(ranks, ((2, heads, t, 4), (2, groups, t, 4), (2, groups, t, e)), balanced, 0.5, MASKS[mask])


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("mask", MASKS)
def test_a_ring_is_one_attention(mask: str, ranks: int, balanced: bool) -> None:
    found = compared(of(mask, ranks, balanced=balanced), 0)
    assert (found.difference, found.elements) == ("", 2 * 16 * (2 * 4 * 4 - 4 + 2 * 7))


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (3, 1), (2, 2)])
def test_heads_may_share_keys(heads: int, groups: int) -> None:
    assert not compared(of("causal", 2, heads, groups), 1).difference


LOOP = "for step in range(axis.size):\n            coming"
OWN_LSE = "kernel.forward(q, keys, values, allowed, Call(piece.causal, self.scale))[1]"
HOME = "private.cast(of_k, k.dtype), private.cast(of_v, v.dtype)"
EXCHANGED = "private.cast(of_v, v.dtype), private.cast(of_k, k.dtype)"

WRONG: dict[str, tuple[ModuleType, str, str]] = {
    "the other way round": (ring, "(shared.axis.index - step)", "(shared.axis.index + step)"),
    "keys that do not come": (ring, "private.wait(coming) if", "(private.wait(coming), kv)[1] if"),
    "a block is dropped": (ring, LOOP, LOOP.replace("axis.size", "axis.size - 1")),
    "the first block is dropped": (ring, "merged.add(", "step and merged.add("),
    "gradients are not carried on": (ring, "own + private.wait(going)", "own + 0 * private.wait(going)"),
    "gradients are not sent home": (ring, "private.wait(going), k, v)", "own + 0 * private.wait(going), k, v)"),
    "gradients of keys and values are exchanged": (ring, HOME, EXCHANGED),
    "backward is not causal": (ring, "= ctx.shared.with_rows", "= replace(ctx.shared, mask=NO_MASK).with_rows"),
    "results are not scaled again": (merged, "out + share * (other - out)", "out + other"),
    "each block has the same weight": (merged, "share * (other - out)", "(other - out) / 2"),
    "the log-sum-exp of one": (merged, "most + total.log()", "most"),
    "weights are exchanged": (merged, "(others / total", "(own / total"),
    "gradients at the first keys": (merged, "v, piece.cols, own[2])", "v, (0, own[2].shape[2]), own[2])"),
    "gradients of the last block alone": (merged, "slice(*rows)] += part", "slice(*rows)] = part"),
    "queries get the last block's gradient": (merged, "_added(self.of_q,", "_added(None,"),
    "the block's own log-sum-exp": (merged, "keys, values, out, lse,", f"keys, values, out, {OWN_LSE},"),
}  # fmt: skip
"""Bugs in the runtime: a module, a piece of its text, and what stands in its place."""


def plant(monkeypatch: pytest.MonkeyPatch, module: ModuleType, before: str, after: str) -> None:
    text = inspect.getsource(module)
    assert before in text, "the bug has its place in the text"
    wrong = ModuleType(module.__name__)
    wrong.NO_MASK = Mask()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, wrong)  # dataclasses look for their module
    exec(compile(text.replace(before, after), "<a wrong ring>", "exec"), wrong.__dict__)
    if module is merged:
        monkeypatch.setattr(ring, "Merged", wrong.Merged)
        monkeypatch.setattr(ring, "Gradients", wrong.Gradients)
    else:
        monkeypatch.setattr(context, "ring_attention", wrong.ring_attention)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_ring_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The right one holds, by the tests above."""
    plant(monkeypatch, *WRONG[name])
    claim = rings.claim([of(mask, e=4) for mask in ("causal", "all", "window")], seeds=1)
    assert claim.held is False and "is another on rank" in claim.evidence[0]


def test_weights_that_always_cancel_are_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sum that is 0 is chance, and another sample is drawn; twenty are not."""
    plant(monkeypatch, merged, "total = own + others", "total = own + (0 * others - own)")
    claim = rings.claim([of("all", 2)], seeds=1)
    assert claim.held is False and "20 samples gave a sum of weights that is 0" in claim.evidence[0]


def test_a_shift_inside_log_sum_exp_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is equal by mathematics: any of two log-sum-exps may be taken off."""
    shift = "torch.where(lse == -torch.inf, other_lse, lse)"
    plant(monkeypatch, merged, "torch.maximum(lse, other_lse)", shift)
    assert not compared(of("causal"), 0).difference


def test_verify_says_what_is_equal_by_the_lemma() -> None:
    program = nd.compile(Attends(kv_heads=2), "dp_shard=2, cp=2", IDS, cp_attention="ring")
    report = nd.verify(program, seeds=1, microbatches=1)
    kinds = [claim.kind for claim in report.claims]
    assert kinds == ["proved (types)", "equal over F_p", "equal over F_p (rings)", "tested (float64)"]
    assert report.equal and all(claim.held for claim in report.claims)
    exact, lemma = report.claims[1:3]
    assert exact.evidence[-1] == "each ring is taken as one attention; that it is one is the lemma below"
    assert lemma.evidence[0].startswith("1 seeds; causal, 4 heads of 2, 8 tokens on 2 ranks: result and gradients are")


def test_verify_sees_a_wrong_ring_over_f_p(monkeypatch: pytest.MonkeyPatch) -> None:
    program = nd.compile(Attends(), "cp=2", IDS, cp_attention="ring")
    plant(monkeypatch, *WRONG["gradients are not sent home"])
    report = nd.verify(program, seeds=1, microbatches=1)
    held = {claim.kind: claim.held for claim in report.claims}
    assert held["equal over F_p"] and held["equal over F_p (rings)"] is False and held["tested (float64)"] is False
    assert not report.equal and report.differences


def test_rings_are_taken_as_one_on_the_same_lines() -> None:
    text = str(nd.compile(Attends(), "cp=2", IDS, cp_attention="ring"))
    other = as_one(text)
    changed = [b.split("  # ")[0].strip() for a, b in zip(text.split("\n"), other.split("\n"), strict=True) if a != b]
    assert changed == [
        "import torch; from ndcompile.verify import rings",
        'attended = rings.attention(q, k, v, cp, causal=True, how="ring")',
    ]
    assert as_one(other.replace("ring", "gather")) == other.replace("ring", "gather")


# ---- the arithmetic --------------------------------------------------------------------------------------------------


def test_exp_is_a_homomorphism_and_has_a_logarithm() -> None:
    d = Exponents(0)
    a, b = d.draw_exponents([50]), d.draw_exponents([50])

    def run() -> tuple[Tensor, ...]:
        return (a + b).exp(), a.exp() * b.exp(), (a - b).exp() * b.exp(), a.exp(), a.exp().log()

    both, product, back, power, logarithm = run_one(d, run)
    assert torch.equal(both, product) and torch.equal(back, power) and torch.equal(logarithm, a)


def test_powers_are_the_generator_s() -> None:
    d = Exponents(0)
    exponents = d.held(torch.tensor([0.0, 1.0, 7.0, d.prime - 2, -math.inf], dtype=torch.float64))
    expected = [1, 5, 5**7 % d.prime, pow(5, d.prime - 2, d.prime), 0]
    assert run_one(d, lambda: exponents.exp()).tolist() == expected


@pytest.mark.parametrize("wrong", ["an exp of an exp", "a sum with a value", "a product of exponents", "a sum of them"])
def test_what_has_no_meaning_is_said(wrong: str) -> None:
    d = Exponents(0)
    a, v = d.draw_exponents([4]), d.draw([4])
    run = {
        "an exp of an exp": lambda: a.exp().exp(), "a sum with a value": lambda: a + v,
        "a product of exponents": lambda: a * a, "a sum of them": lambda: a.sum(),
    }[wrong]  # fmt: skip
    with pytest.raises(NotInDomain):
        run_one(d, run)
