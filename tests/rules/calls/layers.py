"""Layers: calls of each rule's op, drawn; indices from both ends and out of range, ids that are left out."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from tests.rules.case import Case, Number, Spec, bools, case, complexes, f, ints, positive, value
from tests.rules.draw import (
    Calls,
    Draw,
    among,
    calls,
    chance,
    indices,
    maybe_out_of_range,
    number,
    numbers,
    sizes,
    smaller,
)

BOOL = st.booleans()


def key() -> Spec:
    return Spec((), lambda shape: torch.tensor(1234567), False)


def normalised(draw: Draw, op: str) -> Case:
    """Of one number alone the gradient is 0 by mathematics, and rounding is all of it: two at least."""
    lead, inner = sizes(draw, 0, 2), numbers(draw, 1, 2, low=1)
    inner[-1] = max(inner[-1], 2)
    most = 2 if op == "aten.layer_norm.default" else 1
    return case(op, f(*lead, *inner), inner, *(f(*inner) for _ in range(draw(st.integers(0, most)))))


def along_a_dim(draw: Draw, op: str, *after: bool) -> Case:
    x = f(*sizes(draw, 1, 3, low=1))
    return case(op, x, among(draw, len(x.sizes)), *after)


def embedding(draw: Draw, op: str) -> Case:
    rows, width = number(draw, 1), number(draw, 1)
    padding = [among(draw, rows)] if draw(BOOL) else []
    made = case(op, f(rows, width), ints(*sizes(draw, 0, 2), high=rows), *padding)
    return maybe_out_of_range(draw, made, 1, 0, rows)


def indexed(draw: Draw, op: str) -> Case:
    """Integer indices that broadcast, at some dims of a tensor: at neighbours, or not."""
    shape, dims = sizes(draw, 1, 4, high=6), sizes(draw, 0, 2, high=6)
    given: list[Any] = [None] * len(shape)
    for d in draw(st.sets(st.integers(0, len(shape) - 1), min_size=1, max_size=2)):
        shape[d] = max(value(shape[d]), 1)
        given[d] = indices(draw, smaller(draw, dims), value(shape[d]), negative=True)
    while given[-1] is None and draw(BOOL):
        given.pop()
    high = max(value(shape[d]) for d, index in enumerate(given) if index is not None)
    return maybe_out_of_range(draw, case(op, f(*shape), given), 1, -high, high)


def placed(draw: Draw, op: str) -> Case:
    """Added at indices: equal ones add up."""
    shape, dims = numbers(draw, 1, 3, low=1, high=6), numbers(draw, 1, 1, low=1, high=4)
    at = sorted(draw(st.sets(st.integers(0, len(shape) - 1), min_size=1, max_size=2)))
    given = [indices(draw, dims, shape[d], negative=True) if d in at else None for d in range(len(shape))]
    lead = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    kept = [n for d, n in enumerate(shape) if d not in at]
    values = smaller(draw, [*kept[:lead], *dims, *kept[lead:]])
    return case(op, f(*shape), given, f(*values), True)


def gathered(draw: Draw, op: str) -> Case:
    """Of the other dims the index may take the first part."""
    shape = numbers(draw, 1, 3, low=1)
    dim = among(draw, len(shape))
    taken = [number(draw) if d == dim % len(shape) else n if draw(BOOL) else max(1, n - 1) for d, n in enumerate(shape)]
    made = case(op, f(*shape), dim, ints(*taken, high=shape[dim]))
    return maybe_out_of_range(draw, made, 2, 0, shape[dim])


def convolution(draw: Draw, op: str, space: int) -> Case:
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    each, out = draw(st.sampled_from([1, 2, 3])), groups * draw(st.sampled_from([1, 2, 4]))
    window, far = [draw(st.integers(1, 3)) for _ in range(space)], 6 if space == 1 else 4
    batch = sizes(draw, 0, 1, low=1, high=6)
    source = f(*batch, groups * each, *(draw(st.integers(n, far)) for n in window))
    bias = f(out) if draw(BOOL) else None
    stride = [1 + draw(BOOL)] * space
    if op.endswith("padding"):
        padding: Any = draw(st.sampled_from(["same", "valid"]))
        stride = [1] * space if padding == "same" else stride
    else:
        padding = [draw(st.integers(0, 1))] * space
    return case(op, source, f(out, each, *window), bias, stride, padding, [1] * space, groups)


def convolve(draw: Draw, op: str) -> Case:
    groups, window = draw(st.sampled_from([1, 1, 2])), draw(st.integers(1, 3))
    each, out, dilation = draw(st.integers(1, 2)), groups * draw(st.integers(1, 2)), draw(st.integers(1, 2))
    source = f(number(draw, 1), groups * each, draw(st.integers(1, 6)))
    bias = f(out) if draw(BOOL) else None
    return case(op, source, f(out, each, window), bias, draw(st.integers(0, dilation * (window - 1))), dilation, groups)


def running_sum(draw: Draw, op: str) -> Case:
    shape = numbers(draw, 1, 3, low=1)
    return case(op, f(*shape), draw(st.integers(0, len(shape) - 1)))


def pooled(draw: Draw, op: str, space: int) -> Case:
    lead = sizes(draw, 1, 2, low=1, high=6)
    inner = [draw(st.integers(2, 5)) for _ in range(space)]
    if "adaptive" in op:
        return case(op, f(*lead, *inner), [draw(st.integers(1, n)) for n in inner])
    return case(op, f(*lead, *inner), [2] * space, [1 + draw(BOOL)] * space, [draw(st.integers(0, 1))] * space)


def by_channel(draw: Draw, op: str) -> Case:
    """Batch norm with statistics that are given."""
    shape = numbers(draw, 2, 4, low=1, high=6)
    weights = [f(shape[1]) if draw(BOOL) else None] * 2
    kept = (f(shape[1], grad=False), positive(shape[1], grad=False))
    return case(op, f(*shape), *weights, *kept, False, 0.1, 1e-5, False)


def by_group(draw: Draw, op: str) -> Case:
    groups = draw(st.integers(1, 3))
    channels = groups * draw(st.sampled_from([1, 2, 4]))
    shape = [*sizes(draw, 1, 1, low=1), channels, *numbers(draw, 0, 2, low=1, high=5)]
    return case(op, f(*shape), groups, *([f(channels), f(channels)] if draw(BOOL) else []))


def batch_norm(draw: Draw, op: str) -> Case:
    shape = numbers(draw, 2, 4, low=1, high=6)
    variance = positive(*(n if d == 1 else 1 for d, n in enumerate(shape)))
    return case(op, f(*shape), variance, *([f(shape[1]), f(shape[1])] if draw(BOOL) else [None, None]), 1e-5)


def moving_average(draw: Draw, op: str) -> Case:
    channels = number(draw, 1)
    return case(op, f(channels), f(1, channels, *[1] * draw(st.integers(0, 2))), draw(st.sampled_from([0.1, 0.5])))


def recurrent(draw: Draw, op: str, gates: int, states: int) -> Case:
    time, width, inner = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    batch = number(draw, 1)
    weights = [f(gates * inner, width), f(gates * inner, inner), f(gates * inner), f(gates * inner)]
    hidden = [f(batch, inner) for _ in range(states)]
    return case(op, f(time, batch, width), *hidden, weights[: draw(st.sampled_from([2, 4]))], draw(BOOL))


Heads = tuple[list[Number], list[Number], list[Number]]


def heads(draw: Draw, same_length: bool = False, batched: bool = False) -> Heads:
    """Shapes of queries, keys and values; as many heads, or groups of queries that share keys and values."""
    batch = sizes(draw, 1, 1, low=1, high=4) if batched or draw(BOOL) else [draw(st.integers(1, 4))]
    shared, groups = draw(st.sampled_from([1, 2, 3, 4, 6])), draw(st.sampled_from([1, 1, 2, 3]))
    length, width, out = draw(st.integers(1, 6)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    keys = length if same_length else draw(st.integers(1, 5))
    return (
        [*batch, shared * groups, length, width],
        [*batch, shared, keys, width],
        [*batch, shared, keys, out],
    )


def dense_mask(draw: Draw, q: list[Number], k: list[Number]) -> Spec:
    """Numbers that are added to the scores, or what may be attended to: the first key always."""
    shape = [1 if chance(draw, 4) else n for n in [*q[:-1], k[-2]]][draw(st.integers(0, len(q) - 2)) :]
    if draw(BOOL):
        return f(*shape)

    def make(sizes: tuple[int, ...]) -> torch.Tensor:
        made = torch.rand(sizes) < 0.6
        made[..., 0] = True
        return made

    return Spec(tuple(shape), make, False)


def attention(draw: Draw, op: str) -> Case:
    causal = chance(draw, 3)
    q, k, v = heads(draw, same_length=causal)
    if q[1] == k[1] and chance(draw, 4):
        q, k, v = q[1:], k[1:], v[1:]
    mask = None if causal or draw(BOOL) else dense_mask(draw, q, k)
    return case(op, f(*q), f(*k), f(*v), mask, 0.0, causal, enable_gqa=len(q) == 4 and q[1] != k[1])


def named_mask(draw: Draw, batch: Number, queries: int, keys: int) -> dict[str, Any]:
    """A mask by names, of which only padding lets queries and keys have other numbers."""
    rows = {
        "padding": draw(st.sampled_from([bools(batch, keys), ints(batch, keys, high=2)])),
        "prefix": draw(st.sampled_from([2, ints(batch, keys, high=2)])),
        "documents": ints(batch, queries, high=3),
    }
    if queries != keys:
        return {name: rows[name] for name in ["padding"] if draw(BOOL)}
    plain = dict(causal=True, window=draw(st.integers(1, 4)), chunk=draw(st.integers(1, 4)))
    return {name: given for name, given in (plain | rows).items() if chance(draw, 3)}


def attention_by_name(draw: Draw, op: str) -> Case:
    q, k, v = heads(draw, same_length=draw(BOOL), batched=True)
    scale = dict(scale=0.3) if chance(draw, 4) else {}
    return case(op, f(*q), f(*k), f(*v), **named_mask(draw, q[0], value(q[-2]), value(k[-2])), **scale)


def attention_with_dropout(draw: Draw, op: str) -> Case:
    """Under a mask by name, a dense one, or both."""
    q, k, v = heads(draw, same_length=draw(BOOL), batched=True)
    dense = dense_mask(draw, q, k) if chance(draw, 3) else None
    named = named_mask(draw, q[0], value(q[-2]), value(k[-2]))
    return case(op, f(*q), f(*k), f(*v), dense, 0.4, key(), 3, named.pop("causal", False), **named)


def cross_entropy(draw: Draw, op: str) -> Case:
    """Some targets are left out: those that are a class, -100, or another negative number."""
    rows, classes = sizes(draw, 1, 1)[0], number(draw, 1)
    ignored = draw(st.sampled_from([-100, -1, 0, classes - 1]))

    def targets(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.where(torch.rand(shape) < 0.3, ignored, torch.randint(0, classes, shape))

    smoothing = dict(label_smoothing=0.1) if draw(BOOL) else {}
    made = case(op, f(rows, classes), Spec((rows,), targets, False), ignore_index=ignored, **smoothing)
    return maybe_out_of_range(draw, made, 1, -1 if ignored == -1 else 0, classes)


def dropped(draw: Draw, op: str) -> Case:
    return case(op, f(*sizes(draw)), draw(st.sampled_from([0.0, 0.4, 1.0])), key(), 1)


def uniform(draw: Draw, op: str) -> Case:
    return case(op, numbers(draw, 0, 3), key(), 2, draw(st.sampled_from([torch.float64, torch.float32])))


def folded(draw: Draw, op: str) -> Case:
    return case(op, key(), draw(st.integers(0, 9)))


def filled(draw: Draw, op: str) -> Case:
    return case(op, numbers(draw, 0, 3), *([2.5] if "full" in op else []))


def identity(draw: Draw, op: str) -> Case:
    return case(op, *numbers(draw, 1, 1), *(numbers(draw, 1, 1) if op.endswith(".m") else []))


def counted_up(draw: Draw, op: str) -> Case:
    """Forward and back, whole and in fractions."""
    start, length, step = draw(st.integers(-5, 5)), number(draw), draw(st.sampled_from([1, 2, -1, -3, 0.5]))
    if op.endswith("default"):
        return case(op, length)
    if op.endswith("start"):
        return case(op, start, start + length)
    named = dict(dtype=torch.float64) if isinstance(step, float) else {}
    return case(op, start, start + step * length, step, **named)


def transformed(draw: Draw, op: str) -> Case:
    """Of numbers, real or complex, along some dims, now and then of another size."""
    shape = numbers(draw, 1 if op.endswith(("ft.default", "n.default")) else 2, 3, low=2, high=6)
    back = "_i" in op
    make = (complexes if back else f) if "rfft" in op else draw(st.sampled_from([f, complexes]))
    if op.endswith("ft.default"):
        n = draw(st.sampled_from([None, None, 4, 5]))
        return case(op, make(*shape), n, among(draw, len(shape)), draw(NORMS))
    dims = [d - len(shape) * draw(BOOL) for d in draw(st.permutations(range(len(shape))))[:2]]
    if op.endswith("n.default"):
        dims = draw(st.sampled_from([None, dims[:1], dims]))
    lengths = [draw(st.integers(2, 5)) for _ in dims] if dims and chance(draw, 3) else None
    return case(op, make(*shape), lengths, dims, draw(NORMS))


def spectrogram(draw: Draw, op: str) -> Case:
    size = draw(st.sampled_from([4, 6]))
    signal = f(*sizes(draw, 0, 1, low=1), draw(st.integers(8, 12)))
    window = f(size) if draw(BOOL) else None
    return case(op, signal, size, 2, size, window, draw(BOOL), draw(BOOL), draw(BOOL))


def distances(draw: Draw, op: str) -> Case:
    lead, (m, n, d) = sizes(draw, 0, 1, low=1), numbers(draw, 3, 3, low=1)
    return case(op, f(*smaller(draw, lead), m, d), f(*lead, n, d), draw(st.sampled_from([1.0, 2.0, 3.0])))


def places(draw: Draw, op: str) -> Case:
    n, m = numbers(draw, 2, 2, low=2, high=6)
    if "indices" in op:
        return case(op, n, m, draw(st.integers(-1, 1)))
    if "window" in op:
        return case(op, n, *([draw(BOOL)] if op.endswith("periodic") else []), dtype=torch.float64)
    return case(op, -1, 2, n, dtype=torch.float64)


NORMS = st.sampled_from([None, "ortho", "forward"])


def literal(draw: Draw, op: str) -> Case:
    rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    values = [[float(i * width + j) for j in range(width)] for i in range(rows)]
    return case(op, values, dtype=torch.float64, device=torch.device("cpu"))


SPACES = (1, 2, 3)

CALLS: Calls = {
    **calls("layer_norm.default rms_norm.default", normalised),
    **calls("softmax.int log_softmax.int", along_a_dim),
    **calls("_softmax.default", along_a_dim, False),
    **calls("embedding.default", embedding),
    **calls("index.Tensor", indexed),
    **calls("index_put.default", placed),
    **calls("gather.default", gathered),
    **{op: drawn for n in SPACES for op, drawn in calls(f"conv{n}d.default conv{n}d.padding", convolution, n).items()},
    **{op: drawn for n in SPACES for op, drawn in calls(
        f"max_pool{n}d.default avg_pool{n}d.default adaptive_avg_pool{n}d.default", pooled, n
    ).items()},
    **calls("batch_norm.default", by_channel),
    **calls("group_norm.default", by_group),
    **calls("runtime.batch_norm", batch_norm),
    **calls("runtime.moving_average", moving_average),
    **calls("runtime.convolve", convolve),
    **calls("runtime.running_sum", running_sum),
    **calls("runtime.lstm", recurrent, 4, 2),
    **calls("runtime.gru", recurrent, 3, 1),
    **calls("runtime.rnn_tanh runtime.rnn_relu", recurrent, 1, 1),
    **calls("scaled_dot_product_attention.default", attention),
    **calls("runtime.attention", attention_by_name),
    **calls("runtime.attention_with_dropout", attention_with_dropout),
    **calls("runtime.cross_entropy", cross_entropy),
    **calls("runtime.dropout", dropped),
    **calls("runtime.uniform", uniform),
    **calls("runtime.fold", folded),
    **calls("runtime.literal", literal),
    **calls(" ".join(f"fft_{way}{kind}{dims}.default" for way in ("", "i") for kind in ("fft", "rfft")
                     for dims in ("", "2", "n")), transformed),
    **calls("stft.default", spectrogram),
    **calls("cdist.default", distances),
    **calls("linspace.default logspace.default tril_indices.default triu_indices.default", places),
    **calls(" ".join(f"{name}_window.{overload}" for name in ("hann", "hamming", "blackman")
                     for overload in ("default", "periodic")), places),
    **calls("full.default zeros.default ones.default", filled),
    **calls("eye.default eye.m", identity),
    **calls("arange.default arange.start arange.start_step", counted_up),
}  # fmt: skip
