"""Ops that are other names of others, or short for some: written as those, before anything else looks at the graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from ndcompile.rules.registry import RULES
from ndcompile.runtime import private

SYNONYMS = frozenset(
    "absolute arccos arccosh arcsin arcsinh arctan arctan2 arctanh clip concat concatenate divide true_divide fix "
    "greater greater_equal less less_equal moveaxis multiply negative not_equal positive row_stack subtract swapaxes "
    "swapdims special_erf special_erfc special_exp2 special_expit special_expm1 special_log1p special_logsumexp "
    "special_xlogy float_power reshape_as view_as ravel tile take_along_dim atleast_1d atleast_2d "
    "atleast_3d where isfinite isclose hstack vstack dstack column_stack hsplit vsplit dsplit tensor_split fliplr "
    "flipud meshgrid outer ger inner kron tensordot linalg_vecdot frobenius_norm cosine_similarity "
    "pairwise_distance std var cosine_embedding_loss hinge_embedding_loss margin_ranking_loss triplet_margin_loss "
    "poisson_nll_loss kl_div trapezoid trapz real imag conj std_mean var_mean cartesian_prod cumulative_trapezoid "
    "cross diag diagflat msort linalg_matrix_norm linalg_norm linalg_multi_dot chain_matmul prelu special_logit "
    "special_sinc special_gammaln special_digamma fft_fftshift fft_ifftshift".split()
)
"""By name, for each overload that has no rule; torch itself says of which ops they are composed."""

DECOMPOSED = frozenset(
    "affine_grid_generator block_diag binary_cross_entropy binary_cross_entropy_with_logits soft_margin_loss "
    "multi_margin_loss channel_shuffle count_nonzero dist glu isin linalg_cross pixel_shuffle pixel_unshuffle "
    "renorm rot90 take".split()
)
"""Ops of one kernel each, which torch can also do by others: what is a few views or products needs no rule."""


def instance_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, variance: Tensor | None,
    own_statistics: bool, momentum: float, eps: float, cudnn: bool,
) -> Tensor:  # fmt: skip
    """A layer norm over space; what keeps statistics is a batch norm's business."""
    if mean is not None or variance is not None or not own_statistics:
        raise NotComposed
    y = F.layer_norm(input, input.shape[2:], eps=eps)
    y = y if weight is None else y * _by_channel(weight, y)
    return y if bias is None else y + _by_channel(bias, y)


def _by_channel(x: Tensor, like: Tensor) -> Tensor:
    return x.reshape(-1, *[1] * (like.dim() - 2))


