"""Each check, on a compiled graph that was broken in one way: what it says, whole."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import fx, nn

import ndcompile as nd
from ndcompile import checks, runtime
from ndcompile.deduction import REPORT, RULE
from ndcompile.duties import duties
from ndcompile.errors import CheckError
from ndcompile.mesh import MeshAxis, MeshSpec
from ndcompile.placement import I, Layout, P, Placement, R, S
from ndcompile.route import Move
from ndcompile.rules.registry import signature
from tests.models import Mlp, Stack, tokens

aten = torch.ops.aten
MLP_LINE = "models.py:21   return self.down(F.gelu(self.up(x)))"


@cache
def compiled(kind: str, mesh: str) -> fx.GraphModule:
    if kind == "mlp":
        return nd.compile(Mlp(), mesh, torch.randn(4, 12)).graph
    return nd.compile(Stack(), mesh, tokens()).graph


def graph_of(kind: str = "mlp", mesh: str = "tp=2") -> fx.GraphModule:
    """A copy to break: nodes keep their meta."""
    origin = compiled(kind, mesh)
    made, copied = fx.GraphModule(nn.Module(), fx.Graph()), dict[fx.Node, fx.Node]()
    output = made.graph.graph_copy(origin.graph, copied)
    made.graph.output(output)
    for node, twin in copied.items():
        twin.meta = dict(node.meta)
    made.graph.output_node().meta = dict(origin.graph.output_node().meta)
    return made


def node(graph: fx.GraphModule, name: str) -> fx.Node:
    return next(n for n in graph.graph.nodes if n.name == name)


def insert(graph: fx.GraphModule, after: str, target: Any, *arguments: Any, **meta: Any) -> fx.Node:
    """An op on a value, taken by all its users in the value's place; it has the value's meta and `meta`."""
    value = node(graph, after)
    users = list(value.users)
    with graph.graph.inserting_after(value):
        made = graph.graph.call_function(target, (value, *arguments))
    made.meta = copy.copy(value.meta) | dict(wanted=(value.meta["layout"],)) | meta
    made.meta = {k: v for k, v in made.meta.items() if k != "move" or "move" in meta}
    for user in users:
        user.replace_input_with(value, made)
    return made


def drop(graph: fx.GraphModule, name: str) -> None:
    gone = node(graph, name)
    gone.replace_all_uses_with(gone.all_input_nodes[0])
    graph.graph.erase_node(gone)


def place(graph: fx.GraphModule, name: str, placement: Placement, axis: str = "tp") -> None:
    layout = node(graph, name).meta["layout"]
    node(graph, name).meta["layout"] = layout.replace(axis, placement)


def legal(graph: fx.GraphModule, mesh: MeshSpec) -> None:
    checks.ops_are_legal(graph, mesh, signature)


def complaint(check: Callable[[fx.GraphModule, MeshSpec], None], graph: fx.GraphModule, mesh: str = "tp=2") -> str:
    """The text of the error, without its last line, which every one of them has."""
    with pytest.raises(CheckError) as caught:
        check(graph, MeshSpec.parse(mesh))
    *text, tries = str(caught.value).splitlines()
    assert tries.removeprefix("  try     ") in (REPORT, RULE, checks.WAIT), "it says what to try"
    return "\n".join(text)


ALL = (
    checks.no_noops,
    checks.no_hidden_randomness,
    checks.every_value_placed,
    checks.no_implicit_communication,
    checks.conversions_are_rows,
    checks.reductions_state_their_dtype,
    checks.reduced_exactly_once,
    checks.same_collectives_on_every_rank,
    checks.waited_before_use,
    legal,
)


@pytest.mark.parametrize(("kind", "mesh"), [("mlp", "tp=2"), ("stack", "tp=2"), ("stack", "dp_shard=2, tp=2")])
def test_no_check_complains_of_an_unbroken_copy(kind: str, mesh: str) -> None:
    for check in ALL:
        check(graph_of(kind, mesh), MeshSpec.parse(mesh))


# ---- the order of sequences ------------------------------------------------------------------------------------------


def test_a_result_that_is_not_put_in_order_is_seen() -> None:
    graph = graph_of("stack", "cp=2")
    checks.no_implicit_communication(graph, MeshSpec.parse("cp=2"))
    drop(graph, "in_order")
    assert complaint(checks.no_implicit_communication, graph, "cp=2") == (
        "the result %linear_2 lies head–tail\n  node    %output\n  why     a conversion is missing on this edge"
    )


def test_what_is_in_order_is_not_put_so_again() -> None:
    graph = graph_of("stack", "cp=2")
    once = node(graph, "in_order")
    again = insert(graph, "in_order", runtime.in_order, once.args[1], move=once.meta["move"])
    again.kwargs = once.kwargs
    assert complaint(checks.conversions_are_rows, graph, "cp=2") == (
        "in_order of what does not lie head–tail on cp\n"
        "  node    %in_order_1   head\n"
        "  source  models.py:49   logits = self.head(x)\n"
        "  why     it would bring a sequence out of order"
    )


# ---- what is left in the graph -------------------------------------------------------------------------------------


def test_a_copy_is_a_noop() -> None:
    graph = graph_of()
    insert(graph, "gelu", aten.clone.default)
    assert complaint(checks.no_noops, graph) == (
        "aten.clone.default changes nothing\n"
        "  node    %clone_default\n"
        f"  source  {MLP_LINE}\n"
        "  why     it would be given a layout and a cost of its own"
    )


def test_a_cast_to_the_dtype_at_hand_is_a_noop_and_another_is_not() -> None:
    graph = graph_of()
    insert(graph, "gelu", aten.to.dtype, torch.bfloat16, dtype=torch.bfloat16)
    checks.no_noops(graph, MeshSpec.parse("tp=2"))
    insert(graph, "linear", aten.to.dtype, torch.float32)
    assert complaint(checks.no_noops, graph).startswith("aten.to.dtype changes nothing\n  node    %to_dtype_1   up\n")


def test_an_op_with_random_numbers_of_its_own() -> None:
    graph = graph_of()
    insert(graph, "gelu", aten.rand_like.default)
    assert complaint(checks.no_hidden_randomness, graph) == (
        "aten.rand_like.default draws random numbers of its own\n"
        "  node    %rand_like_default\n"
        f"  source  {MLP_LINE}\n"
        "  why     each rank would draw others"
    )


@pytest.mark.parametrize("named", [False, True])
def test_attention_with_dropout_draws_however_it_is_written(named: bool) -> None:
    graph = graph_of()
    made = insert(graph, "gelu", aten.scaled_dot_product_attention.default)
    value = made.args[0]
    made.args = (value, value, value) if named else (value, value, value, None, 0.1)
    made.kwargs = {"dropout_p": 0.1} if named else {}
    assert complaint(checks.no_hidden_randomness, graph).startswith("aten.scaled_dot_product_attention.default draws")
    made.args, made.kwargs = (value, value, value), {}
    checks.no_hidden_randomness(graph, MeshSpec.parse("tp=2"))


# ---- layouts and edges ---------------------------------------------------------------------------------------------


def test_a_value_without_a_placement_on_an_axis() -> None:
    graph = graph_of()
    node(graph, "gelu").meta["layout"] = Layout.make(2, {})
    assert complaint(checks.every_value_placed, graph) == (
        "%gelu has layout '' on mesh 'tp=2'\n"
        "  node    %gelu\n"
        f"  source  {MLP_LINE}\n"
        "  why     each axis needs one placement"
    )


def test_a_value_with_a_layout_of_other_dims() -> None:
    graph = graph_of()
    node(graph, "gelu").meta["layout"] = Layout.make(3, {"tp": S(2)})
    assert complaint(checks.every_value_placed, graph).startswith("%gelu has layout 'tp S(2)' on mesh 'tp=2'\n")


def test_a_dropped_conversion_of_an_operand() -> None:
    graph = graph_of()
    drop(graph, "partial_invariant")
    assert complaint(checks.no_implicit_communication, graph) == (
        "%linear_1 takes %p_down_bias as 'tp P', but it is 'tp I'\n"
        "  node    %linear_1   down\n"
        f"  source  {MLP_LINE}\n"
        "  why     a conversion is missing on this edge"
    )


def test_a_dropped_conversion_of_a_result() -> None:
    graph = graph_of()
    drop(graph, "all_reduce_invariant")
    assert complaint(checks.no_implicit_communication, graph) == (
        "%output takes %linear_1 as 'tp I', but it is 'tp P'\n"
        "  node    %output\n"
        "  why     a conversion is missing on this edge"
    )


def test_an_op_that_was_given_no_layouts() -> None:
    graph = graph_of()
    insert(graph, "gelu", aten.relu.default, wanted=())
    assert complaint(checks.no_implicit_communication, graph) == (
        "%relu_default has layouts for 0 of its 1 operands\n"
        "  node    %relu_default\n"
        f"  source  {MLP_LINE}\n"
        "  why     each use needs one layout"
    )


# ---- conversions ---------------------------------------------------------------------------------------------------


def test_one_reduction_in_the_place_of_another() -> None:
    graph = graph_of()
    node(graph, "all_reduce_invariant").target = runtime.all_reduce
    assert complaint(checks.conversions_are_rows, graph) == (
        "no conversion P→I is called all_reduce\n"
        "  node    %all_reduce_invariant   down\n"
        f"  source  {MLP_LINE}\n"
        "  why     the table has no such row"
    )


def test_a_conversion_that_no_row_of_the_table_has() -> None:
    graph = graph_of()
    broken = node(graph, "all_reduce_invariant")
    broken.meta["move"] = dataclasses.replace(broken.meta["move"], source=R, target=R)
    assert complaint(checks.conversions_are_rows, graph).startswith("no conversion R→R is called all_reduce_invariant")


def test_a_conversion_whose_ends_are_not_its_rows() -> None:
    graph = graph_of()
    place(graph, "all_reduce_invariant", R)
    assert complaint(checks.conversions_are_rows, graph) == (
        "all_reduce_invariant turns 'tp P' into 'tp R'\n"
        "  node    %all_reduce_invariant   down\n"
        f"  source  {MLP_LINE}\n"
        "  why     its row is tp P→I"
    )


def gather_of(graph: fx.GraphModule, axis: str = "tp") -> fx.Node:
    """A gather of an activation."""
    return next(
        n
        for n in graph.graph.nodes
        if n.target is runtime.all_gather and n.args[1] == MeshAxis((axis,)) and not n.meta.get("bucket")
    )


def test_a_conversion_that_is_called_along_another_dim_than_its_row() -> None:
    graph = graph_of("stack", "tp=2")
    gather = gather_of(graph)
    gather.kwargs = {"dim": 1}
    assert complaint(checks.conversions_are_rows, graph) == (
        "all_gather is called over tp and dim 1\n"
        f"  node    %{gather.name}   layers.0.norm\n"
        "  source  models.py:33   return x + self.mlp(self.norm(x))\n"
        "  why     its row is tp S(2)→R"
    )


def call_over(conversion: fx.Node, axis: str) -> None:
    arguments: tuple[Any, ...] = (conversion.args[0], MeshAxis((axis,)))
    conversion.args = arguments


def test_a_conversion_that_is_called_over_another_axis_than_its_row() -> None:
    graph = graph_of("stack", "dp_shard=2, tp=2")
    gather = gather_of(graph)
    call_over(gather, "dp_shard")
    assert "all_gather is called over dp_shard and dim 2\n" in complaint(
        checks.conversions_are_rows, graph, "dp_shard=2, tp=2"
    )


def test_a_conversion_that_changes_another_axis_too() -> None:
    graph = graph_of("stack", "dp_shard=2, tp=2")
    gather = gather_of(graph)
    place(graph, gather.name, R, "dp_shard")
    assert complaint(checks.conversions_are_rows, graph, "dp_shard=2, tp=2") == (
        "all_gather turns 'dp_shard S(0) · tp S(2)' into 'dp_shard R · tp R'\n"
        f"  node    %{gather.name}   layers.0.norm\n"
        "  source  models.py:33   return x + self.mlp(self.norm(x))\n"
        "  why     it may change tp only"
    )


def test_the_outer_axis_of_a_dim_moves() -> None:
    graph = graph_of("stack", "dp_shard=2, tp=2")
    gather = gather_of(graph)
    both = Layout((("dp_shard", "tp"), (), ()), ())
    gather.all_input_nodes[0].meta["layout"] = both
    gather.meta |= dict(layout=Layout((("tp",), (), ()), (("dp_shard", R),)), move=Move(("dp_shard",), S(0), R))
    call_over(gather, "dp_shard")
    gather.kwargs = {"dim": 0}
    assert complaint(checks.conversions_are_rows, graph, "dp_shard=2, tp=2") == (
        "dp_shard is not the minor axis of dim 0 in 'dp_shard S(0) · tp S(0)'\n"
        f"  node    %{gather.name}   layers.0.norm\n"
        "  source  models.py:33   return x + self.mlp(self.norm(x))\n"
        "  why     parts of a dim can only be joined or cut from the inside"
    )


def test_a_reduction_without_a_dtype() -> None:
    graph = graph_of()
    node(graph, "all_reduce_invariant").meta["forward_dtype"] = None
    assert complaint(checks.reductions_state_their_dtype, graph) == (
        "all_reduce_invariant adds in no stated dtype forward\n"
        "  node    %all_reduce_invariant   down\n"
        f"  source  {MLP_LINE}\n"
        "  why     sums round by dtype"
    )


def test_a_reduction_backward_without_a_dtype() -> None:
    graph = graph_of("stack", "tp=2")
    gather_of(graph).meta["backward_dtype"] = None
    assert complaint(checks.reductions_state_their_dtype, graph).startswith(
        "all_gather adds in no stated dtype backward"
    )


def test_a_collective_over_an_axis_that_the_mesh_lacks() -> None:
    graph = graph_of()
    broken = node(graph, "all_reduce_invariant")
    broken.meta["move"] = dataclasses.replace(broken.meta["move"], axes=("cp",))
    assert complaint(checks.same_collectives_on_every_rank, graph) == (
        "all_reduce_invariant over cp leaves ranks out\n"
        "  node    %all_reduce_invariant   down\n"
        f"  source  {MLP_LINE}\n"
        "  why     the mesh is 'tp=2'"
    )


@pytest.mark.parametrize("waited", [False, True])
def test_a_collective_whose_result_is_used_before_it_is_waited_for(waited: bool) -> None:
    graph = graph_of()
    insert(graph, "gelu", torch.ops._c10d_functional.all_reduce.default, "sum", "tp")
    if waited:
        insert(graph, "all_reduce_default", torch.ops._c10d_functional.wait_tensor.default)
        checks.waited_before_use(graph, MeshSpec.parse("tp=2"))
    else:
        assert complaint(checks.waited_before_use, graph) == (
            "%all_reduce_default starts _c10d_functional.all_reduce.default, and %linear_1 uses it\n"
            "  node    %all_reduce_default\n"
            f"  source  {MLP_LINE}\n"
            "  why     until it is waited for, the result of a collective is not there"
        )


def test_a_collective_that_nobody_waits_for() -> None:
    graph = graph_of()
    started = insert(graph, "gelu", torch.ops._c10d_functional.all_reduce.default, "sum", "tp")
    started.replace_all_uses_with(node(graph, "gelu"), delete_user_cb=lambda user: user is not started)
    assert ", and nothing waits for it\n" in complaint(checks.waited_before_use, graph)


# ---- duties --------------------------------------------------------------------------------------------------------


def entry(graph: fx.GraphModule, parameter: str) -> fx.Node:
    return next(n for n in graph.graph.nodes if n.meta.get("bucket") and n.meta["parameter"] == parameter)


def test_the_gradient_of_a_norm_weight_that_nobody_sums() -> None:
    graph = graph_of("stack", "tp=2")
    use = next(iter(entry(graph, "layers.0.norm.weight").users))
    drop(graph, entry(graph, "layers.0.norm.weight").name)
    place(graph, "p_layers_0_norm_weight", R)
    assert complaint(checks.reduced_exactly_once, graph) == (
        "the gradient of 'layers.0.norm.weight' is reduced 0 times over axis 'tp'\n"
        f"  node    %{use.name}\n"
        "  source  models.py:33   return x + self.mlp(self.norm(x))\n"
        "  why     it is P at this use, so it is due 1 time"
    )


def test_the_gradient_of_a_gathered_weight_that_nobody_scatters() -> None:
    graph = graph_of("stack", "dp_shard=2, tp=2")
    drop(graph, entry(graph, "head.weight").name)
    text = complaint(checks.reduced_exactly_once, graph, "dp_shard=2, tp=2")
    assert text.startswith("the gradient of 'head.weight' is reduced 0 times over axis 'dp_shard'\n")


def test_a_gradient_that_is_summed_twice() -> None:
    graph = graph_of("stack", "tp=2")
    first = entry(graph, "layers.0.norm.weight")
    insert(graph, first.name, first.target, "tp", move=first.meta["move"])
    text = complaint(checks.reduced_exactly_once, graph)
    assert text.startswith("the gradient of 'layers.0.norm.weight' is reduced 2 times over axis 'tp'\n")
    assert "why     it is P at this use, so it is due 1 time" in text


def test_a_gradient_that_is_summed_though_every_rank_has_its_own_part() -> None:
    graph = graph_of()
    weight = node(graph, "p_up_weight")
    move = Move(("tp",), I, R)
    insert(graph, "p_up_weight", runtime.replicate, "tp", move=move, bucket=True, backward_dtype=torch.float32)
    assert str(weight.meta["layout"]) == "tp S(0)"
    text = complaint(checks.reduced_exactly_once, graph)
    assert text.startswith("the gradient of 'up.weight' is reduced 1 times over axis 'tp'\n")
    assert "why     it is S(0) at this use, so it is due 0 times" in text


def test_the_duty_table_says_who_reduces_what_in_which_dtype() -> None:
    mesh = MeshSpec.parse("dp_shard=2, tp=2")
    rows = {(d.parameter, d.axis): str(d) for d in duties(graph_of("stack", str(mesh)), mesh)}
    assert rows["layers.0.norm.weight", "tp"].split("gradient ")[1] == "P, all_reduce torch.float32"
    assert rows["layers.0.mlp.up.weight", "tp"].split("gradient ")[1] == "S(0), – "
    assert rows["layers.0.mlp.up.weight", "dp_shard"].split("gradient ")[1] == "P, reduce_scatter torch.float32"


def test_the_duty_table_prints_equal_blocks_as_one_row() -> None:
    """Bytes by hand, of float32: 31 × 12 tokens and 20 × 12 up weights, of which tp shards a dim; a norm's 12."""
    table = str(nd.compile(Stack(4), "dp_shard=2, tp=2", tokens()).duties()).splitlines()
    assert table[:5] == [
        "parameter                 axis      gradient  reduced by      in       bytes  uses",
        "tokens.weight             dp_shard  P         reduce_scatter  float32    744     1",
        "tokens.weight             tp        S(1)      –               –            0     1",
        "layers.*.norm.weight      dp_shard  P         reduce_scatter  float32     48     4",
        "layers.*.norm.weight      tp        P         all_reduce      float32     48     4",
    ]
    assert "layers.*.mlp.up.weight    dp_shard  P         reduce_scatter  float32    480     4" in table
    assert len(table) == 1 + 2 * (1 + 6 + 1)


