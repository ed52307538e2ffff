"""Products, elementwise ops, reductions, sizes as numbers, casts."""

from __future__ import annotations

from tests.programs.builder import Builder, Dim, Rejected, Value
from tests.programs.kinds import kind

UNARY = (
    "torch.relu({})", "F.gelu({})", "F.silu({})", "torch.tanh({})", "torch.sigmoid({})", "{}.tanh().exp()",
    "({}.abs() + 0.5).sqrt()", "{}.square()", "-{}", "{}.abs()", "{} * 0.5", "{} + 1", "1 - {}", "2 / (1 + {}.pow(2))",
    "torch.sin({})", "F.softplus({})", "{}.clamp(-1, 1)", "{}.clamp(min=0.1)", "F.gelu({}, approximate='tanh')",
    "(1 + {}.abs()).log()", "(1 + {}.square()).rsqrt()", "F.leaky_relu({})", "F.elu({})", "{} / 3", "{}.pow(2)",
    "torch.erf({})", "F.logsigmoid({})", "({}.abs() + 0.5).reciprocal()", "{}.detach()", "torch.atan({})",
    "torch.exp(-{}.square())", "torch.cos({})", "F.hardtanh({})", "{} * {}", "{} + {}.tanh()", "torch.expm1({}.tanh())",
)  # fmt: skip

BINARY = (
    "{} + {}", "{} - {}", "{} * {}", "{} / (1 + {}.square())", "torch.maximum({}, {})",
    "torch.where({0} > {1}, {0}, {1})", "torch.minimum({}, {})", "{} * torch.sigmoid({})",
    "torch.where({1} > 0, {0}, 0.0)", "{} + 0.5 * {}",
    "{0}.masked_fill({1} > 0.5, 0.0)", "torch.lerp({}, {}, 0.3)", "torch.add({}, {}, alpha=2)", "{}.mul({})",
)  # fmt: skip

SIZED = (
    "{0} * {0}.shape[{1}] ** -0.5", "{0} / {0}.size({1})", "{0} * math.sqrt({0}.shape[{1}])",
    "{0} + 1 / {0}.shape[{1}]", "{0}.sum({1}, keepdim=True) / {0}.shape[{1}]",
)  # fmt: skip

EQUATIONS = (
    ("...i,ij->...j", 1), ("bi,ij->bj", 2), ("bsi,ij->bsj", 3), ("bsi,hij->bshj", 3), ("bsi,hij->bhsj", 3),
    ("bi,jki->bjk", 2), ("bshi,hij->bshj", 4), ("bshi,hij->bsj", 4), ("bsi,i->bs", 3), ("bi,i->b", 2),
)  # fmt: skip


@kind(9)
def linear(g: Builder) -> None:
    x = g.value(lambda v: v.last is not None and v.last > 1)
    bias = ", bias=False" if g.chance(30) else ""
    frozen = ["self.{}.requires_grad_(False)"] if g.chance(5) else []
    g.let(f"{g.member(f'nn.Linear({x.last}, {g.width()}{bias})', *frozen)}({x})")


@kind(2)
def linear_again(g: Builder) -> None:
    """A layer that was used before, as it is or with its weight alone."""
    import torch.nn as nn

    name, layer = g.pick([(n, m) for n, m in g.modules(nn.Linear) if isinstance(m, nn.Linear)])
    if g.chance(40) and layer.out_features > 1:
        x = g.value(lambda v: v.last == layer.out_features)
        g.let(f"{x} @ {name}.weight" if g.chance(50) else f"F.linear({x}, {name}.weight.t())")
        return
    x = g.value(lambda v: v.last == layer.in_features)
    g.let(f"{name}({x})")


@kind(1)
def tied(g: Builder) -> None:
    import torch.nn as nn

    name, layer = g.pick([(n, m) for n, m in g.modules(nn.Linear) if isinstance(m, nn.Linear)])
    x = g.value(lambda v: v.last == layer.in_features)
    made = g.member(f"nn.Linear({layer.in_features}, {layer.out_features})", f"self.{{}}.weight = {name}.weight")
    g.let(f"{made}({x})")


@kind(3)
def by_parameter(g: Builder) -> None:
    x = g.value(lambda v: v.last is not None and v.last > 1)
    w = g.member(f"nn.Parameter(torch.randn({x.last}, {g.width()}) / 3)", prefix="p")
    g.let(f"{x} @ {w}" if g.chance(70) else f"torch.matmul({x}, {w})")


