"""How each op reads in Python. What is not listed is called by its full ATen name, which runs as well."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from ndcompile.codegen.sizes import WRITTEN_SHAPES, SizeNames, axis_name
from ndcompile.mesh import HEAD_TAIL, MeshAxis
from ndcompile.placement import BY_NAME
from ndcompile.rules.images import RESIZED
from ndcompile.rules.over_ranks import over_ranks
from ndcompile.rules.registry import arguments, op_name

INFIX = {
    "aten.add.Tensor": "+", "aten.sub.Tensor": "-", "aten.mul.Tensor": "*", "aten.div.Tensor": "/",
    "aten.add.Scalar": "+", "aten.sub.Scalar": "-", "aten.mul.Scalar": "*", "aten.div.Scalar": "/",
    "aten.eq.Tensor": "==", "aten.ne.Tensor": "!=", "aten.lt.Tensor": "<", "aten.le.Tensor": "<=",
    "aten.gt.Tensor": ">", "aten.ge.Tensor": ">=", "aten.eq.Scalar": "==", "aten.ne.Scalar": "!=",
    "aten.lt.Scalar": "<", "aten.le.Scalar": "<=", "aten.gt.Scalar": ">", "aten.ge.Scalar": ">=",
    "aten.__and__.Tensor": "&", "aten.bitwise_and.Tensor": "&", "aten.__or__.Tensor": "|",
    "aten.bitwise_or.Tensor": "|", "aten.pow.Tensor_Scalar": "**", "aten.mm.default": "@", "aten.matmul.default": "@",
}  # fmt: skip
FUNCTIONAL = frozenset(
    "linear gelu silu relu layer_norm rms_norm softplus leaky_relu elu hardtanh mish hardswish "
    "scaled_dot_product_attention conv1d conv2d conv3d max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d "
    "avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d conv_transpose1d conv_transpose2d "
    "conv_transpose3d celu selu relu6 hardsigmoid hardshrink softshrink threshold one_hot".split()
)
TORCH = frozenset(
    "rsqrt sqrt exp log sin cos tanh sigmoid abs erf where cumsum diff tril triu maximum minimum logical_and "
    "logical_or logical_not bmm addmm baddbmm reciprocal log1p expm1 floor clamp isnan isinf "
    "slice_scatter select_scatter lerp min max acos acosh asin asinh atan atan2 atanh addbmm addcdiv "
    "addcmul addmv aminmax angle bucketize cdist ceil clamp_max clamp_min complex copysign cosh cummax cummin cumprod "
    "diag_embed diagonal digamma dot erfc erfinv exp2 fmod frac grid_sampler hypot i0 kthvalue lgamma linspace log2 "
    "logaddexp logaddexp2 logcumsumexp logit logspace logsumexp median movedim mv nan_to_num nansum polar prod "
    "remainder roll round searchsorted sign sinc sinh square stack std_mean tan trace trunc unbind var_mean vdot "
    "view_as_complex view_as_real xlogy bitwise_not logical_xor".split()
)
METHODS = frozenset(
    "transpose permute unsqueeze squeeze t detach masked_fill amax amin argmax any all var std select topk argsort "
    "scatter_add index_add index_select repeat_interleave chunk unfold gather scatter scatter_reduce index_copy "
    "index_fill index_reduce sort contiguous log_softmax norm".split()
)
MODULES = {"fft_": "torch.fft", "linalg_": "torch.linalg"}
"""Where functions are found whose ops have such a name."""


class Writer:
    """Writes nodes as expressions; `names` gives each value its variable."""

    def __init__(self, names: dict[fx.Node, str], sizes: SizeNames, device: str) -> None:
        self.names, self.sizes, self.device = names, sizes, device
        self.axes: set[tuple[str, ...]] = set()

    def expression(self, node: fx.Node) -> str:
        name = op_name(node.target)
        if name in SPECIAL:
            return SPECIAL[name](self, node)
        if "move" in node.meta:
            return self.conversion(node)
        base = name.split(".")[1] if name.startswith("aten.") else name
        if name in INFIX and not node.kwargs:
            left, right = (self.text(a) for a in node.args)
            return f"{left} {INFIX[name]} {right}"
        if base in FUNCTIONAL:
            return f"F.{base}({self.listed(node)})"
        if base in TORCH:
            return f"torch.{base}({self.listed(node)})"
        if base in METHODS:
            return f"{self.text(node.args[0])}.{base}({self.listed(node, skip=1)})"
        for prefix, module in MODULES.items():
            if base.startswith(prefix):
                return f"{module}.{base.removeprefix(prefix)}({self.listed(node)})"
        if name.startswith("runtime."):
            return f"{name.split('.')[1]}({self.listed(node)})"
        is_op = isinstance(node.target, torch._ops.OpOverload)  # of torch, or a user's own
        return f"{'torch.ops.' if is_op else ''}{name}({self.listed(node)})"

    def listed(self, node: fx.Node, skip: int = 0) -> str:
        """The arguments as written, keywords by name."""
        positional = [self.text(a) for a in node.args[skip:]]
        return ", ".join(positional + [f"{k}={self.text(v)}" for k, v in node.kwargs.items()])

    def text(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            if value.target is getattr:
                return self.device
            if "of" in value.meta:
                of, dims = value.meta["of"]
                less = f" - {value.meta['less']}" if value.meta.get("less") else ""
                sizes = (self.sizes.whole(of, dim) or str(of.meta["sizes"][dim]) for dim in dims)
                return f"({' * '.join(map(_factor, sizes))}{less})"
            if "size" in value.meta:
                text = self.sizes.expression(value.meta["size"])
                return text if text.isidentifier() else f"({text})"
            return self.names[value]
        if isinstance(value, (list, tuple)):
            inner = ", ".join(self.text(v) for v in value)
            return f"({inner},)" if len(value) == 1 else f"({inner})"
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        return repr(value)

    def axis(self, names: str | tuple[str, ...]) -> str:
        """The variable of an axis, or of several as one."""
        listed = (names,) if isinstance(names, str) else tuple(names)
        self.axes.add(listed)
        return axis_name(listed)

    def conversion(self, node: fx.Node) -> str:
        value, axis = node.args
        assert isinstance(axis, MeshAxis), "a conversion's second argument is its axes"
        extra = [f"{k}={self._kwarg(node, k, v)}" for k, v in node.kwargs.items()]
        return f"{op_name(node.target).split('.')[1]}({', '.join([self.text(value), self.axis(axis.names), *extra])})"

    def _kwarg(self, node: fx.Node, key: str, value: Any) -> str:
        return self.sizes.whole(node, arguments(node)["dim"]) if key == "size" else repr(value)

    def local_shape(self, node: fx.Node) -> list[str]:
        return [self.sizes.local(node, dim) for dim in range(len(node.meta["shape"]))]


def _factor(size: str) -> str:
    """A size as one factor of a product."""
    return f"({size})" if " + " in size or " - " in size else size


def _reshape(w: Writer, node: fx.Node) -> str:
    return f"{w.text(node.args[0])}.reshape({', '.join(w.local_shape(node)) or '()'})"


def _flatten(w: Writer, node: fx.Node) -> str:
    return f"{w.text(node.args[0])}.flatten({w.listed(node, skip=1)})"


def _unflatten(w: Writer, node: fx.Node) -> str:
    given = arguments(node)
    at, count = given["dim"] % len(given["self"].meta["shape"]), len(given["sizes"])
    shape = w.local_shape(node)[at : at + count]
    return f"{w.text(node.args[0])}.unflatten({given['dim']}, ({', '.join(shape)}))"


def _expand(w: Writer, node: fx.Node) -> str:
    return f"{w.text(node.args[0])}.expand({', '.join(w.local_shape(node))})"


def _filled(name: str) -> Callable[[Writer, fx.Node], str]:
    def write(w: Writer, node: fx.Node) -> str:
        fill = f", {w.text(arguments(node)['fill_value'])}" if name == "full" else ""
        return f"torch.{name}({_listed_shape(w, node)}{fill}, dtype={node.meta['dtype']}, device={w.device})"

    return write


def _listed_shape(w: Writer, node: fx.Node) -> str:
    """This rank's sizes, as a tuple."""
    shape = w.local_shape(node)
    return f"({', '.join(shape)}{',' if len(shape) == 1 else ''})"


