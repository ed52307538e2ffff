"""What a program depends on is in its key: each change of it misses, no change hits, and what can't be seen is told."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ndcompile as nd
from ndcompile.cache.key import Key, key_or_why
from ndcompile.cache.walk import Walk
from ndcompile.inputs import Inputs
from ndcompile.mesh import MeshSpec
from ndcompile.pins import read_pins
from ndcompile.precision import Precision
from ndcompile.request import Asked, Request
from tests.cache.counting import counted

OTHER = """
SHIFT = 1.0

def shifted(x):
    return x + SHIFT

def never_called(x):
    return x * 7.0
"""

USER = """
from functools import partial, wraps

import torch
import users_other as other
from torch import nn
from torch.nn import functional as F

SCALE = 2.0
TABLE = {"relu": torch.relu, "tanh": torch.tanh}
TENSOR = torch.tensor([1.0, 2.0, 3.0, 4.0])

class Settings:
    def __init__(self):
        self.activation = "relu"
        self.nested = {"power": [2, {"more": 3}]}

def doubled(function):
    factor = 2.0
    @wraps(function)
    def inner(*args):
        return function(*args) * factor
    return inner

def raised(x, by=0.5, *, less=0.25):
    return x + by - less

@doubled
def product(x):
    return x * 1.5

class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 3.0

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3.0

class Base(nn.Module):
    weight_of_base = 1.25

    def scaled(self, x):
        return x * SCALE

    def tuned(self, x):
        return x * 1.75

    def unreached(self, x):
        return x * 8.0

    @property
    def half(self):
        return 0.5

class Model(Base):
    def __init__(self):
        super().__init__()
        self.settings = Settings()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)
        self.register_buffer("shift", torch.tensor([0.5, 1.0, 1.5, 2.0]))
        self.mask = torch.tensor([1.0, 0.0, 1.0, 1.0])
        self.eager = partial(raised, by=0.75)
        self.kind = "tuned"
        self.down.weight.factor = 3.0
        self.unused_object = [1, 2, (3, "four")]

    def forward(self, x):
        x = TABLE[self.settings.activation](self.up(x))
        x = self.scaled(self.down(x)) * self.weight_of_base * self.half
        x = product(raised(other.shifted(x))) ** self.settings.nested["power"][0]
        x = getattr(self, self.kind)(self.eager(x)) * self.mask
        return Sign.apply(x) + self.shift + (lambda y: y * 0.125)(x)