def bilinear(one: Tensor, two: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = torch.einsum("...i,oij,...j->...o", one, weight, two)
    return y if bias is None else y + bias


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Each slice along a dim has a length of its own; where the dim is -1, the whole tensor has one."""
    others = [d for d in range(v.dim()) if d != dim]
    return v * (g / torch.linalg.vector_norm(v, 2, others, keepdim=True))


def fill_diagonal_(x: Tensor, value: float, wrap: bool = False) -> Tensor:
    if x.dim() != 2 or wrap:
        raise NotComposed
    rows, columns = (torch.arange(n, device=x.device) for n in x.shape)
    return x.copy_(torch.where(rows.unsqueeze(1) == columns, value, x))


def masked_scatter_(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    return x.copy_(masked_scatter(x, mask, source))


def masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """Each place of the mask takes the element of the source whose number is that of the places before it.

    So what stays sharded is `x`: counting takes the whole mask, and looking up the whole source. Where the mask says
    the same of a whole row (a token), rows are counted and looked up.
    """
    x, mask = torch.broadcast_tensors(x, mask)
    rows = mask.stride(-1) == 0 and source.dim() > 1 and source.shape[-1] == x.shape[-1]
    marked = mask.select(-1, 0) if rows else mask
    number = marked.flatten().cumsum(0).reshape(marked.shape) - 1
    listed = source.reshape(-1, source.shape[-1]) if rows else source.reshape(-1)
    taken = listed[number.clamp(min=0)]
    return torch.where(marked.unsqueeze(-1) if rows else marked, taken, x)


def _gates(x: Tensor, h: Tensor, w_x: Tensor, w_h: Tensor, *biases: Tensor) -> tuple[Tensor, Tensor]:
    """What a recurrent cell makes of its input, and of its state."""
    b_x, b_h = biases or (None, None)
    return F.linear(x, w_x, b_x), F.linear(h, w_h, b_h)


def gru_cell(x: Tensor, h: Tensor, *weights: Tensor) -> Tensor:
    given, held = _gates(x, h, *weights)
    given_r, given_z, given_n = given.chunk(3, -1)
    held_r, held_z, held_n = held.chunk(3, -1)
    n = (given_n + (given_r + held_r).sigmoid() * held_n).tanh()
    return n + (given_z + held_z).sigmoid() * (h - n)


def lstm_cell(x: Tensor, states: Sequence[Tensor], *weights: Tensor) -> tuple[Tensor, Tensor]:
    h, c = states
    given, held = _gates(x, h, *weights)
    i, f, g, o = (given + held).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def rnn_tanh_cell(x: Tensor, h: Tensor, *weights: Tensor) -> Tensor:
    given, held = _gates(x, h, *weights)
    return (given + held).tanh()


def rnn_relu_cell(x: Tensor, h: Tensor, *weights: Tensor) -> Tensor:
    given, held = _gates(x, h, *weights)
    return (given + held).relu()


COMPOSED: dict[str, Callable[..., Any]] = {
    "instance_norm": instance_norm, "bilinear": bilinear, "_weight_norm": weight_norm,
    "masked_scatter": masked_scatter, "masked_scatter_": masked_scatter_, "fill_diagonal_": fill_diagonal_,
    "gru_cell": gru_cell, "lstm_cell": lstm_cell, "rnn_tanh_cell": rnn_tanh_cell, "rnn_relu_cell": rnn_relu_cell,
}  # fmt: skip
"""What we say of which ops some are composed."""


class NotComposed(Exception):
    """A call that a composition does not hold of: the op stays, and has no rule."""


@dataclass(frozen=True)
class Composition:
    """What does the same by other ops. Those that torch's own calls are not composed of others again."""

    function: Callable[..., Any]
    whole: bool


def replace_synonyms(graph: fx.GraphModule) -> None:
    """Write every synonym as the ops that it is composed of. Reads and sets `val`; the rest is the synonym's own."""
    left = list(graph.graph.nodes)
    while left:
        node = left.pop()
        composition = composition_of(node.target)
        if composition is not None:
            left += _replace(graph, node, composition)
    graph.graph.lint()


def composition_of(target: Any) -> Composition | None:
    if not isinstance(target, OpOverload) or target.namespace != "aten" or str(target) in RULES:
        return None
    name = target._schema.name.removeprefix("aten::")
    function = COMPOSED.get(name) or (private.decomposition(target) if name in DECOMPOSED else None)
    if function is not None:
        return Composition(function, whole=True)
    composed = name.rstrip("_") in SYNONYMS and private.is_composed(target)
    return Composition(target.decompose, whole=False) if composed else None


def is_synonym(target: Any) -> bool:
    return composition_of(target) is not None


def _replace(graph: fx.GraphModule, node: fx.Node, composition: Composition) -> list[fx.Node]:
    """The nodes that stand in its place; none where the composition does not hold of the call, and the op stays."""
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    given = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]

    def composed(*values: Any) -> Any:
        taken = iter(values)
        args, kwargs = pytree.tree_unflatten([next(taken) if isinstance(x, fx.Node) else x for x in leaves], spec)
        return composition.function(*args, **kwargs)

    try:
        parts = private.traced(composed, [n.meta["val"] for n in given], composition.whole)
    except NotComposed:
        return []
    if any(_changes_a_view(part) for part in parts.graph.nodes):
        return []
    copied: dict[fx.Node, fx.Node] = dict(zip(parts.graph.find_nodes(op="placeholder"), given, strict=True))
    made = []
    with graph.graph.inserting_before(node):
        for part in parts.graph.nodes:
            if part.op == "call_function":
                copied[part] = graph.graph.node_copy(part, lambda n: copied[n])
                copied[part].meta = {**node.meta, "val": part.meta.get("val")}
                made.append(copied[part])
    results: Any = fx.node.map_arg(parts.graph.output_node().args[0], lambda n: copied[n])
    if isinstance(results, fx.Node):
        node.replace_all_uses_with(results)
    for user in list(node.users):
        assert user.target is operator.getitem, "of several results each is taken by getitem"
        user.replace_all_uses_with(results[user.args[1]])
        graph.graph.erase_node(user)
    graph.graph.erase_node(node)
    return made


def _changes_a_view(part: fx.Node) -> bool:
    """Whether it changes what is a view, or is viewed, within a composition: its trace does not say which memory is
    shared, so the change would be lost.
    """
    if not isinstance(part.target, OpOverload) or not part.target._schema.is_mutable:
        return False
    changed = part.args[0]
    assert isinstance(changed, fx.Node), "an op changes its first operand"
    return changed.op != "placeholder" and any(_is_view(node) for node in (changed, *changed.users))


def _is_view(node: fx.Node) -> bool:
    returns = node.target._schema.returns if isinstance(node.target, OpOverload) else ()
    return any(value.alias_info is not None and not value.alias_info.is_write for value in returns)
