"""What starting may cost: importing the package next to nothing, a program that was kept two seconds."""

from __future__ import annotations

from pathlib import Path

from tests.bench.start import import_seconds, modules_of, start

COMPILER = ("sympy", "scipy", "networkx", "jinja2", "rich", "typer", "transformers", "torch._dynamo", "torch.export",
            "torch.distributed.tensor", "torch._inductor")  # fmt: skip
"""What compiling, reports and commands need, and `import ndcompile` must not load."""


def within(loaded: set[str], names: tuple[str, ...]) -> list[str]:
    return sorted(name for name in loaded if name.startswith(tuple(f"{name}." for name in names)) or name in names)


def test_import_loads_the_package_alone() -> None:
    loaded = modules_of("import ndcompile")
    assert loaded == {"ndcompile"}


def test_names_that_need_no_compiler_load_none() -> None:
    loaded = modules_of("import ndcompile as nd\nnd.MeshSpec, nd.Precision, nd.S, nd.R, nd.CompileError")
    assert within(loaded, COMPILER) == []
    assert within(loaded, ("ndcompile",)) == [
        "ndcompile", "ndcompile.errors", "ndcompile.mesh", "ndcompile.placement", "ndcompile.precision"
    ]  # fmt: skip


def test_a_program_that_was_kept_loads_no_compiler(tmp_path: Path) -> None:
    build = "import torch\nfrom tests.models import Mlp\nmodel, x = Mlp(), torch.zeros(4, 12)"
    compile = f"import ndcompile as nd\nprogram = nd.compile(model, 'tp=2', x, cache={str(tmp_path)!r})"
    assert "ndcompile.pipeline" in modules_of(compile, build)
    loaded = modules_of(compile, build)
    assert within(loaded, ("ndcompile.compiler", "ndcompile.pipeline", "ndcompile.capture", "ndcompile.codegen")) == []
    assert within(loaded, ("scipy", "rich", "typer", "jinja2", "transformers", "networkx")) == []


def test_import_costs_at_most_two_tenths_of_a_second_more_than_torch() -> None:
    assert import_seconds("ndcompile", runs=3) <= 0.2


def test_the_second_start_of_eight_billion_parameters_takes_two_seconds(tmp_path: Path) -> None:
    """A Llama 3 of 8 billion parameters without weights, on 256 ranks; seconds of CPU, which other work prolongs."""
    sizes = (32, 4096, 14336, 32, 8, 128256)
    _, kept = start("dp_shard=32, tp=8", tmp_path, *sizes)
    assert not kept
    seconds, kept = start("dp_shard=32, tp=8", tmp_path, *sizes)
    assert kept and seconds <= 2.0
