"""Whole layers that capture keeps: norms, lookups, attention, losses, and what makes a tensor from nothing."""

from __future__ import annotations

from dataclasses import replace

import torch

from ndcompile.rules.notation import Call, Dims, Rule, RuleError, Signature, line
from ndcompile.rules.views import along
from ndcompile.size import ONE, Shape


def normalised(call: Call) -> Signature:
    """`layer_norm`, `rms_norm`: nonlinear, whole along the normalised dims."""
    inner = " ".join(f"n{i}!" for i in range(len(call.arguments["normalized_shape"])))
    others = ", ".join([inner] * (len(call.operands) - 1))
    return line(f"f(* {inner}{', ' + others if others else ''}) -> * {inner}")(call)


def lookup(call: Call) -> Signature:
    """`index(x, [i, j, …])` with integer tensors: the looked-up dims are whole, the indices' dims broadcast."""
    source, *indices = call.operands
    table, listed, result = _indexed(call, source, indices, "")
    return line(f"f({table}, {', '.join(listed)}) -> {' '.join(result)}")(call)


def placed(call: Call) -> Signature:
    """`index_put(x, [i, j, …], v)` with integer tensors: what they index is whole, and so are their own dims."""
    if any(index is not None and index.meta.get("dtype") == torch.bool for index in call.arguments["indices"]):
        raise RuleError("index_put with a mask has no rule: where a value goes depends on the whole mask")
    source, *indices, values = call.operands
    table, listed, result = _indexed(call, source, indices, "!")
    factors = "".join(f"({index})" for index in (*listed, " ".join(result[len(result) - len(values) :])))
    return line(f"({table}) + {factors} -> {table}")(call)


def _indexed(call: Call, source: Shape, indices: list[Shape], mark: str) -> tuple[str, list[str], list[str]]:
    """The dims of the indexed tensor, of each index (with a mark), and of what they find there."""
    given = [index is not None for index in call.arguments["indices"]] + [False] * len(source)
    rank = max(len(shape) for shape in indices)
    names = [f"i{d}{mark}" for d in range(rank)]
    table = [f"t{d}!" if given[d] else f"r{d}" for d in range(len(source))]
    kept = [name for name in table if not name.endswith("!")]
    at = given.index(True) if _together(given) else 0
    listed = [" ".join(names[rank - len(shape) :]) for shape in indices]
    return " ".join(table), listed, [*kept[:at], *names, *kept[at:]]


def _together(given: list[bool]) -> bool:
    """Whether the looked-up dims are neighbours: then the indices' dims take their place, else they lead."""
    first, count = given.index(True), given.count(True)
    return all(given[first : first + count])


def gathered(call: Call) -> Signature:
    """`gather(x, dim, index)`: whole along `dim`, where the index has a size of its own; linear in `x`.

    Another dim is tied to the index's only where both are of one size: a shorter index takes a part of `x`.
    """
    source, index = call.operands
    at = call.arguments["dim"] % len(source)
    tied = [n == m and d != at for d, (n, m) in enumerate(zip(source, index, strict=True))]
    table = " ".join(f"d{d}" if same else f"t{d}!" for d, same in enumerate(tied))
    taken = " ".join(f"d{d}" if same or d == at else f"u{d}!" for d, same in enumerate(tied))
    return line(f"({table})({taken}) -> {taken}")(call)


def convolution(transposed: bool) -> Rule:
    """`conv1d` to `conv3d` over batch, and over output or input channels; `transposed` ones, whose kernel has input
    channels first.

    A window needs its neighbours, so space is whole. So are channels in groups: a shard would need another number of
    groups.
    """

    def rule(call: Call) -> Signature:
        space = len(call.operands[1]) - 2
        source, window, target = (" ".join(f"{letter}{d}!" for d in range(space)) for letter in "xwy")
        c, o = ("c", "o") if call.arguments["groups"] == 1 else ("c!", "o!")
        first, second = (c, o) if transposed else (o, c)
        second = second if call.arguments["groups"] == 1 else "k!"
        batch = "n " if len(call.operands[0]) == space + 2 else ""
        product = f"({batch}{c} {source})({first} {second} {window})"
        return line(f"{product} -> {batch}{o} {target}", f"{product} + {o} -> {batch}{o} {target}")(call)

    return rule


def convolve(call: Call) -> Signature:
    """`runtime.convolve` as `convolution`, of which an axis of sequences shares the length."""
    c, o, k = ("c", "o", "c") if call.arguments["groups"] == 1 else ("c!", "o!", "k!")
    product = f"(n {c} s@)({o} {k} w!)"
    return line(f"{product} -> n {o} s@", f"{product} + {o} -> n {o} s@")(call)