@kind(3)
def einsum(g: Builder) -> None:
    equation, rank = g.pick(EQUATIONS)
    x = g.value(lambda v: v.last is not None and v.last > 1 and (v.rank == rank or equation[0] == "."))
    left, right = equation.split("->")[0].split(",")
    known = {} if left[0] == "." else dict(zip(left, x.dims, strict=True))
    known[left[-1]] = x.dims[-1]
    sizes = [known[c].number if c in known else g.pick((2, 3, 4, 6)) for c in right]
    if None in sizes:
        raise Rejected
    w = g.member(f"nn.Parameter(torch.randn({', '.join(map(str, sizes))}) / 3)", prefix="p")
    g.let(f'torch.einsum("{equation}", {x}, {w})')


@kind(3)
def product(g: Builder) -> None:
    """Two values, or one with itself."""
    a = g.value(lambda v: v.rank >= 2)
    b = g.value(lambda v: v.rank == a.rank and v.dims[:-2] == a.dims[:-2] and v.dims[-1] == a.dims[-1])
    scale = f" / {a.last} ** 0.5" if a.last else f" / {a}.shape[-1]"
    if g.chance(60):
        g.let(f"{a} @ {b}.transpose(-1, -2){scale}")
    elif a.rank == 3:
        texts = [f"torch.bmm({a}, {b}.transpose(1, 2)){scale}", f'torch.einsum("bid,bjd->bij", {a}, {b}){scale}']
        texts += [f'torch.einsum("bid,bjd->bij", {a}, {b}).softmax(-1)']
        g.let(g.pick(texts))
    else:
        g.let(f"{a}.transpose(-1, -2) @ {b} / {a}.shape[-2]")


@kind(2)
def weighted(g: Builder) -> None:
    """Rows added with the weights of another value."""
    a = g.value(lambda v: v.rank >= 2)
    b = g.value(lambda v: v.rank == a.rank and v.dims[:-2] == a.dims[:-2] and v.dims[-2] == a.dims[-1])
    g.let(f"{a} @ {b}" if g.chance(50) else f"{a}.softmax(-1) @ {b}")


@kind(9)
def unary(g: Builder) -> None:
    text = g.pick(UNARY)
    x = str(g.value())
    g.let(text.format(x, x))


@kind(9)
def binary(g: Builder) -> None:
    """Two values of which one broadcasts to the other."""
    a = g.value(lambda v: v.rank > 0)
    b = g.value(lambda v: v.name != a.name and _broadcasts(v, a))
    first, second = (a, b) if g.chance(70) else (b, a)
    g.let(g.pick(BINARY).format(first, second))


def _broadcasts(small: Value, large: Value) -> bool:
    if small.rank > large.rank:
        return False
    pairs = zip(small.dims[::-1], large.dims[::-1], strict=False)
    return all(a == b or a.number == 1 for a, b in pairs)


@kind(6)
def residual(g: Builder) -> None:
    a = g.value(lambda v: v.rank > 1)
    b = g.value(lambda v: v.name != a.name and v.dims == a.dims)
    g.let(f"{a} + {b}")


@kind(4)
def by_vector(g: Builder) -> None:
    """A scale or shift, a parameter or a buffer, by the last dims, or by one number."""
    x = g.value(lambda v: v.rank > 1)
    count = g.pick((0, 1, 1, 1, 2))
    shape = [d.number for d in x.dims[x.rank - count :]]
    if None in shape:
        raise Rejected
    size = ", ".join(map(str, shape))
    made = "torch.ones(())" if not shape else f"torch.randn({size})"
    if g.chance(25) and shape:
        held = g.buffer(made)
    else:
        frozen = ", requires_grad=False" if g.chance(8) else ""
        held = g.member(f"nn.Parameter({made}{frozen})", prefix="p")
    g.let(g.pick(("{} * {}", "{} + {}", "{} - {}", "{} * torch.sigmoid({})", "{} * (1 + {})")).format(x, held))


