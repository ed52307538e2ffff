"""What every error for users looks like."""

import pickle

from ndcompile.errors import CompileError

BIAS = CompileError(
    "cannot add P(sum) to S(0) on axis 'tp'",
    node="%add = aten.add(%mm, %bias)      model.layers.0.mlp",
    source="model.py:41   return x @ w + b",
    why="the bias would be counted once per tp rank",
    tries=("shard 'b' with x", "add it after the reduction"),
)


def test_an_error_says_what_where_why_and_what_to_try():
    assert str(BIAS) == (
        "cannot add P(sum) to S(0) on axis 'tp'\n"
        "  node    %add = aten.add(%mm, %bias)      model.layers.0.mlp\n"
        "  source  model.py:41   return x @ w + b\n"
        "  why     the bias would be counted once per tp rank\n"
        "  try     shard 'b' with x\n"
        "  try     add it after the reduction"
    )


def test_an_error_without_a_place_is_its_first_line():
    assert str(CompileError("the mesh is empty")) == "the mesh is empty"


def test_a_second_line_stands_under_the_first():
    assert str(CompileError("no", why="one\ntwo", tries="this")) == "no\n  why     one\n          two\n  try     this"


def test_an_error_crosses_processes_whole():
    copy = pickle.loads(pickle.dumps(BIAS))
    assert (type(copy), str(copy), copy.where) == (CompileError, str(BIAS), BIAS.where)


def test_an_error_is_a_value_error():
    assert issubclass(CompileError, ValueError)
