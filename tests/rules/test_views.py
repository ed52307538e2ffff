"""Views: each rule's rows, split against whole; negative dims included."""

from __future__ import annotations

from ndcompile.placement import S
from ndcompile.rules.rows import rows
from ndcompile.size import Size
from tests.rules.case import Case, bools, case, complexes, each, every_row_holds, f, ints

B = Size(12, ("b",))

CASES: list[Case] = [
    case("aten.view.default", f(12, 5), [3, 4, 5]),
    case("aten.view.default", f(4, 6, 5), [24, 5]),
    case("aten.view.default", f(6, 5, 4), [5, 6, 4]),
    case("aten.reshape.default", f(2, 16), [8, 4]),
    case("aten.reshape.default", f(12, 8), [-1, 6]),
    case("aten.reshape.default", f(1, 7), [7, 1]),
    case("aten._unsafe_view.default", f(24), [6, 4]),
    case("aten.flatten.using_ints", f(4, 6, 5)),
    case("aten.flatten.using_ints", f(4, 6, 5), -2),
    case("aten.unflatten.int", f(5, 24), -1, [4, 6]),
    case("aten.unflatten.int", f(12, 5), 0, [-1, 3]),
    case("aten.unsqueeze.default", f(6, 5), -1),
    case("aten.unsqueeze.default", f(6, 5), 1),
    case("aten.squeeze.dim", f(6, 1, 5), -2),
    case("aten.squeeze.dim", f(2, 5), 0),
    case("aten.squeeze.dims", f(6, 1, 1, 2), [1, -2]),
    case("aten.squeeze.default", f(1, 6, 1, 2)),
    case("aten.transpose.int", f(4, 6, 5), -1, -2),
    case("aten.transpose.int", f(4, 6, 5), 0, 2),
    case("aten.transpose.int", f(B, 1, 5), 0, -1),
    case("aten.t.default", f(6, 5)),
    case("aten.t.default", f(6)),
    case("aten.numpy_T.default", f(6, 5, 4)),
    case("aten.mT.default", f(4, 6, 5)),
    case("aten.stack.default", [f(6, 5), f(6, 5)]),
    case("aten.stack.default", [f(4, 6), f(4, 6), f(4, 6)], -1),
    case("aten.unbind.int", f(3, 6, 5)),
    case("aten.unbind.int", f(6, 12, 2), -1),
    case("aten.roll.default", f(6, 12), [2], [-1]),
    case("aten.roll.default", f(6, 5), [3]),
    case("aten.permute.default", f(4, 6, 5), [2, 0, 1]),
    case("aten.permute.default", f(4, 6, 5), [-1, 0, -2]),
    case("aten.movedim.int", f(4, 6, 5, 2), -1, 1),
    case("aten.movedim.int", f(4, 6, 5), 0, -1),
    case("aten.movedim.intlist", f(4, 6, 5, 2), [0, -1], [2, 0]),
    case("aten.expand.default", f(6, 1), [4, 6, 5]),
    case("aten.expand.default", f(5), [-1]),
    case("aten.expand.default", f(), [12]),
    case("aten.expand_as.default", f(6, 1), f(4, 6, 5)),
    case("aten.expand_as.default", f(5), bools(12, 5)),
    case("aten.view_as_complex.default", f(6, 5, 2)),
    case("aten.view_as_real.default", complexes(6, 5)),
    case("aten.contiguous.default", f(6, 5)),
    case("aten.clone.default", f(6, 5)),
    case("aten.alias.default", f(6, 5)),
    case("aten.detach.default", f(6, 5)),
    case("aten.slice.Tensor", f(6, 5), 0, 1, 4),
    case("aten.slice.Tensor", f(6, 12), -1, -3, 1 << 62),
    case("aten.slice.Tensor", f(6, 12), 1, 0, 12, 2),
    case("aten.narrow.default", f(6, 12), -2, 1, 3),
    case("aten.select.int", f(4, 6, 5), -2, 0),
    case("aten.select.int", f(6, 1), 1, -1),
    case("aten.split.Tensor", f(6, 12), 4, -1),
    case("aten.split.Tensor", f(12, 5), 5),
    case("aten.split_with_sizes.default", f(6, 12), [3, 3, 6], 1),
    case("aten.chunk.default", f(6, 12), 3, -1),
    case("aten.cat.default", [f(6, 5), f(6, 3)], -1),
    case("aten.cat.default", [f(6, 5), f(1, 5), f(4, 5)]),
    case("aten.cat.default", [f(6, 1, 5), f(6, 1, 5)], 1),
    case("aten.flip.default", f(6, 4, 5), [-1, 0]),
    case("aten.pad.default", f(4, 6, 5), [1, 2]),
    case("aten.pad.default", f(4, 6, 5), [0, 0, 1, 1], "constant", 2.0),
    case("aten.pad.default", f(4, 6, 5), [1, 1], "reflect"),
    case("aten.slice_scatter.default", f(6, 5), f(6, 2), 1, 1, 3),
    case("aten.slice_scatter.default", f(12, 5), f(6, 5), 0, 0, None, 2),
    case("aten.select_scatter.default", f(6, 4, 5), f(6, 5), -2, 1),
    case("aten.select_scatter.default", f(6, 12), f(12), 0, -1),
    case("aten.cumsum.default", f(6, 5), -1),
    case("aten.cumsum.default", ints(6, 5, high=4), 0),
    case("aten.diff.default", f(6, 5)),
    case("aten.diff.default", f(6, 5), 1, -2, f(1, 5)),
    case("aten.diff.default", f(6, 5), 2, -1, f(6, 2), f(6, 1)),
    case("aten.diff.default", bools(6, 5), 1, 0, bools(1, 5)),
    case("aten.tril.default", f(4, 6, 5)),
    case("aten.triu.default", f(6, 5), 1),
]


@each(CASES)
def test_rows_hold(given: Case) -> None:
    every_row_holds(given)


def test_a_negative_dim_is_whole_where_the_op_acts_along_it() -> None:
    for given in (
        case("aten.cumsum.default", f(6, 6), -1),
        case("aten.slice.Tensor", f(6, 6), -1, 1, 4),
        case("aten.cat.default", [f(6, 6), f(6, 6)], -1),
        case("aten.flip.default", f(6, 6), [-1]),
        case("aten.select.int", f(6, 6), -1, 0),
    ):
        shards = {row.operands[0] for row in rows(given.trial().signature, 2) if row.factor}
        assert shards == {S(0)}, f"{given} shards {shards}"