def _eye(w: Writer, node: fx.Node) -> str:
    rows, columns = w.local_shape(node)
    shape = rows if rows == columns else f"{rows}, {columns}"
    return f"torch.eye({shape}, dtype={node.meta['dtype']}, device={w.device})"


def _arange(w: Writer, node: fx.Node) -> str:
    given = arguments(node)
    start, end, step = given.get("start", 0), given["end"], given.get("step", 1)
    ends = [w.text(v) if isinstance(v, fx.Node) else _count(w, node, v, start) for v in (start, end)]
    axes = node.meta["layout"].dims[0]
    if axes:
        return f"arange({ends[0]}, {ends[1]}, {step}, {w.axis(axes)}, device={w.device}, dtype={node.meta['dtype']})"
    whole = not isinstance(step, float)  # a float would make the numbers floats
    listed = ends[start == 0 :] if whole and step == 1 else [*ends, repr(step)]
    dtype = "" if whole and node.meta["dtype"] == torch.int64 else f", dtype={node.meta['dtype']}"
    return f"torch.arange({', '.join(listed)}{dtype}, device={w.device})"


def _count(w: Writer, node: fx.Node, value: Any, start: Any) -> str:
    return w.sizes.whole(node, 0) if value == node.meta["sizes"][0] and start == 0 and value != 1 else repr(value)


