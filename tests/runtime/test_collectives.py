"""Each conversion keeps the value that the placements denote, and its gradient's, on real ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ndcompile.mesh import MeshSpec
from ndcompile.placement import TABLE, I, P, Placement, R, S
from ndcompile.runtime import collectives
from ndcompile.runtime.collectives import all_gather, all_reduce, all_to_all, reduce_scatter, replicate, shard
from ndcompile.runtime.mesh import Mesh, Ranks
from tests.ranks import RankFailed, run

Shape = tuple[int, ...]
EVEN: Shape = (4, 8, 3)
WHOLE: list[Shape] = [EVEN, (3, 9, 5)]


def parts(size: int, ranks: int) -> list[int]:
    """The lengths that torch.chunk gives, and zeros for the ranks that it gives nothing."""
    lengths = [len(part) for part in torch.arange(size).chunk(ranks)]
    return lengths + [0] * (ranks - len(lengths))


def spread(value: Tensor, placement: Placement, ranks: int) -> list[Tensor]:
    """Tensors that ranks may hold of a value."""
    if placement.kind == "S":
        return list(value.split(parts(value.shape[placement.dim], ranks), placement.dim))
    if placement.kind == "P":
        others = [torch.randint(-9, 9, value.shape).to(value) for _ in range(ranks - 1)]
        return [value - sum(others), *others]
    return [value.clone() for _ in range(ranks)]


def denoted(held: list[Tensor], placement: Placement) -> Tensor:
    """The value that the ranks' tensors mean."""
    if placement.kind == "S":
        assert placement.dim is not None
        return torch.cat(held, placement.dim)
    if placement.kind == "P":
        return torch.stack(held).sum(0)
    assert all(torch.equal(each, held[0]) for each in held), f"ranks hold different tensors of {placement}"
    return held[0]


def placed(kind: str, dim: int) -> Placement:
    return {"R": R, "I": I, "P": P(), "S": S(dim)}[kind]


def cases(shapes: list[Shape]) -> list[tuple[str, Placement, Placement, Shape]]:
    """Every row of the table on every dim (for S → S: every pair of dims)."""
    found = []
    for row in TABLE:
        for shape in shapes:
            for dim in range(3):
                target = placed(row.target, (dim + 1) % 3 if row.source == "S" else dim)
                found.append((row.name, placed(row.source, dim), target, shape))
    return found


def convert(name: str, x: Tensor, axis: Ranks, source: Placement, target: Placement, shape: Shape) -> Tensor:
    """Call a conversion as emitted code does; the size is given where the ranks do not divide it."""
    function = getattr(collectives, name)
    dims = [p.dim for p in (source, target) if p.kind == "S"]
    sizes = {"size": shape[dims[0]]} if dims and shape[dims[0]] % axis.size else {}
    return function(x, axis, *dims, **sizes)


def axis_of(ranks: int, copies: bool = False) -> Ranks:
    """The only axis of a world; gathers and reduce-scatters over it by copies."""
    mesh = Mesh.bound(MeshSpec.parse(f"tp={ranks}"))
    return (mesh.by_copies(torch.device("cpu")) if copies else mesh)["tp"]


def both_sides(ranks: int, work: list[tuple], copies: bool) -> list[tuple[Tensor, Tensor]]:
    axis = axis_of(ranks, copies)
    results = []
    for name, source, target, shape, held, cotangents in work:
        x = held[axis.index].requires_grad_()
        y = convert(name, x, axis, source, target, shape)
        y.backward(cotangents[axis.index])
        assert x.grad is not None, name
        results.append((y.detach(), x.grad))
    return results


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_each_conversion_keeps_the_value_and_the_gradient(ranks, copies):
    torch.manual_seed(ranks)
    work, values = [], []
    for name, source, target, shape in cases(WHOLE):
        x, c = (torch.randint(-99, 99, shape).double() for _ in range(2))
        values.append((x, c))
        work.append((name, source, target, shape, spread(x, source, ranks), spread(c, target.dual, ranks)))
    answers = run(ranks, both_sides, ranks, work, copies)
    for i, ((name, source, target, shape, *_), (x, c)) in enumerate(zip(work, values, strict=True)):
        where = f"{name} {source} → {target} of {shape}"
        assert torch.equal(denoted([answer[i][0] for answer in answers], target), x), where
        assert torch.equal(denoted([answer[i][1] for answer in answers], source.dual), c), f"gradient of {where}"


def of_complex_numbers(ranks: int) -> list[Tensor]:
    axis = axis_of(ranks)
    x = torch.complex(torch.arange(8.0), torch.arange(8.0) * axis.index).view(4, 2)
    return [all_reduce(x, axis), all_gather(x.conj(), axis, 0), reduce_scatter(x, axis, 0), all_to_all(x, axis, 1, 0)]


def test_all_collectives_take_complex_numbers():
    real, answers = torch.arange(8.0).view(4, 2), run(2, of_complex_numbers, 2)
    first, second = torch.complex(real, torch.zeros(4, 2)), torch.complex(real, real)
    for rank, (total, gathered, scattered, exchanged) in enumerate(answers):
        own = slice(2 * rank, 2 * rank + 2)
        assert torch.equal(total, first + second)
        assert torch.equal(gathered.resolve_conj(), torch.cat((first, second)).conj().resolve_conj())
        assert torch.equal(scattered, (first + second)[own])
        assert torch.equal(exchanged, torch.cat((first, second), 1)[own])


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64]


