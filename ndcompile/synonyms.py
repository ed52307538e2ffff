"""Ops that are other names of others, or short for some: written as those, before anything else looks at the graph."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx
from torch._ops import OpOverload
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
    "poisson_nll_loss kl_div trapezoid trapz".split()
)
"""By name, for each overload that has no rule; torch itself says of which ops they are composed."""


def replace_synonyms(graph: fx.GraphModule) -> None:
    """Write every synonym as the ops that it is composed of. Reads and sets `val`; the rest is the synonym's own."""
    for node in list(graph.graph.nodes):
        if is_synonym(node.target):
            _replace(graph, node)
    graph.graph.lint()


def is_synonym(target: Any) -> bool:
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return False
    named = target._schema.name.removeprefix("aten::").rstrip("_") in SYNONYMS
    return named and str(target) not in RULES and private.is_composed(target)


def _replace(graph: fx.GraphModule, node: fx.Node) -> None:
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    given = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]
    op: Any = node.target

    def composed(*values: Any) -> Any:
        taken = iter(values)
        args, kwargs = pytree.tree_unflatten([next(taken) if isinstance(x, fx.Node) else x for x in leaves], spec)
        return op.decompose(*args, **kwargs)

    parts = private.traced(composed, [n.meta["val"] for n in given])
    copied: dict[fx.Node, fx.Node] = dict(zip(parts.graph.find_nodes(op="placeholder"), given, strict=True))
    with graph.graph.inserting_before(node):
        for part in parts.graph.nodes:
            if part.op == "call_function":
                copied[part] = graph.graph.node_copy(part, lambda n: copied[n])
                copied[part].meta = {**node.meta, "val": part.meta.get("val")}
    results: Any = fx.node.map_arg(parts.graph.output_node().args[0], lambda n: copied[n])
    if isinstance(results, fx.Node):
        node.replace_all_uses_with(results)
    for user in list(node.users):
        assert user.target is operator.getitem, "of several results each is taken by getitem"
        user.replace_all_uses_with(results[user.args[1]])
        graph.graph.erase_node(user)
    graph.graph.erase_node(node)