# ---- the deduction -------------------------------------------------------------------------------------------------


def test_a_result_that_its_operands_do_not_make() -> None:
    graph = graph_of()
    place(graph, "gelu", R)
    assert complaint(legal, graph) == (
        "%gelu is R on axis 'tp', but its operands make it S(1)\n"
        "  node    %gelu\n"
        f"  source  {MLP_LINE}\n"
        "  why     operands: S(1)"
    )


def test_an_invariant_operand_with_a_replicated_one() -> None:
    graph = graph_of()
    for name, placement in (("p_up_weight", R), ("p_up_bias", I)):
        place(graph, name, placement)
    assert complaint(legal, graph) == (
        "linear cannot take R, R, I on axis 'tp'\n"
        "  node    %linear   up\n"
        f"  source  {MLP_LINE}\n"
        "  why     an invariant operand mixed with another has the right value and a wrong gradient"
    )


def test_a_nonlinear_op_of_a_partial_value() -> None:
    graph = graph_of()
    place(graph, "linear", P())
    place(graph, "p_up_weight", S(1))
    place(graph, "x", S(1))
    place(graph, "p_up_bias", P())
    assert complaint(legal, graph) == (
        "gelu cannot take P on axis 'tp'\n"
        "  node    %gelu\n"
        f"  source  {MLP_LINE}\n"
        "  why     a nonlinear op of a partial value is not the partial value of its result"
    )


