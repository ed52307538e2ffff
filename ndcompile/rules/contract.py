"""Contractions and reductions: matrix products and sums."""

from __future__ import annotations

from ndcompile.rules.notation import Call, Rule, RuleError, Signature, line
from ndcompile.size import ONE


def matmul(call: Call) -> Signature:
    """Any ranks, leading dims broadcast."""
    a, b = ("k" if len(shape) == 1 else None for shape in call.operands)
    left, right = a or "* m k", b or "* k n"
    out = " ".join(["*"] * (not (a and b)) + ["m"] * (not a) + ["n"] * (not b))
    return line(f"({left})({right}) -> {out}")(call)


def addmm(call: Call) -> Signature:
    """`addmm`, `baddbmm`: the bias has any rank, and its dims are the last ones of the output."""
    batch = "b " * (len(call.output) - 2)
    bias = " ".join(f"{batch}m n".split()[len(call.output) - len(call.operands[0]) :])
    return line(f"({bias}) + ({batch}m k)({batch}k n) -> {batch}m n")(call)


def einsum(call: Call) -> Signature:
    """The equation is the rule: its letters are the factors, `...` is `*`."""
    equation = str(call.arguments["equation"]).replace(" ", "")
    given, arrow, output = equation.partition("->")
    if not arrow:
        letters = sorted(set(given) - set(",."))
        output = "..." * ("..." in given) + "".join(letter for letter in letters if given.count(letter) == 1)
    operands = given.split(",")
    if any(operand.count(letter) > 1 for operand in operands for letter in operand if letter != "."):
        raise RuleError(f"einsum '{equation}' takes a diagonal, which has no rule")
    listed = [" ".join(part.replace("...", "*")) for part in (*operands, output)]
    return line(f"({')('.join(listed[:-1])}) -> {listed[-1]}")(call)


def reduction(linear: bool) -> Rule:
    """Over `dim` (or all dims): a linear one makes a sharded dim partial, another needs it whole."""

    def rule(call: Call) -> Signature:
        shape = call.operands[0]
        given = call.arguments.get("dim")
        dims = range(len(shape)) if given is None or given == [] else [given] if isinstance(given, int) else given
        gone = {d % len(shape) for d in dims} if shape else set()
        names = [f"d{i}" for i in range(len(shape))]
        operand = tuple((name,) if size != ONE else () for name, size in zip(names, shape, strict=True))
        keep = call.arguments.get("keepdim", False)
        output = tuple(() if i in gone else operand[i] for i in range(len(shape)) if keep or i not in gone)
        whole = frozenset[str]() if linear else frozenset(names[i] for i in gone)
        terms, carriers = (((0,),), frozenset({0})) if linear else (None, frozenset[int]())
        return Signature((operand,), output, dict(zip(names, shape, strict=True)), terms, carriers, whole)

    return rule


RULES: dict[str, Rule] = {
    "aten.mm.default": line("(m k)(k n) -> m n"),
    "aten.bmm.default": line("(b m k)(b k n) -> b m n"),
    "aten.matmul.default": matmul,
    "aten.einsum.default": einsum,
    "aten.addmm.default": addmm,
    "aten.baddbmm.default": addmm,
    "aten.linear.default": line("(* k)(n k) -> * n", "(* k)(n k) + n -> * n"),
    "aten.sum.default": reduction(linear=True),
    "aten.sum.dim_IntList": reduction(linear=True),
    "aten.mean.default": reduction(linear=False),
    "aten.mean.dim": reduction(linear=False),
    "aten.amax.default": reduction(linear=False),
    "aten.amin.default": reduction(linear=False),
    "aten.max.default": reduction(linear=False),
    "aten.argmax.default": reduction(linear=False),
    "aten.var.correction": reduction(linear=False),
    "aten.var.dim": reduction(linear=False),
    "aten.std.correction": reduction(linear=False),
    "aten.std.dim": reduction(linear=False),
    "aten.prod.default": reduction(linear=False),
    "aten.prod.dim_int": reduction(linear=False),
    "aten.logsumexp.default": reduction(linear=False),
    "aten.linalg_vector_norm.default": reduction(linear=False),
    "aten.norm.ScalarOpt_dim": reduction(linear=False),
    "aten.any.default": reduction(linear=False),
    "aten.all.default": reduction(linear=False),
}
