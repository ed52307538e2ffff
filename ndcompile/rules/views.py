"""Views: dims exchanged, added, dropped, repeated, cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ndcompile.rules.notation import Call, Dims, Rule, Signature, line
from ndcompile.rules.reshape import reshape
from ndcompile.size import ONE, Shape, Size


def _names(shape: Shape) -> tuple[list[str], dict[str, Size]]:
    names = [f"d{i}" for i in range(len(shape))]
    return names, dict(zip(names, shape, strict=True))


def _dims(names: list[str], sizes: dict[str, Size]) -> Dims:
    return tuple((name,) if sizes[name] != ONE else () for name in names)


def _reordered(order: Callable[[Call], list[int]]) -> Rule:
    def rule(call: Call) -> Signature:
        names, sizes = _names(call.operands[0])
        picked = [names[i] for i in order(call)]
        return Signature((_dims(names, sizes),), _dims(picked, sizes), sizes, ((0,),), frozenset({0}))

    return rule


def _transposed(call: Call) -> list[int]:
    order = list(range(len(call.output)))
    i, j = (call.arguments[name] for name in ("dim0", "dim1"))
    order[i], order[j] = order[j], order[i]
    return order


def _moved(call: Call) -> list[int]:
    rank = len(call.output)
    source, target = (_listed(call.arguments[name], rank) for name in ("source", "destination"))
    rest = iter(d for d in range(rank) if d not in source)
    return [source[target.index(d)] if d in target else next(rest) for d in range(rank)]


def _listed(dims: int | Sequence[int], rank: int) -> list[int]:
    return [d % rank for d in ([dims] if isinstance(dims, int) else dims)]


def expand(call: Call) -> Signature:
    """A dim of size 1 that becomes larger is a new factor; so is a new leading dim."""
    source, target = call.operands[0], call.output
    names, sizes = _names(target)
    shift = len(target) - len(source)
    given = tuple((names[shift + i],) if size != ONE else () for i, size in enumerate(source))
    return Signature((given,), _dims(names, sizes), sizes, ((0,),), frozenset({0}))


def expand_as(call: Call) -> Signature:
    """The second operand lends its shape alone: it is sharded as the output is, and no term has it."""
    bound = expand(call)
    return Signature((*bound.operands, bound.output), bound.output, bound.sizes, bound.terms, bound.carriers)


def flip(call: Call) -> Signature:
    """The flipped dims are whole."""
    names, sizes = _names(call.operands[0])
    dims = _dims(names, sizes)
    return Signature((dims,), dims, sizes, ((0,),), frozenset({0}), frozenset(names[d] for d in call.arguments["dims"]))


def along(argument: str = "dim", default: int = 0, linear: bool = True) -> Rule:
    """Ops that act along one dim (`cat`, `slice`, `cumsum`, `softmax`, …): that dim is whole, all others free."""

    def rule(call: Call) -> Signature:
        dim = call.arguments.get(argument, default)
        rank = len(call.operands[0])
        names, sizes = _names(call.operands[0])
        acted = f"d{dim % rank}"
        operands = tuple(_dims(names, sizes | {acted: Size(0, ("acted",))}) for _ in call.operands)
        sizes[acted] = Size(1, ("acted",))
        terms = tuple((i,) for i in range(len(operands))) if linear else None
        carriers = frozenset(range(len(operands))) if linear else frozenset[int]()
        return Signature(operands, operands[0], sizes, terms, carriers, frozenset({acted}))

    return rule


def cat(call: Call) -> Signature:
    """Along a dim that is whole; or of equal parts that join sequences: these are minor to an operand's place."""
    shapes, rank = set(call.operands), len(call.operands[0])
    at = call.arguments.get("dim", 0) % rank
    if len(shapes) > 1 or len(call.operands) < 2 or not call.operands[0][at].symbols:
        return along()(call)
    names, sizes = _names(call.operands[0])
    dims, count = _dims(names, sizes), len(call.operands)
    output = (*dims[:at], ("n", *dims[at]), *dims[at + 1 :])
    terms, carriers = tuple((i,) for i in range(count)), frozenset(range(count))
    return Signature((dims,) * count, output, sizes | {"n": Size(count)}, terms, carriers, frozenset({"n"}))


def stack(call: Call) -> Signature:
    """The new dim is whole; linear in all together."""
    names, sizes = _names(call.operands[0])
    dims, at = _dims(names, sizes), call.arguments["dim"] % len(call.output)
    output = (*dims[:at], ("n",), *dims[at:])
    count = len(call.operands)
    terms, carriers = tuple((i,) for i in range(count)), frozenset(range(count))
    return Signature((dims,) * count, output, sizes | {"n": Size(count)}, terms, carriers, frozenset({"n"}))


def roll(call: Call) -> Signature:
    """The rolled dims are whole; without dims, all are."""
    names, sizes = _names(call.operands[0])
    dims, given = _dims(names, sizes), _listed(call.arguments["dims"], len(names)) or range(len(names))
    return Signature((dims,), dims, sizes, ((0,),), frozenset({0}), frozenset(names[d] for d in given))