def test_a_number_added_to_a_partial_value() -> None:
    graph = graph_of()
    insert(graph, "linear_1", aten.add.Tensor, 1.0)
    assert complaint(legal, graph) == (
        "add cannot take P on axis 'tp'\n"
        "  node    %add_tensor   down\n"
        f"  source  {MLP_LINE}\n"
        "  why     a nonlinear op of a partial value is not the partial value of its result"
    )


def test_a_bias_that_each_rank_would_add() -> None:
    graph = graph_of()
    place(graph, "p_down_bias", R)
    drop(graph, "partial_invariant")
    assert complaint(legal, graph) == (
        "linear cannot take S(1), S(1), R on axis 'tp'\n"
        "  node    %linear_1   down\n"
        f"  source  {MLP_LINE}\n"
        "  why     the term that is not sharded would be counted once per tp rank"
    )


def test_operands_that_are_sharded_along_different_dims() -> None:
    graph = graph_of()
    place(graph, "x", S(0))
    assert complaint(legal, graph) == (
        "linear cannot take S(0), S(0), S(0) on axis 'tp'\n"
        "  node    %linear   up\n"
        f"  source  {MLP_LINE}\n"
        "  why     operands are sharded along dims that do not run together"
    )


def test_an_operand_that_is_whole_where_another_is_sharded() -> None:
    graph = graph_of()
    place(graph, "p_up_bias", R)
    assert complaint(legal, graph) == (
        "linear cannot take R, S(0), R on axis 'tp'\n"
        "  node    %linear   up\n"
        f"  source  {MLP_LINE}\n"
        "  why     one operand is sharded along a dim, another that has the dim is not"
    )


