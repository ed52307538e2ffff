"""What attention over a sharded sequence is told besides queries, keys, values and ranks: from the op that it was."""

from __future__ import annotations

from typing import Any

from torch import fx

from ndcompile.rules.registry import arguments

PARTS = ("causal", "window", "chunk", "prefix", "padding", "documents")
"""The parts of a mask by name."""


def over_ranks(node: fx.Node) -> dict[str, Any]:
    """The arguments of `runtime.context_attention` by name, those that are not its defaults.

    With dropout, `shards` is missing.
    """
    given = arguments(node)
    assert given.get("mask", given.get("attn_mask")) is None, "a dense mask is sharded by queries"
    causal = given.get("is_causal") or given.get("causal")
    drop = dict(dropout_p=given["p"]) if "p" in given else {}
    more = ("scale", "key", "site") if drop else ("scale",)  # elsewhere `key` is the keys
    named = drop | dict(causal=causal) | {name: given.get(name) for name in (*PARTS[1:], *more)}
    kept = {name: value for name, value in named.items() if value is not None and value is not False}
    return kept | dict(how=node.meta["how"])