def pad(call: Call) -> Signature:
    """The last dims are padded: those are whole. A value other than 0 makes it affine, so nothing may be partial."""
    names, sizes = _names(call.operands[0])
    padded = frozenset(names[len(names) - len(call.arguments["pad"]) // 2 :])
    dims = tuple((name,) for name in names)
    zero = not call.arguments.get("value")
    return Signature((dims,), dims, sizes, ((0,),) if zero else None, frozenset({0} if zero else ()), padded)


def select(call: Call) -> Signature:
    """One index of a dim: that dim goes, and is whole."""
    names, sizes = _names(call.operands[0])
    dim = call.arguments["dim"] % len(names)
    kept = [name for i, name in enumerate(names) if i != dim]
    whole = frozenset({names[dim]})
    return Signature((_dims(names, sizes),), _dims(kept, sizes), sizes, ((0,),), frozenset({0}), whole)


def select_scatter(call: Call) -> Signature:
    """One index of a dim exchanged: that dim is whole; linear in the whole and the part together."""
    names, sizes = _names(call.operands[0])
    dim = call.arguments["dim"] % len(names)
    kept = [name for i, name in enumerate(names) if i != dim]
    dims, whole = _dims(names, sizes), frozenset({names[dim]})
    return Signature((dims, _dims(kept, sizes)), dims, sizes, ((0,), (1,)), frozenset({0, 1}), whole)


def unfolded(call: Call) -> Signature:
    """`x.unfold(dim, size, step)`: windows of one dim, which is whole; a window is the last dim."""
    names, _ = _names(call.operands[0])
    acted = names[call.arguments["dimension"] % len(names)] if names else ""
    places = [f"{name}!" if name == acted else name for name in names]
    made = ["u!" if name == acted else name for name in names]
    return line(f"{' '.join(places)} -> {' '.join([*made, 'w!'])}")(call)


def diagonal(call: Call) -> Signature:
    """Of two dims, which are whole, a new last one."""
    names, _ = _names(call.operands[0])
    gone = {names[call.arguments[dim] % len(names)] for dim in ("dim1", "dim2")}
    given = [f"{name}!" if name in gone else name for name in names]
    return line(f"{' '.join(given)} -> {' '.join([*(n for n in names if n not in gone), 'g!'])}")(call)


def on_a_diagonal(call: Call) -> Signature:
    """`diag_embed`: of the last dim two, with zeros between: all three are whole."""
    names, _ = _names(call.operands[0])
    made, rank = iter(names[:-1]), len(call.output)
    new = {call.arguments[dim] % rank: f"g{number}!" for number, dim in enumerate(("dim1", "dim2"))}
    return line(f"{' '.join([*names[:-1], 'g!'])} -> {' '.join(new.get(d) or next(made) for d in range(rank))}")(call)


RULES: dict[str, Rule] = {
    "aten.view.default": reshape,
    "aten.reshape.default": reshape,
    "aten.flatten.using_ints": reshape,
    "aten.unflatten.int": reshape,
    "aten._unsafe_view.default": reshape,
    "aten.unsqueeze.default": reshape,
    "aten.squeeze.dim": reshape,
    "aten.squeeze.dims": reshape,
    "aten.squeeze.default": reshape,
    "aten.transpose.int": _reordered(_transposed),
    "aten.t.default": _reordered(lambda call: list(range(len(call.output)))[::-1]),
    "aten.numpy_T.default": _reordered(lambda call: list(range(len(call.output)))[::-1]),
    "aten.mT.default": _reordered(
        lambda call: [*range(len(call.output) - 2), len(call.output) - 1, len(call.output) - 2]
    ),
    "aten.permute.default": _reordered(lambda call: [d % len(call.output) for d in call.arguments["dims"]]),
    "aten.movedim.int": _reordered(_moved),
    "aten.movedim.intlist": _reordered(_moved),
    "aten.expand.default": expand,
    "aten.expand_as.default": expand_as,
    "aten.view_as_complex.default": line("* c! -> *"),
    "aten.view_as_real.default": line("* -> * c!"),
    "aten.contiguous.default": line("* -> *"),
    "aten.clone.default": line("* -> *"),
    "aten.alias.default": line("* -> *"),
    "aten.detach.default": line("* -> *"),
    "aten.slice.Tensor": along(),
    "aten.narrow.default": along(),
    "aten.select.int": select,
    "aten.slice_scatter.default": along(),
    "aten.select_scatter.default": select_scatter,
    "aten.split.Tensor": along(),
    "aten.split_with_sizes.default": along(),
    "aten.chunk.default": along(),
    "aten.cat.default": cat,
    "aten.stack.default": stack,
    "aten.unbind.int": select,
    "aten.roll.default": roll,
    "aten.flip.default": flip,
    "aten.pad.default": pad,
    "aten.constant_pad_nd.default": pad,
    "aten.unfold.default": unfolded,
    "aten.diagonal.default": diagonal,
    "aten.diagonal_copy.default": diagonal,
    "aten.diag_embed.default": on_a_diagonal,
    "aten.trace.default": line("m! n! -> "),
    "aten.cumsum.default": along(),
    "aten.cumprod.default": along(linear=False),
    "aten.cummax.default": along(linear=False),
    "aten.cummin.default": along(linear=False),
    "aten.logcumsumexp.default": along(linear=False),
    "aten.diff.default": along(default=-1),
    "aten.tril.default": line("* t! u! -> * t! u!"),
    "aten.triu.default": line("* t! u! -> * t! u!"),
}