def running_sum(call: Call) -> Signature:
    """Along a dim that an axis of sequences shares."""
    dims = " ".join("s@" if d == call.arguments["dim"] else f"d{d}" for d in range(len(call.output)))
    return line(f"{dims} -> {dims}")(call)


def pooled(linear: bool) -> Rule:
    """Over the last `space` dims, by the name of the op; these are whole."""

    def rule(call: Call) -> Signature:
        space = int(call.name.split(".")[1][-2])
        source, target = (" ".join(f"{letter}{d}!" for d in range(space)) for letter in "xy")
        operand = f"* {source}" if linear else f"f(* {source})"
        return line(f"{operand} -> * {target}")(call)

    return rule


def by_channel(call: Call) -> Signature:
    """Batch norm with statistics that are given: everything but the input is one number a channel."""
    return line(f"f(n c *{', c' * (len(call.operands) - 1)}) -> n c *")(call)


def by_group(call: Call) -> Signature:
    """Group norm: a sample's channels and space are whole."""
    space = " ".join(f"x{d}!" for d in range(len(call.operands[0]) - 2))
    return line(f"f(n c! {space}{', c!' * (len(call.operands) - 1)}) -> n c! {space}")(call)


def batch_norm(call: Call) -> Signature:
    """The element-by-element part: weight and bias are one number a channel, the variance is of the input's rank."""
    return line(f"f(n c *, n c *{', c' * (len(call.operands) - 2)}) -> n c *")(call)


def embedding(call: Call) -> Signature:
    """A sharded table is looked up with a mask; what depends on how often an id occurs cannot be sharded."""
    for option in ("scale_grad_by_freq", "sparse"):
        if call.arguments.get(option):
            raise RuleError(f"embedding with {option}=True has no rule: its gradient depends on the ids of all ranks")
    return line("(v? h)(*) -> * h")(call)


def factory(call: Call) -> Signature:
    """`arange`, `zeros`, `ones`, `full`, `uniform`: whole everywhere, or born sharded by global index."""
    names = [f"d{i}" for i in range(len(call.output))]
    sizes = dict(zip(names, call.output, strict=True))
    output = tuple((name,) if size != ONE else () for name, size in sizes.items())
    given = tuple(() for _ in call.operands)
    return Signature(tuple(() for _ in given), output, sizes)


def attention(*texts: str) -> Rule:
    """Attention by a line, in which heads are among the leading dims; groups of queries may share keys and values.

    A dim of `h · g` heads of queries beside one of `h` heads of keys and values is two factors, of which keys lack `g`.
    """
    alike = line(*texts)

    def rule(call: Call) -> Signature:
        query, key = call.operands[:2]
        if len(query) < 4 or query[HEADS] == key[HEADS]:
            return alike(call)
        count, groups = key[HEADS], query[HEADS] // query[HEADS].gcd(key[HEADS])
        assert count * groups == query[HEADS], "torch takes no other heads"

        def taken_apart(shape: Shape) -> Shape:
            if len(shape) < 3:
                return shape
            pair = {query[HEADS]: (count, groups), count: (count, ONE)}.get(shape[HEADS], (ONE, ONE))
            return (*shape[:HEADS], *pair, *shape[HEADS + 1 :])

        given = tuple(map(taken_apart, call.operands))
        bound = alike(replace(call, operands=given, output=taken_apart(call.output)))
        joined = tuple(map(_together_again, bound.operands))
        return replace(bound, operands=joined, output=_together_again(bound.output))

    return rule


HEADS = -3
"""The dim of heads in queries, keys and values."""

ATTENTION = ("f(* s@ d!, * t@ d!, * t@ e!) -> * s@ e!", "f(* s@ d!, * t! d!, * t! e!, * s@ t!) -> * s@ e!")


def _together_again(dims: Dims) -> Dims:
    """Heads and groups, the two dims before the last two, as one."""
    return dims if len(dims) < 4 else (*dims[:-4], dims[-4] + dims[-3], *dims[-2:])


def named_attention(call: Call) -> Signature:
    """Attention under a mask by name: `prefix` and `padding` are rows of keys, `documents` of queries and keys."""
    given = {name: value for name in ROWS if (value := call.arguments.get(name)) is not None}
    lead = "b *" if given.keys() - {"mask", "key"} else "*"
    rows = ROWS | (dict(mask=f"{lead} s@ t!") if "mask" in given and len(call.operands[DENSE]) == 4 else {})
    shapes = [rows[name] for name, value in given.items() if not isinstance(value, int)]
    mark = "!" if "mask" in given else "@"
    tensors = [f"{lead} {dims}" for dims in ("s@ d!", f"t{mark} d!", f"t{mark} e!")]
    return attention(f"f({', '.join(tensors + shapes)}) -> {lead} s@ e!")(call)


