"""Other names of ops, and ops that are short for some: each is written as what it is composed of."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ndcompile as nd
from ndcompile.synonyms import COMPOSED, DECOMPOSED, SYNONYMS, is_synonym

Form = Callable[[Tensor, Tensor], Tensor]
"""Of an input [4, 5, 6] and a matrix [6, 6]."""

FORMS: dict[str, Form] = {
    "absolute": lambda x, w: torch.absolute(x @ w),
    "arccos": lambda x, w: torch.arccos(0.9 * torch.tanh(x @ w)),
    "arccosh": lambda x, w: torch.arccosh(1.1 + (x @ w).square()),
    "arcsin": lambda x, w: torch.arcsin(0.9 * torch.tanh(x @ w)),
    "arcsinh": lambda x, w: torch.arcsinh(x @ w),
    "arctan": lambda x, w: torch.arctan(x @ w),
    "arctan2": lambda x, w: torch.arctan2(x @ w, x.abs() + 1),
    "arctanh": lambda x, w: torch.arctanh(0.9 * torch.tanh(x @ w)),
    "clip": lambda x, w: torch.clip(x @ w, -1, 1),
    "concat": lambda x, w: torch.concat([x, x @ w], -1),
    "concatenate": lambda x, w: torch.concatenate([x, x @ w], -1),
    "divide": lambda x, w: torch.divide(x @ w, x.abs() + 1),
    "true_divide": lambda x, w: torch.true_divide(x @ w, 3),
    "fix": lambda x, w: x @ w + torch.fix(4 * x),
    "greater": lambda x, w: x @ w * torch.greater(x, 0),
    "greater_equal": lambda x, w: x @ w * torch.greater_equal(x, 0),
    "less": lambda x, w: x @ w * torch.less(x, 0),
    "less_equal": lambda x, w: x @ w * torch.less_equal(x, 0),
    "not_equal": lambda x, w: x @ w * torch.not_equal(x, 0),
    "moveaxis": lambda x, w: torch.moveaxis(x @ w, 2, 1),
    "multiply": lambda x, w: torch.multiply(x, w[0]),
    "negative": lambda x, w: torch.negative(x @ w),
    "positive": lambda x, w: torch.positive(x @ w),
    "row_stack": lambda x, w: torch.row_stack([x, x @ w]).sum(0),
    "subtract": lambda x, w: torch.subtract(x, w[0], alpha=2),
    "swapaxes": lambda x, w: torch.swapaxes(x @ w, 1, 2),
    "swapdims": lambda x, w: torch.swapdims(x @ w, 1, 2),
    "special_erf": lambda x, w: torch.special.erf(x @ w),
    "special_erfc": lambda x, w: torch.special.erfc(x @ w),
    "special_exp2": lambda x, w: torch.special.exp2(x @ w),
    "special_expit": lambda x, w: torch.special.expit(x @ w),
    "special_expm1": lambda x, w: torch.special.expm1(x @ w),
    "special_log1p": lambda x, w: torch.special.log1p((x @ w).abs()),
    "special_logsumexp": lambda x, w: torch.special.logsumexp(x @ w, -1),
    "special_xlogy": lambda x, w: torch.special.xlogy(x, (x @ w).abs() + 1),
    "float_power": lambda x, w: torch.float_power((x @ w).abs() + 1, 3),
    "reshape_as": lambda x, w: (x @ w).flatten(1).reshape_as(x),
    "view_as": lambda x, w: (x @ w).flatten(1).view_as(x),
    "ravel": lambda x, w: torch.ravel(x @ w),
    "tile": lambda x, w: torch.tile(x @ w, (1, 2, 1)),
    "take_along_dim": lambda x, w: x @ torch.take_along_dim(w, w.argsort(-1), -1),
    "atleast_1d": lambda x, w: torch.atleast_1d((x @ w).sum()),
    "atleast_2d": lambda x, w: torch.atleast_2d(w[0]) * x.sum(),
    "atleast_3d": lambda x, w: x + torch.atleast_3d(w).sum(0).transpose(0, 1),
    "where": lambda x, w: x @ w * torch.where(x > 0, 2.0, 0.5),
    "isfinite": lambda x, w: torch.where(torch.isfinite(x), x @ w, 0.0),
    "isclose": lambda x, w: x @ w * torch.isclose(x, x + 1),
    "hstack": lambda x, w: torch.hstack([x, x @ w]),
    "vstack": lambda x, w: x @ torch.vstack([w[:3], w[:3]]),
    "dstack": lambda x, w: torch.dstack([x, x @ w]),
    "column_stack": lambda x, w: x @ torch.column_stack([w[:, :3], w[:, 0], w[:, 4:]]),
    "hsplit": lambda x, w: torch.hsplit(w, 2)[1].sum() * x,
    "vsplit": lambda x, w: torch.vsplit(w, 2)[1].sum() * x,
    "dsplit": lambda x, w: torch.dsplit(x @ w, 2)[1],
    "tensor_split": lambda x, w: torch.tensor_split(x @ w, 3, -1)[1],
    "fliplr": lambda x, w: torch.fliplr(x @ w),
    "flipud": lambda x, w: x @ torch.flipud(w),
    "meshgrid": lambda x, w: x @ torch.meshgrid(w[0], w[1], indexing="ij")[0],
    "outer": lambda x, w: x @ torch.outer(w[0], w[1]),
    "ger": lambda x, w: x @ torch.ger(w[0], w[1]),
    "inner": lambda x, w: torch.inner(x, w),
    "kron": lambda x, w: x @ torch.kron(w[:2, :2], w[:3, :3]),
    "tensordot": lambda x, w: torch.tensordot(x, w, dims=1),
    "linalg_vecdot": lambda x, w: torch.linalg.vecdot(x @ w, x),
    "frobenius_norm": lambda x, w: torch.ops.aten.frobenius_norm.dim(x @ w, [1, 2]),
    "cosine_similarity": lambda x, w: F.cosine_similarity(x @ w, x, -1),
    "pairwise_distance": lambda x, w: F.pairwise_distance(x @ w, x),
    "std": lambda x, w: torch.ops.aten.std.default(x @ w),
    "var": lambda x, w: torch.ops.aten.var.default(x @ w),
    "cosine_embedding_loss": lambda x, w: F.cosine_embedding_loss((x @ w)[:, 0], x[:, 1], x[:, 0, 0].sign()),
    "hinge_embedding_loss": lambda x, w: F.hinge_embedding_loss(x @ w, x.sign()),
    "margin_ranking_loss": lambda x, w: F.margin_ranking_loss((x @ w).sum(-1), x.sum(-1), x[..., 0].sign()),
    "triplet_margin_loss": lambda x, w: F.triplet_margin_loss((x @ w)[:, 0], x[:, 1], x[:, 2]),
    "poisson_nll_loss": lambda x, w: F.poisson_nll_loss(x @ w, x.abs()),
    "kl_div": lambda x, w: F.kl_div((x @ w).log_softmax(-1), x.softmax(-1), reduction="batchmean"),
    "trapezoid": lambda x, w: torch.trapezoid(x @ w),
    "trapz": lambda x, w: torch.trapz(x @ w),
    "real": lambda x, w: torch.complex(x @ w, x).real,
    "imag": lambda x, w: torch.complex(x @ w, x).square().imag,
    "conj": lambda x, w: torch.view_as_real(torch.complex(x, x @ w).conj().resolve_conj()),
    "std_mean": lambda x, w: torch.add(*torch.std_mean(x @ w, -1)),
    "var_mean": lambda x, w: torch.add(*torch.var_mean(x @ w, -1)),
    "cartesian_prod": lambda x, w: x.sum() * torch.cartesian_prod(w[0], w[1]),
    "cumulative_trapezoid": lambda x, w: torch.cumulative_trapezoid(x @ w, dim=1),
    "diag": lambda x, w: x @ torch.diag(w[0]) * torch.diag(w),
    "diagflat": lambda x, w: x @ torch.diagflat(w[0]),
    "msort": lambda x, w: torch.msort(x @ w),
    "linalg_matrix_norm": lambda x, w: torch.linalg.matrix_norm(x @ w),
    "linalg_norm": lambda x, w: torch.linalg.norm(x @ w, dim=-1),
    "linalg_multi_dot": lambda x, w: x @ torch.linalg.multi_dot([w, w, w]),
    "chain_matmul": lambda x, w: x @ torch.chain_matmul(w, w, w),
    "prelu": lambda x, w: F.prelu(x @ w, w[0, :5]),
    "special_logit": lambda x, w: torch.special.logit(torch.sigmoid(x @ w)),
    "special_sinc": lambda x, w: torch.special.sinc(x @ w),
    "special_gammaln": lambda x, w: torch.special.gammaln((x @ w).square() + 1),
    "special_digamma": lambda x, w: torch.special.digamma((x @ w).square() + 1),
    "fft_fftshift": lambda x, w: torch.fft.fftshift(x @ w, dim=-1),
    "fft_ifftshift": lambda x, w: torch.fft.ifftshift(x @ w),
    "affine_grid_generator": lambda x, w: F.affine_grid(w.view(6, 2, 3), [6, 1, 3, 2], align_corners=False) * x.sum(),
    "block_diag": lambda x, w: x @ torch.block_diag(w[:3, :3], w[3:, 3:]),
    "binary_cross_entropy": lambda x, w: F.binary_cross_entropy((x @ w).sigmoid(), x.sigmoid()),
    "binary_cross_entropy_with_logits": lambda x, w: F.binary_cross_entropy_with_logits(
        x @ w, x.sigmoid(), pos_weight=x[0, 0].exp()
    ),
    "soft_margin_loss": lambda x, w: F.soft_margin_loss(x @ w, x.sign()),
    "multi_margin_loss": lambda x, w: F.multi_margin_loss((x @ w)[:, 0], x[:, 0].argmax(-1)),
    "channel_shuffle": lambda x, w: F.channel_shuffle((x @ w).transpose(1, 2), 2),
    "count_nonzero": lambda x, w: x @ w * torch.count_nonzero(x > 0),
    "dist": lambda x, w: torch.dist(x @ w, x),
    "glu": lambda x, w: F.glu(x @ w, -1),
    "isin": lambda x, w: x @ w * torch.isin(x.sign(), torch.ones(1, dtype=x.dtype)),
    "linalg_cross": lambda x, w: torch.linalg.cross((x @ w)[..., :3], x[..., 3:]),
    "cross": lambda x, w: torch.cross((x @ w)[..., :3], x[..., 3:], dim=-1),
    "pixel_shuffle": lambda x, w: F.pixel_shuffle((x @ w).unsqueeze(-1)[:, :4], 2),
    "pixel_unshuffle": lambda x, w: F.pixel_unshuffle((x @ w)[:, :4], 2),
    "renorm": lambda x, w: x @ torch.renorm(w, 2, 0, 1.0),
    "rot90": lambda x, w: torch.rot90(x @ w, 1, (1, 2)),
    "take": lambda x, w: x * torch.take(w, torch.tensor([3, 1, 35, 0, 8, 7])),
    "instance_norm": lambda x, w: F.instance_norm(x @ w, weight=w[0, :5], bias=w[1, :5]) * x,
    "bilinear": lambda x, w: F.bilinear(x, x @ w, w.view(1, 6, 6), w[0, :1]),
    "_weight_norm": lambda x, w: x @ torch._weight_norm(w, w[:, :1], 0),
    "masked_scatter": lambda x, w: x.masked_scatter((x[..., :1] > 0).expand_as(x), x @ w),
    "gru_cell": lambda x, w: torch.gru_cell(
        (x @ w)[:, 0], x[:, 1], w.repeat(3, 1), w.roll(1, 0).repeat(3, 1), w[:3].ravel(), w[3:].ravel()
    ),
    "lstm_cell": lambda x, w: torch.cat(
        torch.lstm_cell((x @ w)[:, 0], (x[:, 1], x[:, 2]), w.repeat(4, 1), w.roll(1, 0).repeat(4, 1))
    ),
    "rnn_tanh_cell": lambda x, w: torch.rnn_tanh_cell((x @ w)[:, 0], x[:, 1], w, w.roll(1, 0), w[0], w[1]),
    "rnn_relu_cell": lambda x, w: torch.rnn_relu_cell((x @ w)[:, 0], x[:, 1], w, w.roll(1, 0)),
}
CHANGES: dict[str, Form] = {
    "multiply_": lambda x, w: (x @ w).multiply_(w[0]),
    "clip_": lambda x, w: (x @ w).clip_(-1, 1),
    "pow_": lambda x, w: (x @ w).pow_(2),
    "masked_scatter_": lambda x, w: (x * 1).masked_scatter_(x > 0, x @ w),
    "fill_diagonal_": lambda x, w: x @ (w * 2).fill_diagonal_(0.5),
}


class Formed(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form
        self.w = nn.Parameter(torch.randn(6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.form(x, self.w)


def given() -> Tensor:
    return torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_every_synonym_has_a_form() -> None:
    assert FORMS.keys() | CHANGES.keys() >= SYNONYMS | DECOMPOSED | COMPOSED.keys() >= FORMS.keys()


@pytest.mark.parametrize("name", [*FORMS, *CHANGES])
def test_what_it_is_composed_of_computes_the_same(name: str) -> None:
    model = Formed((FORMS | CHANGES)[name])
    program = nd.compile(model, "", given())
    called = [n.target for n in program.reference.graph.nodes if n.op == "call_function"]
    assert not any(is_synonym(target) for target in called)
    found, wanted = program.one_device(model)(given()), model(given())
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)
    one, two = (torch.autograd.grad(y.square().sum(), model.w)[0] for y in (found, wanted))
    torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-14)


def changes_a_part(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[0].copy_(x[0])
    return y


def test_a_composition_that_changes_a_view_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its trace does not say whose memory the view is of, so the change would be lost."""
    monkeypatch.setitem(COMPOSED, "_weight_norm", lambda v, g, dim=0: changes_a_part(v))
    with pytest.raises(nd.CompileError, match="no rule for"):
        nd.compile(Formed(FORMS["_weight_norm"]), "", given())


@pytest.mark.parametrize(
    "name",
    [
        "view_as",
        "kl_div",
        "triplet_margin_loss",
        "pow_",
        "arccos",
        "binary_cross_entropy_with_logits",
        "instance_norm",
        "pixel_unshuffle",
        "masked_scatter",
        "masked_scatter_",
        "fill_diagonal_",
        "gru_cell",
        "lstm_cell",
    ],
)
def test_it_is_equal_on_a_mesh(name: str) -> None:
    model = Formed((FORMS | CHANGES)[name])
    report = nd.verify(nd.compile(model, "dp_shard=2, tp=2", given()), model, seeds=1)
    assert [claim.held for claim in report.claims] == [True] * 4, report
