"""What moves elements: views, cuts, joins, copies, lookups."""

from __future__ import annotations

import math

from tests.programs.builder import Builder, Dim, Rejected, Value
from tests.programs.kinds import kind


def _texts(dims: tuple[Dim, ...]) -> list[str]:
    found = [d.text for d in dims]
    if None in found:
        raise Rejected
    return [str(text) for text in found]


def _shaped(g: Builder, x: Value, sizes: list[str]) -> None:
    """A view or reshape; one size may be left to torch."""
    if g.chance(30):
        sizes[g.pick(range(len(sizes)))] = "-1"
    g.let(f"{x}.{g.pick(('view', 'reshape', 'reshape'))}({', '.join(sizes)})")


@kind(4)
def split_dim(g: Builder) -> None:
    """A dim as two."""
    x = g.value(lambda v: v.rank > 0)
    dim = g.dim(x, lambda d: (d.number or 1) >= 4)
    size = x.dims[dim].number or 1
    first = g.pick([n for n in (2, 3, 4, 6, 8) if size % n == 0 and size > n])
    pair = (first, size // first) if g.chance(60) else (size // first, first)
    if g.chance(50):
        g.let(f"{x}.unflatten({dim}, {pair if g.chance(60) else (pair[0], -1)})")
        return
    at, sizes = dim % x.rank, _texts(x.dims)
    _shaped(g, x, [*sizes[:at], *map(str, pair), *sizes[at + 1 :]])


@kind(4)
def merge_dims(g: Builder) -> None:
    x = g.value(lambda v: v.rank >= 2)
    at = g.pick(range(x.rank - 1))
    if g.chance(60):
        g.let(f"{x}.flatten({at}, {g.pick((at + 1, at + 1 - x.rank))})")
        return
    _texts(x.dims)
    sizes = [str(d.text) for d in x.dims]
    _shaped(g, x, [*sizes[:at], f"{sizes[at]} * {sizes[at + 1]}", *sizes[at + 2 :]])


@kind(2)
def reshaped(g: Builder) -> None:
    """Plain sizes cut anew."""
    x = g.value(lambda v: v.rank >= 2 and all(d.number for d in v.dims[-2:]))
    total = math.prod(d.number or 1 for d in x.dims[-2:])
    first = g.pick([n for n in (2, 3, 4, 6, 8, 12) if total % n == 0])
    _shaped(g, x, [*_texts(x.dims[:-2]), str(first), str(total // first)])


@kind(5)
def permuted(g: Builder) -> None:
    x = g.value(lambda v: v.rank >= 2)
    if g.chance(60):
        g.let(f"{x}.transpose({g.dim(x)}, {g.dim(x)})")
    elif g.chance(60):
        order = list(range(x.rank))
        g.random.shuffle(order)
        g.let(f"{x}.permute({', '.join(map(str, order))})")
    else:
        g.let(g.pick((f"{x}.mT", f"{x}.movedim({g.dim(x)}, {g.dim(x)})", f"{x}.transpose(0, 1).contiguous()")))


@kind(3)
def cut(g: Builder) -> None:
    """Split or chunk, and all pieces used together."""
    x = g.value(lambda v: v.rank > 0)
    dim = g.dim(x, lambda d: (d.number or 1) >= 4)
    size = x.dims[dim].number or 1
    how = g.pick(("chunk", "split", "sizes", "unbind"))
    if how == "chunk":
        count = g.pick([n for n in (2, 3, 4) if size % n == 0])
        found = g.lets(f"{x}.chunk({count}, dim={dim})", count)
    elif how == "unbind" and size <= 4:
        found = g.lets(f"{x}.unbind({dim})", size)
    elif how == "split":
        count = g.pick([n for n in (2, 3) if size % n == 0])
        found = g.lets(f"{x}.split({size // count}, {dim})", count)
    else:
        first = g.pick((1, 2, size // 2))
        found = g.lets(f"{x}.split([{first}, {size - first}], dim={dim})", 2)
    if g.chance(60) and len({v.dims for v in found}) == 1:
        g.let(g.pick(("F.silu({}) * {}", "{} + {}.tanh()", "{} * {}")).format(*found[:2]))


@kind(3)
def joined(g: Builder) -> None:
    a = g.value(lambda v: v.rank > 0)
    b = g.value(lambda v: v.dims == a.dims)
    dim = g.dim(a)
    texts = [f"torch.cat([{a}, {b}], dim={dim})", f"torch.stack([{a}, {b}], dim={g.pick((0, 1, -1, a.rank))})"]
    texts.append(f"torch.cat([{a}, {b}, {a}.tanh()], {dim})")
    g.let(g.pick(texts))


@kind(2)
def joined_unequal(g: Builder) -> None:
    a = g.value(lambda v: v.rank > 1)
    b = g.value(lambda v: v.rank == a.rank and sum(p != q for p, q in zip(v.dims, a.dims, strict=True)) == 1)
    dim = next(n for n, (p, q) in enumerate(zip(a.dims, b.dims, strict=True)) if p != q)
    g.let(f"torch.cat([{a}, {b}], dim={dim})")


@kind(5)
def sliced(g: Builder) -> None:
    x = g.value(lambda v: v.rank > 0)
    dim = g.dim(x, lambda d: min(d.sizes) > 2) % x.rank
    part = g.pick((":2", "1:", ":-1", "::2", "0", "-1", "1:3", "1", ":1", "-2:"))
    if g.chance(20):
        size = x.dims[dim].text or ""
        part = g.pick((f": ({size}) // 2", f"({size}) // 2 :")) if size else part
    front = [":"] * dim
    index = ", ".join([*front, part]) if g.chance(60) or dim < x.rank - 1 else f"..., {part}"
    g.let(f"{x}[{index}]")


@kind(1)
def shifted(g: Builder) -> None:
    """Neighbours along a dim together."""
    x = g.value(lambda v: v.rank > 1)
    dim = g.pick([n for n, d in enumerate(x.dims) if min(d.sizes) > 2])
    front = ":, " * dim
    g.let(f"{x}[{front}1:] {g.pick(('-', '*', '+'))} {x}[{front}:-1]")


@kind(3)
def expanded(g: Builder) -> None:
    x = g.value(lambda v: v.rank > 0)
    dim = g.dim(x)
    how = g.pick(("unsqueeze", "none", "expand", "repeat", "interleave", "squeeze"))
    at = dim % x.rank
    if how == "unsqueeze":
        g.let(f"{x}.unsqueeze({dim})")
    elif how == "none":
        g.let(f"{x}[{', '.join([':'] * at + ['None'])}]")
    elif how == "expand":
        count = g.pick((2, 3, 4))
        sizes = ["-1"] * at + [str(count)] + ["-1"] * (x.rank - at)
        g.let(f"{x}.unsqueeze({at}).expand({', '.join(sizes)})")
    elif how == "repeat":
        g.let(f"{x}.repeat({', '.join(['1'] * at + ['2'] + ['1'] * (x.rank - at - 1))})")
    elif how == "interleave":
        g.let(f"{x}.repeat_interleave(2, dim={dim})")
    else:
        g.let(f"{x}.squeeze({g.dim(x, lambda d: d.number == 1)})")


@kind(2)
def moved(g: Builder) -> None:
    x = g.value(lambda v: v.rank > 0)
    dim = g.dim(x, lambda d: d.number != 1)
    texts = ["{0}.roll(1, {1})", "{0}.flip({1})", "torch.roll({0}, shifts=-1, dims={1})"]
    if dim in (-1, x.rank - 1):
        texts += ["F.pad({0}, (1, 0))", "F.pad({0}, (0, 2), value=0.5)"]
    g.let(g.pick(texts).format(x, dim))


@kind(2)
def looked_up(g: Builder) -> None:
    """Rows by numbers that are not inputs."""
    x = g.value(lambda v: v.rank > 0)
    dim = g.dim(x, lambda d: (d.number or 0) >= 2)
    size = x.dims[dim].number or 1
    rows = [g.random.randint(0, size - 1) for _ in range(g.pick((2, 3)))]
    how = g.pick(("select", "index", "topk", "gather", "list"))
    if how == "select":
        g.let(f"{x}.index_select({dim}, {g.buffer(f'torch.tensor({rows})')})")
    elif how == "index":
        g.let(f"{x}[{', '.join([':'] * (dim % x.rank) + [g.buffer(f'torch.tensor({rows})')])}]")
    elif how == "list":
        g.let(f"{x}[{', '.join([':'] * (dim % x.rank) + [str(rows)])}]")
    elif how == "topk":
        g.let(f"{x}.topk(2, dim={dim}).values")
    else:
        g.let(
            f"{x}.gather({dim}, {x}.argsort({dim}))"
            if g.chance(50)
            else f"{x}.take_along_dim({x}.argmax({dim}, keepdim=True), {dim})"
        )