class Joined(nn.Module):
    """Tokens of all sequences in one dim, each times a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x).flatten(0, 1)
        y = y * torch.full((y.shape[0], 1), 2.0, device=x.device)
        return y.view(x.shape)


def test_a_draw_that_is_sharded_inside_of_a_dim() -> None:
    """A constant may be: its elements are alike. A rank's part of a draw is known by where it begins in a dim."""
    graph = nd.compile(Joined(), "cp=2", torch.ones(4, 8, 12), dynamic_dims={"x": {0: "b", 1: "s"}}).graph
    made = next(n for n in graph.graph.nodes if n.target is aten.full.default)
    assert str(made.meta["layout"]) == "cp S(0 in b)"
    legal(graph, MeshSpec.parse("cp=2"))
    made.target, made.args, made.kwargs = runtime.uniform, ((), None, 0), {}
    said = complaint(legal, graph, "cp=2").splitlines()[0]
    assert said == "%full is S(0 in b) on axis 'cp', but its operands make it R or S(0)"


def test_an_op_along_the_dim_that_is_sharded() -> None:
    graph = graph_of()
    insert(graph, "gelu", aten.softmax.int, 1)
    assert complaint(legal, graph) == (
        "softmax cannot take S(1) on axis 'tp'\n"
        "  node    %softmax_int\n"
        f"  source  {MLP_LINE}\n"
        "  why     the op acts along the sharded dim, which must be whole"
    )