DENSE = 3
"""Which operand a dense mask is."""

ROWS = dict(mask="* s@ t!", key="", prefix="b u!", padding="b u!", documents="b u!")
"""What else attention may take, in the order in which it takes them: all that says of all keys is whole (`u`)."""


def transformed(call: Call) -> Signature:
    """Fourier transforms: linear, and whole along their dims, which may get another size."""
    rank, given = len(call.output), call.arguments.get("dim")
    if given is None:
        given = range(-len(call.arguments.get("s") or range(rank)), 0)
    acted = {d % rank for d in ([given] if isinstance(given, int) else given)}
    source, target = (" ".join(f"{letter}{d}!" if d in acted else f"d{d}" for d in range(rank)) for letter in "xy")
    return line(f"{source} -> {target}")(call)


def spectrogram(call: Call) -> Signature:
    """`stft`: linear in the signal and in the window, both whole."""
    made = "* f! n!" if call.arguments["return_complex"] else "* f! n! c!"
    return line(f"* t! -> {made}", f"(* t!)(w!) -> {made}")(call)


def made_whole(call: Call) -> Signature:
    """Values that are written out, or depend on their place in more than one dim: whole everywhere."""
    names = [f"d{i}" for i in range(len(call.output))]
    sizes = dict(zip(names, call.output, strict=True))
    return Signature((), tuple((name,) for name in names), sizes, whole=frozenset(names))


RULES: dict[str, Rule] = {
    "aten.layer_norm.default": normalised,
    "aten.rms_norm.default": normalised,
    "aten.softmax.int": along(default=-1, linear=False),
    "aten._softmax.default": along(default=-1, linear=False),
    "aten.log_softmax.int": along(default=-1, linear=False),
    "aten.embedding.default": embedding,
    "aten.index.Tensor": lookup,
    "aten.index_put.default": placed,
    "aten.gather.default": gathered,
    **{
        f"aten.conv{n}d.{overload}": convolution(transposed=False)
        for n in (1, 2, 3)
        for overload in ("default", "padding")
    },
    **{f"aten.max_pool{n}d.default": pooled(linear=False) for n in (1, 2, 3)},
    **{f"aten.avg_pool{n}d.default": pooled(linear=True) for n in (1, 2, 3)},
    **{f"aten.adaptive_avg_pool{n}d.default": pooled(linear=True) for n in (1, 2, 3)},
    "aten.batch_norm.default": by_channel,
    "aten.group_norm.default": by_group,
    "runtime.convolve": convolve,
    "runtime.running_sum": running_sum,
    "runtime.batch_norm": batch_norm,
    "runtime.moving_average": line("f(c, n c *) -> c"),
    "runtime.lstm": line(
        "f(s! b k!, b n!, b n!, m! k!, m! n!) -> t! b n!",
        "f(s! b k!, b n!, b n!, m! k!, m! n!, m!, m!) -> t! b n!",
    ),
    **dict.fromkeys(
        ("runtime.gru", "runtime.rnn_tanh", "runtime.rnn_relu"),
        line("f(s! b k!, b n!, m! k!, m! n!) -> s! b n!", "f(s! b k!, b n!, m! k!, m! n!, m!, m!) -> s! b n!"),
    ),
    "aten.scaled_dot_product_attention.default": attention(*ATTENTION),
    "runtime.attention": named_attention,
    "runtime.attention_with_dropout": named_attention,
    "runtime.cross_entropy": line("f(n v~, n) -> n"),
    "runtime.dropout": line("f(*, ) -> *"),
    "runtime.literal": made_whole,
    "runtime.uniform": factory,
    "runtime.fold": line("f() -> "),
    "aten.cdist.default": line("f(* m d!, * n d!) -> * m n"),
    **{
        f"aten.fft_{way}{kind}{dims}.default": transformed
        for way in ("", "i")
        for kind in ("fft", "rfft")
        for dims in ("", "2", "n")
    },
    "aten.stft.default": spectrogram,
    "aten.eye.default": made_whole,
    "aten.eye.m": made_whole,
    "aten.linspace.default": made_whole,
    "aten.logspace.default": made_whole,
    "aten.tril_indices.default": made_whole,
    "aten.triu_indices.default": made_whole,
    **{
        f"aten.{name}_window.{overload}": made_whole
        for name in ("hann", "hamming", "blackman")
        for overload in ("default", "periodic")
    },
    "aten.arange.default": factory,
    "aten.arange.start": factory,
    "aten.arange.start_step": factory,
    "aten.full.default": factory,
    "aten.zeros.default": factory,
    "aten.ones.default": factory,
}
