"""What a compiled program depends on, hashed part by part: two compilations with one key give one text."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ndcompile.autocast import Autocast
from ndcompile.cache.values import form, is_plain, is_whole
from ndcompile.cache.walk import Unseen, Walk
from ndcompile.inputs import Inputs
from ndcompile.request import Request, ambient_autocast
from ndcompile.rules.registry import given_rules
from ndcompile.runtime import private
from ndcompile.runtime.manifest import digest


@dataclass(frozen=True)
class Key:
    """Each part's hash by its name; `str` is the name of an entry."""

    parts: Mapping[str, str]

    def __str__(self) -> str:
        return _hash(dict(self.parts))

    def differs(self, other: Key) -> list[str]:
        """The parts in which two keys differ."""
        return [name for name in {**self.parts, **other.parts} if self.parts.get(name) != other.parts.get(name)]


def key_of(request: Request) -> Key:
    """The key of the program that is asked for. Raises `Unseen` where a part cannot be described."""
    model, asked = request.model, request.asked
    options = dict(vars(asked) | vars(asked.precision), of_other_mode=request.of_other_mode)
    del options["precision"]
    walk = Walk({id(tensor): name for name, tensor in _tensors(model).items()})
    parts = {
        "ndcompile": own_source(),
        "versions": _hash(_versions()),
        "mesh": _hash(repr(request.mesh)),
        "pins": _hash([(name, [(axis, repr(p)) for axis, p in by.items()]) for name, by in request.pins.items()]),
        "options": _hash([(name, _plainly(value)) for name, value in sorted(options.items())]),
        "rules": _hash(_rules()),
        "torch's state": _hash(_state(ambient_autocast(model))),
        "parameters": _hash([(name, kind(t), *form(t)) for name, t in _tensors(model).items()]),
        "ties": _hash(_ties(model)),
        "buffers": _hash([(name, "meta" if b.is_meta else digest(b)) for name, b in model.named_buffers()]),
        "inputs": _inputs(request.example),
        "model": walk.digest(model, "model"),
    }
    return Key(parts | {"packages": _hash(_packages(walk.packages))})


def key_or_why(request: Request) -> Key | str:
    """The key of the program that is asked for, or why it has none."""
    try:
        return key_of(request)
    except Unseen as unseen:
        return str(unseen)
    except Exception as error:  # whatever the user's objects raise when they are looked at
        return f"{type(error).__name__} while the model was looked at: {error}"


def kind(tensor: Tensor) -> str:
    """The class of a parameter or buffer, which is torch's own."""
    if not is_whole(tensor):
        raise Unseen(f"the model holds a {type(tensor).__name__}, whose state cannot be seen")
    return type(tensor).__name__


def _rules() -> list[tuple[str, str]]:
    found = []
    for op, text in given_rules().items():
        if text is None:
            raise Unseen(f"the rule for {op} was replaced")
        found.append((op, text))
    return found


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _ties(model: nn.Module) -> list[tuple[str, str]]:
    first = {id(t): name for name, t in reversed(_tensors(model).items())}
    every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return [(name, first[id(t)]) for name, t in every if first[id(t)] != name]


def _inputs(example: Inputs) -> str:
    """The structure, of each tensor the form, and of each other leaf the value."""
    leaves, spec = pytree.tree_flatten((example.args, example.kwargs), is_leaf=lambda v: v is None)
    return _hash([str(spec), *map(_leaf, leaves)])


def _leaf(value: Any) -> Any:
    if isinstance(value, Tensor) and is_whole(value):
        return form(value)
    if is_plain(value):
        return repr(value)
    raise Unseen(f"an example input is a {type(value).__name__}")


def _plainly(value: Any) -> str:
    """An option as text: numbers, texts, dtypes, tuples and lists of them, and mappings to them."""
    if isinstance(value, Mapping):
        return repr([(name, _plainly(v)) for name, v in value.items()])
    if isinstance(value, (tuple, list)):
        return repr([_plainly(v) for v in value])
    if value is None or isinstance(value, (bool, int, str, torch.dtype)):
        return repr(value)
    raise Unseen(f"an option holds a {type(value).__name__}")


def _state(autocast: Autocast | None) -> list[str]:
    """What of torch's global state decides how a model is traced."""
    if private.modes_are_on():
        raise Unseen("a torch function mode or dispatch mode is on")
    casts = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    now = [torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
    devices = [torch.get_default_device().type, torch.cuda.is_available()]
    settings = [torch.are_deterministic_algorithms_enabled(), torch.distributed.is_initialized()]
    return [repr(value) for value in (autocast, casts, now, devices, settings)]


@functools.cache
def _versions() -> list[str]:
    libraries = [f"{name} {importlib.metadata.version(name)}" for name in ("sympy", "scipy", "numpy")]
    built = [torch.__version__, str(torch.version.git_version), platform.machine(), sys.platform]
    return [sys.version, *built, *libraries]


def _packages(names: set[str]) -> list[tuple[str, str]]:
    """The version of each package that the model's code is in, if it says one."""
    held = ((name, getattr(sys.modules.get(name), "__version__", "")) for name in sorted(names))
    return [(name, version) for name, version in held if isinstance(version, str)]


@functools.cache
def own_source() -> str:
    """A hash of this package's own files."""
    root, found = Path(__file__).resolve().parents[1], hashlib.sha256()
    for folder in (root, (root / "passes").resolve()):
        for path in sorted(folder.rglob("*.py")):
            found.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
