"""Contractions and reductions: matrix products and sums."""

from __future__ import annotations

from dataclasses import replace

from ndcompile.rules.notation import Call, Rule, RuleError, Signature, line
from ndcompile.size import ONE


def matmul(call: Call) -> Signature:
    """Any ranks, leading dims broadcast."""
    a, b = ("k" if len(shape) == 1 else None for shape in call.operands)
    left, right = a or "* m k", b or "* k n"
    out = " ".join(["*"] * (not (a and b)) + ["m"] * (not a) + ["n"] * (not b))
    return line(f"({left})({right}) -> {out}")(call)


def plus(product: str, output: str) -> Rule:
    """`addmm` and its kind: a bias of any rank, whose dims are the last ones of the output, and a product."""

    def rule(call: Call) -> Signature:
        bias = " ".join(output.split()[len(call.output) - len(call.operands[0]) :])
        return line(f"({bias}) + {product} -> {output}")(call)

    return rule


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


def solved(call: Call) -> Signature:
    """`solve(A, B)` for columns, or for one vector: linear in `B`, and each column is solved for itself."""
    matrix, right = call.operands
    one = len(right) == 1 or (len(right) + 1 == len(matrix) and right == matrix[:-1])
    bound = line("f(* m! n!, * m!) -> * m!" if one else "f(* m! n!, * m! k) -> * m! k")(call)
    return replace(bound, terms=((0, 1),), carriers=frozenset({1}))


MATRICES = line("f(* m! n!) -> * m! n!")
"""Of each of the matrices of a batch another one."""

DETERMINANTS = line("f(* m! n!) -> *")

RULES: dict[str, Rule] = {
    "aten.mm.default": line("(m k)(k n) -> m n"),
    "aten.bmm.default": line("(b m k)(b k n) -> b m n"),
    "aten.matmul.default": matmul,
    "aten.mv.default": line("(m k)(k) -> m"),
    "aten.dot.default": line("(k)(k) -> "),
    "aten.vdot.default": line("(k)(k) -> "),
    "aten.addmv.default": plus("(m k)(k)", "m"),
    "aten.addbmm.default": plus("(b m k)(b k n)", "m n"),
    "aten.einsum.default": einsum,
    "aten.addmm.default": plus("(m k)(k n)", "m n"),
    "aten.baddbmm.default": plus("(b m k)(b k n)", "b m n"),
    "aten.linear.default": line("(* k)(n k) -> * n", "(* k)(n k) + n -> * n"),
    "aten.sum.default": reduction(linear=True),
    "aten.sum.dim_IntList": reduction(linear=True),
    "aten.mean.default": reduction(linear=False),
    "aten.mean.dim": reduction(linear=False),
    "aten.amax.default": reduction(linear=False),
    "aten.amin.default": reduction(linear=False),
    "aten.max.default": reduction(linear=False),
    "aten.min.default": reduction(linear=False),
    "aten.argmax.default": reduction(linear=False),
    "aten.argmin.default": reduction(linear=False),
    "aten.median.default": reduction(linear=False),
    "aten.nansum.default": reduction(linear=False),
    "aten.aminmax.default": reduction(linear=False),
    "aten.var_mean.correction": reduction(linear=False),
    "aten.std_mean.correction": reduction(linear=False),
    "aten.var.correction": reduction(linear=False),
    "aten.var.dim": reduction(linear=False),
    "aten.std.correction": reduction(linear=False),
    "aten.std.dim": reduction(linear=False),
    "aten.prod.default": reduction(linear=False),
    "aten.prod.dim_int": reduction(linear=False),
    "aten.logsumexp.default": reduction(linear=False),
    "aten.linalg_vector_norm.default": reduction(linear=False),
    "aten.norm.Scalar": reduction(linear=False),
    "aten.norm.ScalarOpt_dim": reduction(linear=False),
    "aten.any.default": reduction(linear=False),
    "aten.any.dim": reduction(linear=False),
    "aten.any.dims": reduction(linear=False),
    "aten.all.dim": reduction(linear=False),
    "aten.all.dims": reduction(linear=False),
    "aten.all.default": reduction(linear=False),
    **dict.fromkeys(
        [
            f"aten.{name}.default"
            for name in ("linalg_inv", "inverse", "linalg_cholesky", "matrix_exp", "linalg_matrix_exp")
        ],
        MATRICES,
    ),
    **dict.fromkeys(
        [f"aten.{name}.default" for name in ("linalg_det", "det", "logdet", "linalg_slogdet", "slogdet")], DETERMINANTS
    ),
    "aten.linalg_eigvalsh.default": line("f(* m! n!) -> * n!"),
    "aten.linalg_svdvals.default": line("f(* m! n!) -> * k!"),
    "aten.linalg_solve.default": solved,
    "aten.linalg_solve_triangular.default": solved,
}