def payloads(ranks: int) -> list[Tensor]:
    axis = axis_of(ranks)
    results = []
    for dtype in DTYPES:
        x = (torch.arange(8).view(4, 2) + axis.index).to(dtype)
        results += [all_reduce(x, axis), all_reduce(x, axis, "max"), all_reduce(x, axis, "min")]
        results += [all_gather(x, axis, 0), reduce_scatter(x, axis, 0), all_to_all(x, axis, 1, 0)]
    return results


def test_all_collectives_take_all_dtypes():
    answers = run(2, payloads, 2)
    first = torch.arange(8).view(4, 2)
    second = first + 1
    for i, dtype in enumerate(DTYPES):
        for rank, answer in enumerate(answers):
            total, largest, smallest, gathered, scattered, exchanged = answer[6 * i : 6 * i + 6]
            assert {x.dtype for x in answer[6 * i : 6 * i + 6]} == {dtype}
            assert total.tolist() == (first + second).tolist()
            assert largest.tolist() == second.tolist()
            assert smallest.tolist() == first.tolist()
            assert gathered.tolist() == torch.cat((first, second)).tolist()
            assert scattered.tolist() == (first + second)[2 * rank : 2 * rank + 2].tolist()
            assert exchanged.tolist() == torch.cat((first, second), 1)[2 * rank : 2 * rank + 2].tolist()


def in_two_dtypes(ranks: int) -> list[Tensor]:
    """Sums of 256 and ones: bf16 cannot hold 257, so its dtype shows in 256 + 1 + 1 + 1 = 259 → 260."""
    axis = axis_of(ranks)
    mine = torch.full((4,), 256.0 if axis.index == 0 else 1.0, dtype=torch.bfloat16)
    weight = torch.zeros(4, dtype=torch.bfloat16, requires_grad=True)
    replicate(weight, axis, dtype=torch.float32).backward(mine)
    part = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
    all_gather(part, axis, 0, dtype=torch.float32).backward(mine)
    assert weight.grad is not None and part.grad is not None
    return [
        all_reduce(mine, axis, dtype=torch.float32),
        reduce_scatter(mine, axis, 0, dtype=torch.float32),
        weight.grad,
        part.grad,
    ]


def test_a_reduction_is_done_in_its_dtype_and_cast_back():
    for answer in run(4, in_two_dtypes, 4):
        for total in answer:
            assert total.dtype == torch.bfloat16
            assert total.tolist() == [260.0] * len(total)


def block(x: Tensor, w: Tensor, axis: Ranks) -> Tensor:
    """Sequence-parallel in and out, the weight sharded on its columns, then a shard exchange."""
    h = all_gather(x, axis, 1).sin()
    h = reduce_scatter(h @ w, axis, 1)
    h = all_to_all(h, axis, 1, 2) * replicate(x.new_ones(1, requires_grad=True), axis)
    return all_reduce((shard(all_gather(h, axis, 2), axis, 0) ** 2).sum(), axis)


def compiled(ranks: int) -> tuple[list[Tensor | None], list[Tensor | None], int]:
    from torch._dynamo.testing import CompileCounter

    axis = axis_of(ranks)
    counter = CompileCounter()
    torch.compile(block, backend=counter, fullgraph=True)(*_inputs(axis), axis)
    results = []
    for function in (block, torch.compile(block, backend="aot_eager", fullgraph=True)):
        x, w = _inputs(axis)
        y = function(x, w, axis)
        y.backward()
        results.append([y.detach(), x.grad, w.grad])
    return results[0], results[1], int(counter.frame_count)


def _inputs(axis: Ranks) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(axis.index)
    x = torch.rand(2, 4, 6, generator=generator, dtype=torch.float64)
    w = torch.rand(6, 6, generator=generator, dtype=torch.float64)
    return x.requires_grad_(), w.requires_grad_()


def test_conversions_compile_to_one_graph_with_the_same_results():
    for eager, traced, frames in run(2, compiled, 2):
        assert frames == 1
        for a, b in zip(eager, traced, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-14, atol=0)


def test_the_identity_directions_are_views():
    axis = Ranks("tp", 2, 0, "tp")
    x = torch.ones(3, requires_grad=True)
    for conversion in (collectives.replicate, collectives.invariant, collectives.partial):
        assert conversion(x, axis).data_ptr() == x.data_ptr()
        assert conversion(x, axis).grad_fn is not None


def test_an_axis_of_one_rank_changes_nothing():
    axis, x = Ranks("tp", 1, 0, "tp"), torch.ones(2, 2)
    for name, source, target, _ in cases([EVEN]):
        assert convert(name, x.new_ones(EVEN), axis, source, target, EVEN).shape == EVEN
    assert all_reduce(x, axis) is x


def test_max_and_min_carry_no_gradient():
    assert not all_reduce(torch.ones(2, requires_grad=True), Ranks("tp", 1, 0, "tp"), "max").requires_grad
    with pytest.raises(ValueError, match="cannot reduce by 'avg'"):
        all_reduce(torch.ones(2), Ranks("tp", 2, 0, "tp"), "avg")


def test_an_uneven_dim_without_its_size_is_an_error():
    with pytest.raises(ValueError, match=r"does not divide by the 2 ranks of 'tp'"):
        shard(torch.ones(3), Ranks("tp", 2, 0, "tp"), 0)
    with pytest.raises(ValueError, match="has size 3, but size=4"):
        shard(torch.ones(3), Ranks("tp", 2, 0, "tp"), 0, size=4)


def fails_on_one() -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise KeyError("rank one's own error")
    dist.barrier()


def test_a_failing_rank_ends_the_others_and_shows_its_error():
    with pytest.raises(RankFailed, match="rank one's own error"):
        run(2, fails_on_one)