def _slice(w: Writer, node: fx.Node) -> str:
    given = arguments(node)
    source = given["self"]
    dim = given["dim"] % len(node.meta["shape"])
    ends = _ends(w, given, dim)
    step = f":{given['step']}" if given["step"] != 1 else ""
    return f"{w.text(source)}[{':, ' * dim}{ends[0]}:{ends[1]}{step}]"


def _ends(w: Writer, given: Mapping[str, Any], dim: int) -> list[str]:
    """The places in a dim of `self` between which a slice lies; empty where it begins or ends with the dim."""
    return [
        "" if value in (None, 0) or (isinstance(value, int) and value >= 1 << 62)
        else w.sizes.fraction(given["self"], dim, value) if isinstance(value, int) else w.text(value)
        for value in (given["start"], given["end"])
    ]  # fmt: skip


def _slice_scatter(w: Writer, node: fx.Node) -> str:
    given = arguments(node)
    dim = given["dim"] % len(node.meta["shape"])
    start, end = _ends(w, given, dim)
    listed = [w.text(given["self"]), w.text(given["src"]), str(dim), start or "0", end or "None"]
    listed += [str(given["step"])] if given["step"] != 1 else []
    return f"torch.slice_scatter({', '.join(listed)})"


def _index(w: Writer, node: fx.Node) -> str:
    given = arguments(node)
    listed = [w.text(i) if i is not None else ":" for i in given["indices"]]
    return f"{w.text(given['self'])}[{', '.join(listed)}]"


def _split(w: Writer, node: fx.Node) -> str:
    given = arguments(node)
    size: Any = given.get("split_size", given.get("split_sizes"))
    dim, source = given["dim"] % len(given["self"].meta["shape"]), given["self"]
    text = (
        w.sizes.fraction(source, dim, size)
        if isinstance(size, int)
        else f"({', '.join(w.sizes.fraction(source, dim, n) if isinstance(n, int) else w.text(n) for n in size)})"
    )
    return f"{w.text(source)}.split({text}, {dim})"


def _embedding(w: Writer, node: fx.Node) -> str:
    given = arguments(node)
    listed = [w.text(given["indices"]), w.text(given["weight"])]
    if given["padding_idx"] not in (-1, None):
        listed.append(f"padding_idx={w.sizes.place(given['weight'], 0, given['padding_idx'], 'pad')}")
    listed += _algorithm(w, node, given["weight"], 0)
    return f"embedding({', '.join(listed)})"


def _cross_entropy(w: Writer, node: fx.Node) -> str:
    given = arguments(node)
    listed = [w.text(given["logits"]), w.text(given["target"]), *_algorithm(w, node, given["logits"], 1)]
    listed += [f"ignore_index={given['ignore_index']}"] if given["ignore_index"] != -100 else []
    listed += [f"label_smoothing={given['label_smoothing']}"] if given["label_smoothing"] else []
    return f"cross_entropy({', '.join(listed)})"


def _algorithm(w: Writer, node: fx.Node, table: fx.Node, dim: int) -> list[str]:
    """The axis that a masked lookup or a special algorithm works over, and the whole size of what it shards."""
    axes = [axis for axis, _ in node.meta.get("algorithm_axes", [])]
    if not axes:
        return []
    return [f"axis={w.axis(tuple(axes))}", f"size={w.sizes.whole(table, dim)}"]


def _along_sequence(w: Writer, node: fx.Node) -> str:
    """What communicates where an axis shards the sequence that it looks along."""
    axes = [f"axis={w.axis(axis)}" for axis, _ in node.meta.get("algorithm_axes", [])]
    return f"{op_name(node.target).split('.')[1]}({', '.join([w.listed(node), *axes])})"


def _shards(w: Writer, node: fx.Node) -> str:
    return _mapped(w, {d: axes for d, axes in enumerate(node.meta["layout"].dims) if axes})


def _mapped(w: Writer, dims: dict[int, tuple[str, ...]]) -> str:
    return "{" + ", ".join(f"{d}: {_ranks(w, axes)}" for d, axes in dims.items()) + "}"


