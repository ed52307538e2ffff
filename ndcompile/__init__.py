"""ndcompile: write a model for one device, declare a mesh, get a readable module that runs on the mesh.

The public names load on first use, so that emitted code, which imports only `ndcompile.runtime`, loads no compiler.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ndcompile.api import compile, load, parallelize
    from ndcompile.errors import CompileError
    from ndcompile.mesh import MeshSpec
    from ndcompile.placement import I, Layout, P, R, S
    from ndcompile.precision import Precision
    from ndcompile.program import Program
    from ndcompile.rules.registry import register_rule
    from ndcompile.runtime.module import ParallelModule
    from ndcompile.verify import verify
    from ndcompile.verify.real_ranks import verify_on_ranks

__version__ = "0.1.0"

_HOME = {
    "compile": "api",
    "load": "api",
    "parallelize": "api",
    "ParallelModule": "runtime.module",
    "CompileError": "errors",
    "MeshSpec": "mesh",
    "I": "placement",
    "Layout": "placement",
    "P": "placement",
    "R": "placement",
    "S": "placement",
    "Precision": "precision",
    "Program": "program",
    "register_rule": "rules.registry",
    "verify": "verify",
    "verify_on_ranks": "verify.real_ranks",
}

__all__ = [
    "CompileError",
    "I",
    "Layout",
    "MeshSpec",
    "P",
    "ParallelModule",
    "Precision",
    "Program",
    "R",
    "S",
    "compile",
    "load",
    "parallelize",
    "register_rule",
    "verify",
    "verify_on_ranks",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'ndcompile' has no attribute {name!r}")
    value = getattr(import_module(f"ndcompile.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