@kind(5)
def reduction(g: Builder) -> None:
    x = g.value(lambda v: v.rank > 0)
    name = g.pick(
        ("sum", "sum", "mean", "mean", "amax", "amin", "logsumexp", "norm", "var", "std", "max", "min", "prod")
    )
    keep = ", keepdim=True" if g.chance(40) else ""
    dims = [g.dim(x, lambda d: d.number != 1)]
    if x.rank > 1 and g.chance(30) and name in ("sum", "mean", "amax", "amin", "logsumexp", "norm"):
        dims.append(g.dim(x))
    if len({d % x.rank for d in dims}) < len(dims):
        raise Rejected
    where = str(tuple(dims)) if len(dims) > 1 else str(dims[0])
    if name in ("max", "min"):
        g.let(f"{x}.{name}({where}{keep}).values")
    elif name == "norm":
        g.let(f"({x} + 0.1).norm(dim={where}{keep})")
    else:
        g.let(f"{x}.{name}(dim={where}{keep})")


@kind(2)
def whole_reduction(g: Builder) -> None:
    x = g.value(lambda v: v.rank > 0)
    g.let(g.pick(("{}.mean()", "{}.sum()", "{}.square().mean()", "{}.abs().sum()", "{}.amax()", "{}.norm()")).format(x))


@kind(3)
def along(g: Builder) -> None:
    x = g.value(lambda v: v.rank > 0)
    texts = ("{}.softmax({})", "{}.log_softmax({})", "{}.cumsum({})", "{}.sort({}).values", "F.normalize({}, dim={})")
    g.let(g.pick((*texts[:2], *texts)).format(x, g.dim(x, lambda d: d.number != 1)))


@kind(2)
def centred(g: Builder) -> None:
    """Less its own mean, or over its own sum."""
    x = g.value(lambda v: v.rank > 0)
    dim = g.dim(x, lambda d: d.number != 1)
    texts = ("{0} - {0}.mean({1}, keepdim=True)", "{0} / (1 + {0}.abs().sum({1}, keepdim=True))")
    g.let(g.pick((*texts, "{0} - {0}.amax({1}, keepdim=True).detach()")).format(x, dim))


@kind(2)
def by_size(g: Builder) -> None:
    """A size as a number."""
    x = g.value(lambda v: v.rank > 0)
    dim = g.dim(x)
    text = g.pick(SIZED)
    g.let(text.format(x, dim))


@kind(2)
def cast(g: Builder) -> None:
    x = g.value()
    kind = g.pick(("bfloat16", "float16", "float64", "float32"))
    texts = [
        f"{x}.to(torch.{kind}).to({x}.dtype)",
        f"{x}.to(torch.{kind}).tanh().type_as({x})",
        f"{x}.to(torch.{kind}).float()",
    ]
    g.let(g.pick(texts))


@kind(1)
def frozen(g: Builder) -> None:
    """A value under no_grad."""
    x = g.value(lambda v: v.rank > 0)
    name = f"v{g.count}"
    text = g.pick(("{0}.mean({1}, keepdim=True)", "{0}.tanh()", "{0}.softmax({1})")).format(x, g.dim(x))
    g.write(f"with torch.no_grad():\n    {name} = {text}", name)


@kind(2)
def mask(g: Builder) -> None:
    """Elements chosen by a comparison, or by their place."""
    x = g.value(lambda v: v.rank >= 2)
    at = g.pick(("tril", "triu", "where", "arange"))
    if at in ("tril", "triu"):
        g.let(f"{x}.{at}({g.pick((-1, 0, 1))})")
    elif at == "where":
        g.let(f"torch.where({x} > 0, {x}, {x} * 0.5)")
    else:
        dim = g.pick(range(x.rank))
        shape = ", ".join(["-1", *["1"] * (x.rank - 1 - dim)])
        g.let(f"{x}.masked_fill((torch.arange({x}.shape[{dim}]) < 2).view({shape}), 0.0)")


@kind(1)
def by_bool(g: Builder) -> None:
    """A mask that is an input."""
    given = g.value(lambda v: str(v.dtype) == "torch.bool", floating=False)
    x = g.value(lambda v: v.rank >= given.rank and v.dims[: given.rank] == given.dims)
    at = f"{given}{'[..., None]' * 1 if x.rank == given.rank + 1 else ''}"
    if x.rank > given.rank + 1:
        at = f"{given}[:, :, {', '.join(['None'] * (x.rank - given.rank))}]"
    texts = (
        "{0} * {1}",
        "{0}.masked_fill(~{1}, 0.0)",
        "torch.where({1}, {0}, 0.5)",
        "({0} * {1}).sum(1) / {1}.sum(1).clamp(min=1)",
    )
    g.let(g.pick(texts).format(x, at))


def same(a: Dim, b: Dim) -> bool:
    return a == b
