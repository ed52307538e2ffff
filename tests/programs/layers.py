"""Layers: embeddings, norms, attention, dropout, losses; and lookups by integer inputs."""

from __future__ import annotations

from tests.programs.builder import Builder, Rejected, Value
from tests.programs.kinds import kind

VOCABULARY = 17
"""Rows of the table that ids look up, and classes of a loss."""

HEADS = ((2, 2), (4, 4), (4, 2), (4, 1), (3, 3), (6, 2), (6, 3), (8, 8), (1, 1), (8, 2))
"""Of queries, of keys and values."""


LOW = ("-1e9", "float('-inf')")
"""What a masked score becomes."""

SUMMED = ("", "", ", reduction='sum'")


def _ids(v: Value) -> bool:
    return v.rank > 0 and v.name.startswith("ids")


def _labels(v: Value) -> bool:
    return v.rank > 0 and v.name.startswith("labels")


@kind(4, in_blocks=False)
def embedded(g: Builder) -> Value:
    ids = g.value(_ids, floating=False)
    if g.chance(15):
        return g.let(f"F.one_hot({ids}, {VOCABULARY}).float()")
    tables = [n for n, shape in g.parameters() if len(shape) == 2 and shape[0] == VOCABULARY]
    if tables and g.chance(30):
        return g.let(f"F.embedding({ids}, {g.pick(tables)})")
    table = g.member(f"nn.Embedding({VOCABULARY}, {g.width()})")
    return g.let(f"{table}({ids})")


@kind(2)
def positions(g: Builder) -> None:
    """A table of positions, added."""
    x = g.value(lambda v: v.rank == 3 and v.last is not None and v.dims[1].text == "s")
    table = g.member(f"nn.Embedding(32, {x.last})")
    at = f"torch.arange({x}.shape[1], device={x}.device)"
    g.let(f"{x} + {table}({at})" if g.chance(60) else f"{x} + {table}.weight[: {x}.shape[1]]")


@kind(4)
def norm(g: Builder) -> None:
    x = g.value(lambda v: v.rank >= 2 and v.last is not None and v.last > 1)
    plain = ", elementwise_affine=False" if g.chance(15) else ""
    shape = str(x.last)
    if x.rank > 2 and x.dims[-2].number and g.chance(20):
        shape = f"({x.dims[-2].number}, {x.last})"
    name = g.pick(("LayerNorm", "LayerNorm", "RMSNorm"))
    g.let(f"{g.member(f'nn.{name}({shape}{plain})')}({x})")


@kind(1)
def norm_by_hand(g: Builder) -> None:
    x = g.value(lambda v: v.rank >= 2 and v.last is not None and v.last > 1)
    w = g.member(f"nn.Parameter(torch.ones({x.last}))", prefix="p")
    g.let(f"{w} * {x} * ({x}.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()")


@kind(1)
def norm_of_batch(g: Builder) -> None:
    """Batch and group norm, over channels at dim 1."""
    x = g.value(lambda v: v.rank in (2, 3) and (v.dims[1].number or 1) > 1 and v.dims[0].text == "b")
    channels = x.dims[1].number or 1
    if g.chance(50):
        g.let(f"{g.member(f'nn.BatchNorm1d({channels})')}({x})")
    else:
        groups = g.pick([n for n in (1, 2, 3) if channels % n == 0])
        g.let(f"{g.member(f'nn.GroupNorm({groups}, {channels})')}({x})")


@kind(4)
def attention(g: Builder) -> None:
    x = g.value(lambda v: v.rank == 3 and v.last is not None and v.last > 1)
    other = x
    if g.chance(15):
        other = g.value(lambda v: v.rank == 3 and v.dims[0] == x.dims[0] and v.last is not None and v.last > 1)
    heads, shared = g.pick(HEADS)
    width = g.pick((2, 3, 4))
    bias = f", bias={g.chance(70)}"
    q = g.let(f"{g.member(f'nn.Linear({x.last}, {heads * width}{bias})')}({x})")
    if other is x and heads == shared and g.chance(25):
        q, k, v = g.lets(f"{g.member(f'nn.Linear({x.last}, {3 * heads * width})')}({x}).chunk(3, dim=-1)", 3)
    else:
        k, v = (g.let(f"{g.member(f'nn.Linear({other.last}, {shared * width}{bias})')}({other})") for _ in range(2))
    q, k, v = (
        g.let(f"{y}.unflatten(-1, ({n}, {width})).transpose(1, 2)" if g.chance(50) else _as_heads(y, n, width))
        for y, n in ((q, heads), (k, shared), (v, shared))
    )
    y = _attended(g, q, k, v, heads, shared, width)
    flat = "flatten(2)" if g.chance(60) else f"reshape({y}.shape[0], {y}.shape[2], -1)"
    z = g.let(f"{y}.transpose(1, 2).{flat}")
    out = g.let(f"{g.member(f'nn.Linear({heads * width}, {x.last})')}({z})")
    if g.chance(60):
        g.let(f"{x} + {out}")