"""

CHANGES = {
    "forward": ("+ self.shift +", "- self.shift +"),
    "a lambda in it": ("y * 0.125", "y * 0.25"),
    "the order of its ops": ("self.scaled(self.down(x))", "self.down(self.scaled(x) * 1)[..., :4]"),
    "a constant": ("SCALE = 2.0", "SCALE = 2.5"),
    "an integer that was a float": ("SCALE = 2.0", "SCALE = 2"),
    "what a table holds": ('"relu": torch.relu', '"relu": torch.sigmoid'),
    "a tensor of the module's": ("TENSOR = torch.tensor([1.0,", "MORE = 1\nTENSOR = torch.tensor([1.0,"),
    "a value of the config": ('activation = "relu"', 'activation = "tanh"'),
    "a value deep in the config": ('"power": [2,', '"power": [3,'),
    "a value in a closure": ("factor = 2.0", "factor = 2.25"),
    "a decorator's wrapper": ("function(*args) * factor", "function(*args) + factor"),
    "what is decorated": ("return x * 1.5", "return x * 1.625"),
    "a default": ("by=0.5,", "by=0.625,"),
    "a default of a keyword": ("less=0.25", "less=0.375"),
    "what a partial holds": ("by=0.75", "by=0.875"),
    "a custom gradient": ("return gradient * 3.0", "return 3.0 * gradient"),
    "a custom forward": ("return x * 3.0", "return x * 3.5"),
    "a method of the base": ("return x * SCALE", "return x / SCALE"),
    "an attribute of the base": ("weight_of_base = 1.25", "weight_of_base = 1.5"),
    "a property": ("return 0.5", "return 0.25"),
    "a method that is found by its name": ("return x * 1.75", "return x * 1.875"),
    "which method that is": ('kind = "tuned"', 'kind = "scaled"'),
    "a tensor that is no buffer": ("self.mask = torch.tensor([1.0,", "self.mask = torch.tensor([0.0,"),
    "a buffer's value": ("torch.tensor([0.5, 1.0", "torch.tensor([0.5, 1.25"),
    "whether a buffer is one": ('self.register_buffer("shift", ', 'setattr(self, "shift", '),
    "an attribute of a parameter": ("weight.factor = 3.0", "weight.factor = 3.5"),
    "a width": ("self.up = nn.Linear(4, 8)", "self.up = nn.Linear(4, 8, bias=False)"),
    "a class of the tree": ("self.up = nn.Linear(4, 8)", "self.up = nn.Sequential(nn.Linear(4, 8))"),
    "what is frozen": ("self.up = nn.Linear(4, 8)", "self.up = nn.Linear(4, 8).requires_grad_(False)"),
    "a dtype": ("self.up = nn.Linear(4, 8)", "self.up = nn.Linear(4, 8).half()"),
}  # fmt: skip
"""By what is changed: a piece of the text, and what stands in its place."""

OF_OTHERS = {
    "a function of another module": ("return x + SHIFT", "return x - SHIFT"),
    "a constant of another module": ("SHIFT = 1.0", "SHIFT = 1.5"),
}

NO_MATTER = {
    "a method that nobody calls": ("return x * 8.0", "return x * 9.0"),
    "an equal text": ("", ""),
}


def loaded(folder: Path, name: str, text: str) -> ModuleType:
    """A module of the user's with this text, in place of an earlier one."""
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    exec(compile(text, str(path), "exec"), vars(module))
    return module


@pytest.fixture(autouse=True)
def no_modules_are_left() -> Iterator[None]:
    yield
    for name in ("users_model", "users_other"):
        sys.modules.pop(name, None)


def users_model(folder: Path, text: str = USER, other: str = OTHER) -> nn.Module:
    loaded(folder, "users_other", other)
    torch.manual_seed(0)
    model = loaded(folder, "users_model", text).Model()
    assert isinstance(model, nn.Module)
    return model


X = torch.zeros(6, 4)


def asked(model: nn.Module, mesh: str = "tp=2", example: object = X, pins: Any = None, **options: Any) -> Request:
    spec = MeshSpec.parse(mesh)
    plain: dict[str, Any] = dict(
        precision=Precision(), local_outputs=False, float64=False, dynamic_dims=None, cp_attention=None,
        pad_inputs=False, halves=False, remat=None, reshard=True,
    )  # fmt: skip
    return Request(model, spec, Inputs.of(example), read_pins(pins, spec), Asked(**plain | options))


def key(model: nn.Module, *args: Any, **options: Any) -> Key:
    found = key_or_why(asked(model, *args, **options))
    assert isinstance(found, Key), found
    return found


def replaced(text: str, piece: str, by: str) -> str:
    assert piece in text, f"{piece!r} is in the text"
    return text.replace(piece, by)


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_of_the_model_misses(what: str, tmp_path: Path) -> None:
    before = key(users_model(tmp_path))
    assert key(users_model(tmp_path)) == before, "equal models have equal keys"
    assert key(users_model(tmp_path, replaced(USER, *CHANGES[what]))) != before


@pytest.mark.parametrize("what", OF_OTHERS)
def test_a_change_of_another_module_misses(what: str, tmp_path: Path) -> None:
    before = key(users_model(tmp_path))
    assert key(users_model(tmp_path, other=replaced(OTHER, *OF_OTHERS[what]))) != before


@pytest.mark.parametrize("what", NO_MATTER)
def test_a_change_of_what_no_forward_reaches_hits(what: str, tmp_path: Path) -> None:
    before = key(users_model(tmp_path))
    assert key(users_model(tmp_path, replaced(USER, *NO_MATTER[what]))) == before


