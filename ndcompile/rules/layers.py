"""Whole layers that capture keeps: norms, lookups, attention, losses, and what makes a tensor from nothing."""

from __future__ import annotations

from dataclasses import replace

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
    given = [index is not None for index in call.arguments["indices"]] + [False] * len(source)
    rank = max(len(shape) for shape in indices)
    names = [f"i{d}" for d in range(rank)]
    table = [f"t{d}!" if given[d] else f"r{d}" for d in range(len(source))]
    kept = [name for name in table if not name.endswith("!")]
    at = given.index(True) if _together(given) else 0
    listed = [" ".join(names[rank - len(shape) :]) for shape in indices]
    return line(f"f({' '.join(table)}, {', '.join(listed)}) -> {' '.join([*kept[:at], *names, *kept[at:]])}")(call)


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


def convolution(call: Call) -> Signature:
    """Over batch, and over output or input channels; a window needs its neighbours, so space is whole.

    Of channels in groups, each group would be its own convolution: they are whole.
    """
    rank = len(call.operands[0]) - 2
    space, window, out = (" ".join(f"{letter}{d}!" for d in range(rank)) for letter in "xwy")
    c, k, o = ("c", "c", "o") if call.arguments["groups"] == 1 else ("c!", "k!", "o!")
    given, kernel, made = f"n {c} {space}", f"{o} {k} {window}", f"n {o} {out}"
    return line(f"({given})({kernel}) -> {made}", f"({given})({kernel}) + {o} -> {made}")(call)


def embedding(call: Call) -> Signature:
    """A sharded table is looked up with a mask; what depends on how often an id occurs cannot be sharded."""
    for option in ("scale_grad_by_freq", "sparse"):
        if call.arguments.get(option):
            raise RuleError(f"embedding with {option}=True has no rule: its gradient depends on the ids of all ranks")
    return line("(v? h)(*) -> * h")(call)


def factory(call: Call) -> Signature:
    """`arange`, `zeros`, `ones`, `full`: whole everywhere, or born sharded by global index."""
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

ATTENTION = ("f(* s! d!, * t! d!, * t! e!) -> * s! e!", "f(* s! d!, * t! d!, * t! e!, * s! t!) -> * s! e!")


def _together_again(dims: Dims) -> Dims:
    """Heads and groups, the two dims before the last two, as one."""
    return dims if len(dims) < 4 else (*dims[:-4], dims[-4] + dims[-3], *dims[-2:])


RULES: dict[str, Rule] = {
    "aten.layer_norm.default": normalised,
    "aten.rms_norm.default": normalised,
    "aten.softmax.int": along(default=-1, linear=False),
    "aten._softmax.default": along(default=-1, linear=False),
    "aten.log_softmax.int": along(default=-1, linear=False),
    "aten.embedding.default": embedding,
    "aten.index.Tensor": lookup,
    "aten.gather.default": gathered,
    "aten.conv1d.default": convolution,
    "aten.conv2d.default": convolution,
    "aten.conv3d.default": convolution,
    "aten.scaled_dot_product_attention.default": attention(*ATTENTION),
    "runtime.attention_with_dropout": attention(*(text.replace(") ->", ", ) ->") for text in ATTENTION)),
    "runtime.cross_entropy": line("f(n v~, n) -> n"),
    "runtime.dropout": line("f(*, ) -> *"),
    "runtime.fold": line("f() -> "),
    "aten.arange.default": factory,
    "aten.arange.start": factory,
    "aten.arange.start_step": factory,
    "aten.full.default": factory,
    "aten.zeros.default": factory,
    "aten.ones.default": factory,
}