def _ranks(w: Writer, axes: tuple[str, ...]) -> str:
    """The axes as one; where the first holds two chunks, each by itself, major first."""
    alone = len(axes) > 1 and w.sizes.mesh[axes[0]].kind in HEAD_TAIL
    return f"({', '.join(w.axis(axis) for axis in axes)})" if alone else w.axis(axes)


def _uneven(w: Writer, node: fx.Node) -> str:
    shape, ranks = node.meta["shape"], w.sizes.mesh.size
    odd = [d for d, axes in enumerate(node.meta["layout"].dims) if axes and not shape[d].divides_by(ranks(*axes))]
    return f", sizes={{{', '.join(f'{d}: {w.sizes.whole(node, d)}' for d in odd)}}}" if odd else ""


def _dropout(w: Writer, node: fx.Node) -> str:
    x, p, key, site = node.args
    return f"dropout({w.text(x)}, {p}, {w.text(key)}, {site}, {_place(w, node)})"


def _uniform(w: Writer, node: fx.Node) -> str:
    _, key, site, dtype = node.args
    return f"uniform({_listed_shape(w, node)}, {w.text(key)}, {site}, {dtype}, {_place(w, node)})"


def _place(w: Writer, node: fx.Node) -> str:
    """Where in the whole value a rank's part of it lies."""
    return f"shards={_shards(w, node)}{_uneven(w, node)}{_balanced(w, node)}"


def _balanced(w: Writer, node: fx.Node) -> str:
    """The dims that lie head–tail on their first axis."""
    dims = node.meta["layout"].dims
    found = [d for d, axes in enumerate(dims) if axes and w.sizes.mesh[axes[0]].kind in HEAD_TAIL]
    return f", balanced={tuple(found)}" if found else ""


def _attention(w: Writer, node: fx.Node) -> str:
    return _over_ranks(w, node) if "how" in node.meta else f"attention({w.listed(node)})"


def _scaled_dot_product_attention(w: Writer, node: fx.Node) -> str:
    return _over_ranks(w, node) if "how" in node.meta else f"F.scaled_dot_product_attention({w.listed(node)})"


def _over_ranks(w: Writer, node: fx.Node, *more: str) -> str:
    """Attention of a sequence that an axis shards."""
    listed = [*(w.text(x) for x in node.args[:3]), w.axis(node.meta["algorithm_axes"][0][0])]
    listed += [f"{name}={w.text(value)}".replace("'", '"') for name, value in over_ranks(node).items()]
    return f"context_attention({', '.join([*listed, *more])})"


def _attention_with_dropout(w: Writer, node: fx.Node) -> str:
    if "how" in node.meta:
        batch_and_heads = {d: axes for d, axes in enumerate(node.meta["layout"].dims[:2]) if axes}
        return _over_ranks(w, node, f"shards={_mapped(w, batch_and_heads)}")
    return f"attention_with_dropout({w.listed(node)}, {_place(w, node)})"


def _layer_norm(w: Writer, node: fx.Node) -> str:
    given = arguments(node)
    count = len(given["normalized_shape"])
    rank = len(node.meta["shape"])
    shape = "".join(f"{w.sizes.whole(node, d)}, " for d in range(rank - count, rank))
    rest = [w.text(given[k]) for k in ("weight", "bias") if k in given]
    base = op_name(node.target).split(".")[1]
    shape = shape.rstrip() if count == 1 else shape[:-2]
    return f"F.{base}({w.text(node.args[0])}, ({shape}), {', '.join(rest)}, eps={given['eps']})"


def _batch_norm(w: Writer, node: fx.Node) -> str:
    given = arguments(node)
    listed = [w.text(given[k]) for k in ("centred", "variance", "weight", "bias")]
    return f"batch_norm({', '.join(listed)}, eps={given['eps']})"


def _kept_batch_norm(w: Writer, node: fx.Node) -> str:
    given = arguments(node)
    listed = [w.text(given[k]) for k in ("input", "running_mean", "running_var", "weight", "bias")]
    return f"F.batch_norm({', '.join(listed)}, eps={given['eps']})"


def _group_norm(w: Writer, node: fx.Node) -> str:
    given = arguments(node)
    listed = [w.text(given[k]) for k in ("input", "num_groups", "weight", "bias")]
    return f"F.group_norm({', '.join(listed)}, eps={given['eps']})"


def _index_put(w: Writer, node: fx.Node) -> str:
    """torch's function takes no place that is left out."""
    left_out = None in arguments(node)["indices"]
    return f"{'torch.ops.aten.index_put.default' if left_out else 'torch.index_put'}({w.listed(node)})"