def _as_heads(y: Value, heads: int, width: int) -> str:
    return f"{y}.view({y}.shape[0], {y}.shape[1], {heads}, {width}).transpose(1, 2)"


def _attended(g: Builder, q: Value, k: Value, v: Value, heads: int, shared: int, width: int) -> Value:
    causal = g.chance(50) and q.dims[2] == k.dims[2]
    if g.chance(60):
        grouped = ", enable_gqa=True" if heads != shared else ""
        return g.let(f"F.scaled_dot_product_attention({q}, {k}, {v}, is_causal={causal}{grouped})")
    if heads != shared:
        k, v = (g.let(f"{y}.repeat_interleave({heads // shared}, dim=1)") for y in (k, v))
    scores = g.let(f"{q} @ {k}.transpose(-1, -2) / {width} ** 0.5")
    if causal:
        size = f"{q}.shape[2]"
        before = f"torch.ones({size}, {size}, dtype=torch.bool).tril()"
        compared = f"torch.arange({size})[:, None] >= torch.arange({size})"
        scores = g.let(f"{scores}.masked_fill(~({g.pick((before, compared))}), {g.pick(LOW)})")
    return g.let(f"{scores}.softmax(-1) @ {v}")


@kind(2)
def dropout(g: Builder) -> None:
    x = g.value(lambda v: v.rank > 0)
    if g.chance(50):
        g.let(f"{g.member(f'nn.Dropout({g.pick((0.1, 0.5))})')}({x})")
    else:
        g.let(f"F.dropout({x}, 0.2, self.training)")


@kind(5, in_blocks=False)
def cross_entropy(g: Builder) -> None:
    """Of one class a token or a sample; some labels are ignored."""
    labels = g.value(_labels, floating=False)
    x = g.value(
        lambda v: v.rank == labels.rank + 1 and v.dims[:-1] == labels.dims and v.last is not None and v.last > 1
    )
    tables = [n for n, shape in g.parameters() if shape == (VOCABULARY, x.last)]
    head = (
        f"F.linear({x}, {g.pick(tables)})"
        if tables and g.chance(60)
        else f"{g.member(f'nn.Linear({x.last}, {VOCABULARY})')}({x})"
    )
    logits = str(g.let(head))
    target = str(labels)
    if labels.rank == 2 and g.chance(30):
        logits, target = f"{logits}[:, :-1]", f"{target}[:, 1:]"
    more = g.pick(("", "", "", ", label_smoothing=0.1", ", reduction='sum'", ", reduction='none'", ", ignore_index=3"))
    if labels.rank == 1:
        g.let(f"F.cross_entropy({logits}, {target}{more})")
    elif g.chance(70):
        g.let(f"F.cross_entropy({logits}.flatten(0, 1), {target}.flatten(){more})")
    else:
        g.let(f"F.cross_entropy({logits}.transpose(1, 2), {target}{more})")


@kind(2)
def distance(g: Builder) -> None:
    a = g.value(lambda v: v.rank > 0)
    b = g.value(lambda v: v.dims == a.dims and v.name != a.name)
    name = g.pick(("mse_loss", "l1_loss", "smooth_l1_loss"))
    g.let(f"F.{name}({a}, {b}{g.pick(SUMMED)})")


@kind(2, in_blocks=False)
def gathered(g: Builder) -> None:
    """Of each token one element, or of each sample one token, by an integer input."""
    at = g.value(lambda v: v.name.startswith(("ids", "labels", "place")) and v.rank > 0, floating=False)
    if at.rank == 2:
        x = g.value(lambda v: v.rank == 3 and v.dims[:2] == at.dims and (v.last or 0) >= VOCABULARY)
        g.let(f"{x}.log_softmax(-1).gather(-1, {at}.clamp(min=0).unsqueeze(-1)).squeeze(-1)")
        return
    if at.name != "place":
        raise Rejected
    x = g.value(lambda v: v.rank >= 2 and v.dims[0] == at.dims[0] and min(v.dims[1].sizes) >= 2)
    if g.chance(50):
        g.let(f"{x}[torch.arange({x}.shape[0]), {at}]")
    else:
        sizes = "".join([", 1"] * (x.rank - 2))
        shape = "".join([f", {x}.shape[{n}]" for n in range(2, x.rank)])
        g.let(f"{x}.gather(1, {at}.view(-1, 1{sizes}).expand(-1, 1{shape})).squeeze(1)")