def test_a_line_that_moves_misses(tmp_path: Path) -> None:
    """Emitted comments name lines of the model's source."""
    before = key(users_model(tmp_path))
    assert key(users_model(tmp_path, "\n" + USER)).differs(before) == ["model"]


def test_a_hit_gives_the_text_and_results_of_a_miss(tmp_path: Path) -> None:
    options: dict[str, Any] = dict(cache=tmp_path / "kept")
    with counted() as missed:
        first = nd.compile(users_model(tmp_path), "tp=2", X, **options)
    with counted() as hit:
        second = nd.compile(users_model(tmp_path), "tp=2", X, **options)
    assert (missed.captures, hit.captures) == (1, 0)
    assert str(second) == str(first) and second.manifest.to_json() == first.manifest.to_json()
    assert second.parameters == first.parameters and second.mesh == first.mesh
    with counted() as again:
        assert second.collectives() == first.collectives()
        assert nd.verify(second, seeds=1)
    assert again.captures >= 1 and "compiled again: its graphs are asked for" in again.log[0]


@pytest.mark.parametrize("what", ["forward", "a value in a closure", "a buffer's value", "a custom gradient"])
def test_a_miss_is_compiled_anew(what: str, tmp_path: Path) -> None:
    cache, changed = tmp_path / "kept", replaced(USER, *CHANGES[what])
    nd.compile(users_model(tmp_path), "tp=2", X, cache=cache)
    with counted() as found:
        program = nd.compile(users_model(tmp_path, changed), "tp=2", X, cache=cache)
    assert found.captures == 1
    assert str(program) == str(nd.compile(users_model(tmp_path, changed), "tp=2", X, cache="off"))


ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "another mesh": ("mesh", dict(mesh="tp=4")),
    "another axis": ("mesh", dict(mesh="dp_shard=2")),
    "a pin": ("pins", dict(pins={"up.weight": {"tp": nd.S(1)}})),
    "another pin": ("pins", dict(pins={"up.weight": {"tp": nd.S(0)}})),
    "the dtype of compute": ("options", dict(precision=Precision(compute=torch.bfloat16))),
    "the dtype of reductions": ("options", dict(precision=Precision(reduce=torch.float64))),
    "local outputs": ("options", dict(local_outputs=True)),
    "float64": ("options", dict(float64=True)),
    "the way of attention": ("options", dict(cp_attention="ring")),
    "pads": ("options", dict(pad_inputs=True)),
    "halves": ("options", dict(halves=True)),
    "what is recomputed": ("options", dict(remat="block")),
    "what is recomputed, by block": ("options", dict(remat={"up": ("linear",)})),
    "which weights stay": ("options", dict(reshard=False)),
    "casts of inputs": ("options", dict(precision=Precision(cast_inputs=False))),
    "names of dims": ("options", dict(dynamic_dims={"x": {0: "b", 1: "s"}})),
    "a longer input": ("inputs", dict(example=torch.zeros(6, 3, 4))),
    "an input of another dtype": ("inputs", dict(example=X.double())),
    "an input with a gradient": ("inputs", dict(example=X.clone().requires_grad_())),
    "an input by keyword": ("inputs", dict(example={"x": X})),
    "one more input": ("inputs", dict(example=(X, 2))),
}


@pytest.mark.parametrize("what", ASKED)
def test_a_change_of_what_is_asked_misses(what: str, tmp_path: Path) -> None:
    part, options = ASKED[what]
    model = users_model(tmp_path)
    assert key(model, **options).differs(key(model)) == [part]


def test_all_that_is_asked_has_a_key_of_its_own(tmp_path: Path) -> None:
    model = users_model(tmp_path)
    keys = [key(model), *(key(model, **options) for _, options in ASKED.values())]
    assert all(str(a) != str(b) for a, b in itertools.combinations(keys, 2))


