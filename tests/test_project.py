"""The project's own shape: who imports whom, what ships, and what stays out."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LEAVES = {"errors"}
"""What any module may import: the shape of errors."""

MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "mesh": set(),
    "size": set(),
    "placement": {"mesh"},
    "cost": {"placement"},
    "route": {"placement", "cost", "mesh"},
    "rules": {"placement", "size", "mesh"},
    "axes": {"placement", "mesh", "size"},
    "autocast": set(),
    "inputs": {"runtime"},
    "counts": {"runtime"},
    "blocks": set(),
    "twin": {"blocks", "held"},
    "while_traced": {"counts"},
    "held": set(),
    "regions": {"autocast"},
    "literals": {"runtime"},
    "loss": set(),
    "objects": set(),
    "withheld": {"blocks"},
    "checkpoints": {"runtime"},
    "remat": {"runtime"},
    "forwards": set(),
    "borders": {"blocks", "forwards", "objects", "withheld", "checkpoints", "runtime"},
    "fold": {"blocks", "borders"},
    "rounded": {"runtime"},
    "answers": {"codegen", "rounded", "runtime"},
    "known": {"answers", "rounded", "runtime"},
    "units": {"axes", "known", "mesh", "size"},
    "conditions": {"codegen", "known", "rounded", "runtime"},
    "labels": {"autocast", "counts", "known", "rounded", "runtime"},
    "drawn": {"runtime"},
    "own_backward": {"forwards", "runtime"},
    "capture": {
        "autocast",
        "inputs",
        "runtime",
        "twin",
        "regions",
        "synonyms",
        "functional",
        "labels",
        "literals",
        "counts",
        "precision",
    }
    | {"blocks", "drawn", "own_backward", "withheld", "borders", "fold", "remat", "conditions", "known"}
    | {"while_traced"},
    "dtypes": {"rules"},
    "checks": {"placement", "mesh", "duties", "deduction"},
    "deduction": {"placement", "mesh", "size"},
    "duties": {"placement", "mesh"},
    "codegen": {"placement", "mesh", "size", "rules", "fold"},
    "runtime": {"placement", "mesh"},
    "choose": {"rules", "route", "cost", "placement", "mesh", "size"},
    "problem": {"rules", "axes", "choose", "cost", "placement", "mesh", "size", "fold", "units"},
    "pins": {"axes", "placement", "mesh"},
    "heads": {"rules"},
    "request": {"autocast", "inputs", "mesh", "pins", "precision", "remat", "twin"},
    "compiler": {"capture", "codegen", "dtypes", "pins", "pipeline", "planning", "program", "request"},
    "cache": {
        "compiler",
        "inputs",
        "mesh",
        "objects",
        "placement",
        "precision",
        "program",
        "request",
        "rules",
        "runtime",
        "twin",
        "autocast",
    },
    "bind": {"runtime", "program", "placement", "mesh", "size"},
}
"""Part → the parts that it may import, besides itself and `errors`. Parts that are not named may import any."""

NEVER = {"demo", "cli", "tables", "models"}
"""The outside: only the outside imports it."""


def part(module: str) -> str:
    """`ndcompile.rules.views` is of the part `rules`; what `python -m` runs is the outside."""
    if module.endswith(".__main__"):
        return "cli"
    return module.split(".")[1] if "." in module else ""


def sources() -> Iterator[tuple[str, Path]]:
    """Every module of the package with its file, passes by their name in the package."""
    for path in sorted([*ROOT.glob("ndcompile/**/*.py"), *ROOT.glob("passes/*.py")]):
        relative = path.relative_to(ROOT)
        if relative.parts[:2] == ("ndcompile", "passes"):
            continue
        names = list(relative.with_suffix("").parts)
        names = ["ndcompile", *names] if names[0] == "passes" else names
        yield ".".join(names[:-1] if names[-1] == "__init__" else names), path


def imports(tree: ast.AST) -> Iterator[str]:
    """Every imported module; `from ndcompile import mesh` is `ndcompile.mesh`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


MODULES = dict(sources())


@pytest.mark.parametrize("module", [name for name in MODULES if name != "ndcompile"])
def test_module_imports_only_what_its_part_may(module: str) -> None:
    own = part(module)
    found = {part(name) for name in imports(ast.parse(MODULES[module].read_text())) if name.startswith("ndcompile.")}
    found -= {own, *LEAVES, "__version__"}
    if own not in NEVER:
        assert not found & NEVER, f"{module} imports the outside"
    if own in MAY_IMPORT:
        assert found <= MAY_IMPORT[own], f"{module} may not import {sorted(found - MAY_IMPORT[own])}"