def _resized(w: Writer, node: fx.Node) -> str:
    """`upsample_bilinear2d`, `_upsample_nearest_exact1d`, `_upsample_bicubic2d_aa` …"""
    given, name = arguments(node), op_name(node.target).split(".")[1]
    mode = name.removeprefix("_").removeprefix("upsample_").removesuffix("_aa")[:-2].replace("_", "-")
    names = dict(output_size="size", scale_factors="scale_factor", align_corners="align_corners")
    listed = [f"{to}={w.text(given[of])}" for of, to in names.items() if given.get(of) is not None]
    listed += [f'mode="{mode}"'] + ["antialias=True"] * name.endswith("_aa")
    return f"F.interpolate({w.text(node.args[0])}, {', '.join(listed)})"


def _reduction(name: str) -> Callable[[Writer, fx.Node], str]:
    def write(w: Writer, node: fx.Node) -> str:
        given = arguments(node)
        dims = given.get("dim")
        listed = [] if not dims else [repr(tuple(dims)) if len(dims) > 1 else repr(dims[0])]
        listed += ["keepdim=True"] if given.get("keepdim") else []
        listed += [f"dtype={given['dtype']}"] if given.get("dtype") else []
        return f"{w.text(node.args[0])}.{name}({', '.join(listed)})"

    return write


def _scale_gradient(w: Writer, node: fx.Node) -> str:
    return f"scale_gradient({w.text(node.args[0])}, 1 / {w.axis(node.meta['data_axes'])}.size)"


RESHAPES = (*WRITTEN_SHAPES, "aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims")
"""Written with all sizes: a squeeze would also drop a dim that is of size 1 on this rank only."""

SPECIAL: dict[str, Callable[[Writer, fx.Node], str]] = {
    **dict.fromkeys(RESHAPES, _reshape),
    "aten.flatten.using_ints": _flatten,
    "aten.unflatten.int": _unflatten,
    "aten.expand.default": _expand,
    "aten.ones.default": _filled("ones"),
    "aten.zeros.default": _filled("zeros"),
    "aten.full.default": _filled("full"),
    **dict.fromkeys(("aten.arange.default", "aten.arange.start", "aten.arange.start_step"), _arange),
    **dict.fromkeys(("aten.eye.default", "aten.eye.m"), _eye),
    "aten.slice.Tensor": _slice,
    "aten.slice_scatter.default": _slice_scatter,
    "aten.index.Tensor": _index,
    **dict.fromkeys(("aten.split.Tensor", "aten.split_with_sizes.default"), _split),
    "aten.embedding.default": _embedding,
    "runtime.cross_entropy": _cross_entropy,
    "runtime.dropout": _dropout,
    "runtime.uniform": _uniform,
    "runtime.attention": _attention,
    "aten.scaled_dot_product_attention.default": _scaled_dot_product_attention,
    "runtime.attention_with_dropout": _attention_with_dropout,
    **dict.fromkeys(("runtime.convolve", "runtime.running_sum"), _along_sequence),
    "runtime.batch_norm": _batch_norm,
    "aten.batch_norm.default": _kept_batch_norm,
    "aten.group_norm.default": _group_norm,
    "aten.layer_norm.default": _layer_norm,
    "aten.rms_norm.default": _layer_norm,
    "aten.sum.default": _reduction("sum"),
    "aten.sum.dim_IntList": _reduction("sum"),
    "aten.mean.dim": _reduction("mean"),
    "aten.mean.default": _reduction("mean"),
    "aten.neg.default": lambda w, n: f"-{w.text(n.args[0])}",
    "aten.to.dtype": lambda w, n: f"{w.text(n.args[0])}.to({n.args[1]})",
    "aten.cat.default": lambda w, n: f"torch.cat({w.listed(n)})",
    "aten.pad.default": lambda w, n: f"F.pad({w.listed(n)})",
    "aten.softmax.int": lambda w, n: f"{w.text(n.args[0])}.softmax({w.listed(n, skip=1)})",
    "aten.index_put.default": _index_put,
    **{f"aten.{name}.vec": _resized for name in RESIZED},
    "aten.im2col.default": lambda w, n: f"F.unfold({w.listed(n)})",
    "aten.col2im.default": lambda w, n: f"F.fold({w.listed(n)})",
    "_operator.getitem": lambda w, n: f"{w.text(n.args[0])}[{n.args[1]}]",
    "runtime.scale_gradient": _scale_gradient,
}

KEEPS_NAME = frozenset(BY_NAME) | frozenset(
    "view reshape flatten unflatten transpose permute unsqueeze squeeze expand to dropout add scale_gradient".split()
)
"""Ops whose result takes over its first operand's variable where that is not used again."""