def test_the_other_mode_misses(tmp_path: Path) -> None:
    model = users_model(tmp_path)
    assert key(model.train()) != key(model.eval())


def test_one_module_in_eval_misses(tmp_path: Path) -> None:
    model = users_model(tmp_path)
    before = key(model)
    model.get_submodule("up").eval()
    assert key(model).differs(before) == ["model"]


def test_another_tie_misses() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    before = key(model)
    model["b"].weight = model["a"].weight
    assert "ties" in key(model).differs(before)


@pytest.mark.parametrize("strict", [True, False])
def test_the_order_of_a_dict_matters_if_it_is_the_users_own(strict: bool) -> None:
    """One of a package's (`strict=False`) may be made of a set, which has another order in each process."""

    def seen(value: dict[str, int]) -> str:
        walk = Walk({})
        walk.value(value, strict, "it")
        return walk._hash.hexdigest()

    there, back = dict(a=1, b=2), dict(b=2, a=1)
    assert (seen(there) == seen(back)) != strict
    assert seen(there) == seen(dict(there)) != seen(dict(a=1, b=3))


def test_weights_do_not_matter(tmp_path: Path) -> None:
    model = users_model(tmp_path)
    before = key(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert key(model) == before


def test_the_versions_and_the_own_source_are_in_the_key(tmp_path: Path) -> None:
    model = users_model(tmp_path)
    before = key(model)
    with mock.patch("ndcompile.cache.key.own_source", lambda: "another"):
        assert key(model).differs(before) == ["ndcompile"]
    with mock.patch("ndcompile.cache.key._versions", lambda: ["another"]):
        assert key(model).differs(before) == ["versions"]


def test_autocast_and_the_default_dtype_are_in_the_key(tmp_path: Path) -> None:
    model = users_model(tmp_path)
    before = key(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert key(model).differs(before) == ["torch's state"]
    torch.set_default_dtype(torch.float64)
    try:
        assert key(model).differs(before) == ["torch's state"]
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_rule_of_the_users_is_in_the_key(tmp_path: Path) -> None:
    from ndcompile.rules import registry

    model = users_model(tmp_path)
    before = key(model)
    with mock.patch.dict(registry.RULES), mock.patch.dict(registry._GIVEN):
        nd.register_rule("aten.deg2rad.default", "* n -> * n")
        assert key(model).differs(before) == ["rules"]
        registry.RULES["aten.deg2rad.default"] = registry.RULES["aten.relu.default"]
        assert "the rule for aten.deg2rad.default was replaced" in str(key_or_why(asked(model)))
    assert key(model) == before


def test_what_stands_in_place_of_torchs_functions_is_in_the_key(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    before = key(model)
    with mock.patch.object(F, "gelu", lambda x, approximate="none": x * 2.0):
        twice = key(model)
    with mock.patch.object(F, "gelu", lambda x, approximate="none": x * 3.0):
        assert len({before.parts["model"], twice.parts["model"], key(model).parts["model"]}) == 3
    with mock.patch.object(nn.Linear, "forward", lambda self, x: x):
        assert key(model) != before
    with mock.patch.object(torch.Tensor, "add", lambda self, x: x):
        assert key(model) != before
    assert key(model) == before


def test_a_loss_function_is_in_the_key() -> None:
    from ndcompile.loss import with_loss

    def keyed(factor: float) -> Key:
        return key(with_loss(nn.Linear(4, 4), lambda outputs, labels: (outputs - labels).sum() * factor))

    assert keyed(2.0) == keyed(2.0) and keyed(2.0).differs(keyed(3.0)) == ["model"]


OPERATOR = """
import torch
from torch import nn

@torch.library.custom_op("users_ops::scaled", mutates_args=())
def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * 2.0

@scaled.register_fake
def _(x):
    return torch.empty_like(x)

class Model(nn.Module):
    def forward(self, x):
        return CALL
"""


@pytest.mark.parametrize("call", ["scaled(x)", "torch.ops.users_ops.scaled(x)"])
@pytest.mark.parametrize("change", [("x * 2.0", "x * 3.0"), ("torch.empty_like(x)", "x.new_empty(x.shape)")])
def test_the_functions_of_an_operator_are_in_the_key(call: str, change: tuple[str, str], tmp_path: Path) -> None:
    text = OPERATOR.replace("CALL", call)
    before = key(users_model(tmp_path, text))
    assert key(users_model(tmp_path, text)) == before
    assert key(users_model(tmp_path, replaced(text, *change))).differs(before) == ["model"]


HEAD = "import torch\nfrom torch import nn\n"
UNSEEN = {
    "the clock": ("import time\n", "x * time.time()", "time"),
    "the environment": ("import os\n", "x * float(os.environ['A'])", "os"),
    "a number by chance": ("from random import random\n", "x * random()", "random"),
    "its rank": ("import torch.distributed as dist\n", "x * dist.get_rank()", "dist"),
    "a file": ("", "x * float(open('a').read())", "open"),
    "code made as it runs": ("", "eval('x * 2')", "eval"),
    "an object of C's": ("import zlib\nHELD = zlib.compressobj()\n", "x * (HELD is None)", "HELD"),
    "an object with such a one in it": (
        "import zlib\nclass Held:\n    pass\nHELD = Held()\nHELD.deep = [zlib.compressobj()]\n",
        "x * bool(HELD)", "deep",
    ),
    "an operator of C's": (
        "LIBRARY = torch.library.Library('users_c', 'FRAGMENT')\n"
        "LIBRARY.define('twice(Tensor x) -> Tensor') if not hasattr(torch.ops.users_c, 'twice') else None\n",
        "torch.ops.users_c.twice(x)", "users_c::twice",
    ),
    "a module that it loads": ("", "__import__('json') and x", "__import__"),
    "a module that is not loaded": ("", "self.late(x)", "users_late"),
}  # fmt: skip


@pytest.mark.parametrize("what", UNSEEN)
def test_what_cannot_be_seen_is_not_kept_and_told(what: str, tmp_path: Path) -> None:
    head, result, told = UNSEEN[what]
    late = "    def late(self, x):\n        import users_late\n        return users_late.f(x)\n"
    text = f"{HEAD}{head}class Model(nn.Module):\n    def forward(self, x):\n        return {result}\n{late}"
    why = key_or_why(asked(users_model(tmp_path, text)))
    assert isinstance(why, str) and told in why, why


def test_such_a_model_is_compiled_each_time_and_the_log_says_why(tmp_path: Path) -> None:
    text = f"{HEAD}import os\nclass Model(nn.Module):\n    def forward(self, x):\n        return x * len(os.sep)\n"
    for _ in range(2):
        with counted() as found:
            nd.compile(users_model(tmp_path, text), "dp_shard=2", X, cache=tmp_path / "kept")
        assert found.captures == 1
        assert found.log == [
            "Model is compiled anew at each start: Model.forward, function Model.forward reads os: "
            "a program cannot be kept for that"
        ]
    assert not (tmp_path / "kept").exists()


def test_a_hook_a_mode_and_a_tensor_of_another_class_cannot_be_seen() -> None:
    class Own(torch.Tensor):
        pass

    model = nn.Linear(4, 4)
    with torch.device("meta"):
        assert "mode is on" in str(key_or_why(asked(model)))
    handle = model.register_forward_hook(lambda *_: None)
    assert key_or_why(asked(model)) == "model has a hook"
    handle.remove()
    model.weight = nn.Parameter(torch.zeros(4, 4).as_subclass(Own))
    assert "Own" in str(key_or_why(asked(model)))


def test_a_model_that_raises_when_it_is_looked_at_has_no_key() -> None:
    class Odd(dict[str, int]):
        def __len__(self) -> int:
            raise LookupError("no length")

    model = nn.Linear(4, 4)
    setattr(model, "held", Odd())  # noqa: B010
    assert key_or_why(asked(model)) == "LookupError while the model was looked at: no length"