@pytest.mark.parametrize("module", [name for name in MODULES if name != "ndcompile.runtime.private"])
def test_private_torch_names_stay_in_one_module(module: str) -> None:
    names = set(private_torch_names(ast.parse(MODULES[module].read_text())))
    private = sorted(name for name in names if not allowed_private(name))
    assert not private, f"{module} uses {private}: give ndcompile.runtime.private a function for it"


WITHOUT_PUBLIC_NAME = ("torch._ops.OpOverload", "torch.utils._pytree")
"""What an exported graph is made of, and what has no public name: the class of its targets, the trees of its inputs."""


def allowed_private(name: str) -> bool:
    return name.startswith(WITHOUT_PUBLIC_NAME) or any(whole.startswith(f"{name}.") for whole in WITHOUT_PUBLIC_NAME)


PRIVATE_ATTRIBUTES = re.compile(r"^(_local_tensor|_spec|_flatten|_unflatten|_saved_tensors_hooks_.*|_base)$")


def private_torch_names(tree: ast.AST) -> Iterator[str]:
    """Imports of torch with a name that starts with `_`, attribute chains with one, and the insides of DTensor."""
    for name in imports(tree):
        if name.split(".")[0] == "torch" and any(p.startswith("_") and not p.startswith("__") for p in name.split(".")):
            yield name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            chain = dotted(node)
            if chain.startswith(("torch.", "dist.")) and re.search(r"\._[a-z]", chain):
                yield chain
            elif PRIVATE_ATTRIBUTES.match(node.attr) and chain != f"self.{node.attr}":
                yield f".{node.attr}"


def dotted(node: ast.expr) -> str:
    """`a.b.c` of an attribute chain that starts at a name, else its end alone."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def test_pipeline_folder_cannot_be_imported_by_its_file_name() -> None:
    done = python("import passes")
    assert done.returncode != 0
    assert "import ndcompile.passes, not passes" in done.stderr


def test_runtime_loads_no_compiler() -> None:
    done = python("import sys, ndcompile.runtime\nprint(*sorted(n for n in sys.modules if n.startswith('ndcompile.')))")
    assert done.returncode == 0, done.stderr
    assert {part(name) for name in done.stdout.split()} <= {"runtime", "mesh", "placement", "errors"}


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)


def test_every_public_name_is_there() -> None:
    done = python("import ndcompile as nd\nfor name in nd.__all__: getattr(nd, name)")
    assert done.returncode == 0, done.stderr


def test_wheel_holds_the_tree(tmp_path: Path) -> None:
    copy = tmp_path / "tree"
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", ".git", ".venv", ".*_cache")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=ignore)
    build = "from setuptools.build_meta import build_wheel; build_wheel('wheel')"
    (copy / "wheel").mkdir()
    done = subprocess.run([sys.executable, "-c", build], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = copy.glob("wheel/*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    data = {"ndcompile/py.typed", "ndcompile/verify/report.html"}
    expected = {wheel_name(path) for path in MODULES.values()} | data
    assert names == expected


def wheel_name(path: Path) -> str:
    relative = path.relative_to(ROOT).as_posix()
    return f"ndcompile/{relative}" if relative.startswith("passes/") else relative


ALLOWED = {"pyproject.toml", "README.md", "ndcompile", "passes", "tests", "examples", "docs"}


@pytest.fixture(scope="module")
def tracked() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [Path(name) for name in done.stdout.split("\0") if name and (ROOT / name).exists()]


def test_top_level_holds_only_what_was_agreed(tracked: list[Path]) -> None:
    top = {path.parts[0] for path in tracked}
    assert {name for name in top if not name.startswith(".")} <= ALLOWED


FOLDERS_OF_MACHINES = ("work", "root", "home", "Users")
MACHINE_PATH = re.compile(rf"(?<![\w.}}])/({'|'.join(FOLDERS_OF_MACHINES)})/|\.\./{'shared'}")


def test_no_machine_path_in_tracked_files(tracked: list[Path]) -> None:
    found = [
        f"{path}:{number}"
        for path in tracked
        if not (ROOT / path).is_symlink()
        for number, line in enumerate((ROOT / path).read_text().splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert found == []


@pytest.mark.parametrize(
    "command",
    [
        ("ruff", "check", "."),
        ("ruff", "format", "--check", "."),
        ("mypy", "ndcompile", "tests"),
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_clean(command: tuple[str, ...]) -> None:
    environment = {**os.environ, "NO_COLOR": "1"}
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ci_runs_the_test_command_of_the_readme():
    command = (ROOT / ".ci" / "run").read_text().splitlines()[-1]
    assert command.endswith("pytest -n 2")
    assert command in (ROOT / "README.md").read_text().splitlines()