def test_a_product_of_two_partial_values() -> None:
    graph = graph_of()
    made = insert(graph, "linear_1", aten.mul.Tensor)
    made.args = (made.args[0], made.args[0])
    assert complaint(legal, graph) == (
        "mul cannot take P, P on axis 'tp'\n"
        "  node    %mul_tensor   down\n"
        f"  source  {MLP_LINE}\n"
        "  why     each term of a sum needs exactly one partial operand, where the op is linear"
    )


def test_a_partial_value_added_to_a_whole_one() -> None:
    graph = graph_of()
    made = insert(graph, "linear_1", aten.add.Tensor)
    made.args = (made.args[0], node(graph, "x"))
    assert complaint(legal, graph).startswith("add cannot take P, R on axis 'tp'\n")


def test_a_partial_denominator() -> None:
    graph = graph_of()
    made = insert(graph, "linear_1", aten.div.Tensor)
    made.args = (node(graph, "x"), made.args[0])
    assert complaint(legal, graph).startswith("div cannot take R, P on axis 'tp'\n")


def test_a_parameter_that_lies_in_another_order_than_it_is_used() -> None:
    graph = graph_of("mlp", "tp.0=2, tp.1=2")
    weight = next(n for n in graph.graph.nodes if n.meta.get("name") == "up.weight")
    weight.meta["stored"] = Layout.make(2, {"tp.1": S(0), "tp.0": S(0)})
    assert complaint(checks.parameters_lie_where_they_are_used, graph, "tp.0=2, tp.1=2") == (
        "'up.weight' lies as 'tp.1 S(0) · tp.0 S(0)', but compute takes it as 'tp.0 S(0) · tp.1 S(0)'\n"
        f"  node    %{weight.name}\n"
        "  why     a rank would hold other rows than those that it uses"
    )


def test_a_conversion_that_is_lost_before_a_scaled_result() -> None:
    """What scales a gradient changes no layout."""
    mesh = "dp_shard=2, tp=2"
    graph = graph_of("mlp", mesh)
    scaled = next(n for n in graph.graph.nodes if "data_axes" in n.meta)
    drop(graph, scaled.all_input_nodes[0].name)
    assert complaint(legal, graph, mesh).startswith(
        f"%{scaled.name} is I on axis 'tp', but its operands make it P\n  node    %{scaled.name}"
    )
