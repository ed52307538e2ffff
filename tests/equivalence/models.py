"""Every model of this folder on every mesh of 2, 4 and 8 ranks beside one device, in float64 mode.

    python -m tests.equivalence.models                     all models: figures to docs/models.json, the page from them
    python -m tests.equivalence.models --missing           those that have no figures, or not for all meshes
    python -m tests.equivalence.models --only GPT-2 ViT    some
    python -m tests.equivalence.models --page              the page again, from the figures that are there

Figures are written model by model, so a run that was stopped goes on with `--missing`.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import tempfile
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, cast

import torch
import transformers

import ndcompile as nd
from ndcompile.program import Program
from ndcompile.runtime.masks import Mask
from tests import ranks
from tests.equivalence.captures import captured_once
from tests.equivalence.compare import Case, Outcome, distances, make, measure, on_one_device, prepare, train
from tests.equivalence.registry import MODELS, WORLDS, meshes, meshes_of

ranks.PRELOAD += ["transformers.modeling_utils", "ndcompile.compiler", "tests.equivalence.compare"]
FIGURES = Path(__file__).parents[2] / "docs" / "models.json"
PAGE = FIGURES.with_suffix(".md")
KINDS = {"loss": "result loss", "other results": "result", "norm": "gradient norm", "gradients": "gradient",
         "step": "parameter", "buffers": "buffer"}  # fmt: skip
"""Column → how the names of its distances start (`compare.distances`); the first column that fits takes a distance."""


@dataclass
class Row:
    """What was found of one model.

    `distances` has, for each mesh that fits, the largest over ranks and steps of each of `KINDS`; `refused` and
    `failed` the text for each mesh that does not fit or went wrong; `itself` how far the reference graph is from the
    untouched model in double precision (None where dropout makes them differ); `whole` says of what tp does not shard
    why, by the parameters' names; `masks` how attention is masked.
    """

    distances: dict[str, dict[str, float]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    itself: float | None = None
    whole: dict[str, list[str]] = field(default_factory=dict)
    share: float = 0.0
    masks: list[str] = field(default_factory=list)
    on: str = ""
    """The versions that it was measured with."""

    def worst(self, kind: str) -> float | None:
        return max((far[kind] for far in self.distances.values() if kind in far), default=None)


# ---- measuring -----------------------------------------------------------------------------------------------------


def measured(name: str, before: Row | None = None) -> Row:
    """One model on all meshes that `before` has no figures of."""
    with captured_once():
        return _measured(name, before)


def _measured(name: str, row: Row | None) -> Row:
    versions = f"{torch.__version__.partition('+')[0]}, {transformers.__version__}"
    if row is None:
        row = Row(itself=from_itself(name))
        describe(row, name)
    row.failed.clear()
    row.on = "; ".join(dict.fromkeys([*filter(None, row.on.split("; ")), versions]))
    for world_size in WORLDS:
        with tempfile.TemporaryDirectory() as folder:
            known = row.distances.keys() | row.refused.keys()
            chosen = [mesh for mesh in meshes(world_size) if mesh in meshes_of(name) and mesh not in known]
            folders = _prepared(row, name, chosen, Path(folder))
            if not folders:
                continue
            answers = (
                ranks.run(world_size, measure_each, folders, timeout=60.0 + 60.0 * len(folders)) if folders else []
            )
        for mesh, *theirs in zip(folders, *answers, strict=True):
            _take(row, mesh, theirs)
    return row


def _prepared(row: Row, name: str, chosen: list[str], folder: Path) -> dict[str, Path]:
    found = {}
    for number, mesh in enumerate(chosen):
        place = folder / str(number)
        place.mkdir()
        try:
            found[mesh] = prepare(Case(name, mesh), place)
        except nd.CompileError as error:
            (row.refused if type(error) is nd.CompileError else row.failed)[mesh] = str(error).splitlines()[0]
    return found


def measure_each(folders: Mapping[str, Path]) -> list[Outcome | str]:
    """On a rank: all cases; of one that goes wrong, the traceback."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    found: list[Outcome | str] = []
    for folder in folders.values():
        try:
            found.append(measure(folder))
        except Exception:
            found.append(traceback.format_exc())
    return found


def _take(row: Row, mesh: str, theirs: list[Outcome | str]) -> None:
    wrong = [answer for answer in theirs if isinstance(answer, str)]
    if wrong:
        if not row.failed:
            print(wrong[0])
        row.failed[mesh] = wrong[0].strip().splitlines()[-1]
        return
    worst: dict[str, float] = {}
    for outcome in theirs:
        assert isinstance(outcome, Outcome)
        for what, far in outcome.distances.items():
            kind = next(kind for kind, start in KINDS.items() if what.partition(": ")[2].startswith(start))
            worst[kind] = max(worst.get(kind, 0.0), far)
    row.distances[mesh] = {kind: float(f"{far:.1e}") for kind, far in worst.items()}


def from_itself(name: str) -> float | None:
    """How far the reference graph's first step is from that of the untouched model, which casts as it likes.

    transformers' experts are told to use their plain loop, since their default takes no double precision.
    """
    [steps] = on_one_device(name, True)
    model, batch = make(Case(name, ""))
    if hasattr(getattr(model, "config", None), "_experts_implementation"):
        cast(Any, model).set_experts_implementation("eager")
    if nd.compile(model, "", batch, float64=True).manifest.random:
        return None
    [own, *_] = train(model, model, batch, 1e-8)
    far = {what: value for what, value in distances(0, own, steps[0]).items() if "parameter" not in what}
    return float(f"{max(far.values()):.1e}")


def describe(row: Row, name: str) -> None:
    """How attention is masked, and what tp leaves whole on two ranks, if they fit."""
    row.masks = sorted(masks(_compiled(name, "")))
    try:
        program = _compiled(name, "tp=2")
    except nd.CompileError:
        return
    whole = [n for n, p in program.parameters.items() if p.layout.on("tp").whole]
    for parameter in whole:
        names = row.whole.setdefault(_reason(program, parameter), [])
        pattern = re.sub(r"\b\d+\b", "*", parameter)
        if pattern not in names:
            names.append(pattern)
    nbytes = {n: p.local_bytes(program.mesh) for n, p in program.parameters.items()}
    row.share = round(sum(nbytes[n] for n in whole) / sum(nbytes.values()), 4)


def _compiled(name: str, mesh: str) -> Program:
    model, batch = make(Case(name, mesh))
    return nd.compile(model, mesh, batch, float64=True)


def _reason(program: Program, parameter: str) -> str:
    """From `explain`: not allowed, no program with it sharded, or none that is cheaper."""
    try:
        text = program.explain(parameter)
    except nd.CompileError:
        return "the model does not use it"
    others = [line for line in text.splitlines() if line.strip().startswith("S(")]
    if not others:
        return "it may only be whole: fewer rows, or heads of keys and values, than ranks"
    return "no rule can shard it" if all("no program" in line for line in others) else "sharding it costs more"


def masks(program: Program) -> set[str]:
    """How each attention op of the program is masked: by name, by a dense mask, or not at all."""
    found = set()
    for node in program.graph.graph.nodes:
        name = getattr(node.target, "__name__", str(node.target))
        if node.op == "call_function" and "attention" in name and "shape" in node.meta:
            by_place = dict(zip(PLACES.get(name, ()), node.args, strict=False))
            named = [part for part in PARTS if (by_place | dict(node.kwargs)).get(part) not in (None, False)]
            dense = ["dense"] * (by_place.get("mask") is not None)
            found.add(" & ".join(named + dense) or "none")
    return found


PARTS = tuple(part.name for part in fields(Mask))
PLACES = {
    "scaled_dot_product_attention.default": ("q", "k", "v", "mask", "p", "causal"),
    "attention_with_dropout": ("q", "k", "v", "mask", "p", "key", "site", "causal"),
}


# ---- the page ------------------------------------------------------------------------------------------------------


def page(rows: Mapping[str, Row]) -> str:
    """docs/models.md from the figures."""
    missing = ", ".join(name for name in MODELS if name not in rows)
    tail = f"\nNot measured yet: {missing}." if missing else ""
    return "\n".join([HEAD, *_table(rows), tail, WHOLE, *_whole(rows), REFUSED, *_refused(rows), ""])


HEAD = """# Models

Every model of `tests/equivalence` as it comes, small, on every mesh of 2, 4 and 8 ranks of up to three axes
(`dp_replicate`, `dp_shard`, `cp` of 2 and 4, `tp`: 33 meshes; for some models those of 2 and 4 ranks without `cp`:
9) that fits, against one device on the global batch, in float64 mode: [equivalence.md](equivalence.md) says how that is
measured. In each sample another number of tokens is masked.

`python -m tests.equivalence.models` ran it and wrote this page; the figures of each mesh are in
[models.json](models.json). A figure is the largest distance over meshes, ranks and two steps of clipped AdamW; the
bar is 1e-10. "Itself" is how far results and gradients of the reference graph are from those of the untouched model
in double precision, which may cast to float32 inside; its bar is 1e-5 (–: dropout draws other numbers). Masks that are
not named are dense. "On" is the versions of torch and transformers.

| model | meshes | loss | other results | norm | gradients | step | buffers | itself | masks of attention | on |
|---|---|---|---|---|---|---|---|---|---|---|"""

WHOLE = """
## What tp leaves whole, and why

On two ranks. Why is what `program.explain` says, at nominal sizes. The share is of the bytes of all parameters that a
rank holds, at these small sizes.

| model | share | parameters | why |
|---|---|---|---|"""

REFUSED = """
## Meshes that do not fit

| model | meshes | why |
|---|---|---|"""


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.0e}" if value else "0"


def _table(rows: Mapping[str, Row]) -> list[str]:
    lines = []
    for name, row in rows.items():
        fit, ran = len(meshes_of(name)) - len(row.refused), len(row.distances)
        figures = " | ".join(_number(value) for value in (*map(row.worst, KINDS), row.itself))
        count = f"{ran}" if ran == fit else f"{ran} of {fit}"
        lines.append(f"| {name} | {count} | {figures} | {', '.join(row.masks) or '–'} | {row.on} |")
    return lines


def _whole(rows: Mapping[str, Row]) -> list[str]:
    lines = []
    for name, row in rows.items():
        for why, names in row.whole.items():
            lines.append(f"| {name} | {row.share:.1%} | {', '.join(f'`{n}`' for n in names)} | {why} |")
            name = ""
    return lines


def _refused(rows: Mapping[str, Row]) -> list[str]:
    lines = []
    for name, row in rows.items():
        over_cp = {mesh for mesh in meshes_of(name) if "cp" in mesh}
        for why in dict.fromkeys(row.refused.values()):
            found = [mesh for mesh, text in row.refused.items() if text == why]
            shown = ["all with cp"] if over_cp <= set(found) else []
            shown += [mesh for mesh in found if not shown or mesh not in over_cp]
            lines.append(f"| {name} | {'; '.join(shown)} | {why} |")
    return lines


# ---- the files -----------------------------------------------------------------------------------------------------


def read() -> dict[str, Row]:
    """The figures that are there, in the order of the registry."""
    held = json.loads(FIGURES.read_text()) if FIGURES.is_file() else {}
    return {name: Row(**held[name]) for name in MODELS if name in held}


def write(rows: Mapping[str, Row]) -> None:
    lines = [f"{json.dumps(name)}: {json.dumps(asdict(row))}" for name, row in rows.items()]
    FIGURES.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    PAGE.write_text(page(rows))


def complete(name: str, row: Row | None) -> bool:
    """A model has figures for every mesh that fits, and none has failed."""
    return row is not None and not row.failed and row.distances.keys() | row.refused.keys() == set(meshes_of(name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--missing", action="store_true")
    parser.add_argument("--page", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    names = [name for name in asked.only if not (asked.missing and complete(name, read().get(name)))]
    for name in [] if asked.page else names:
        begin = time.perf_counter()
        row = measured(name, read().get(name) if asked.missing else None)
        rows = read() | {name: row}
        write({each: rows[each] for each in MODELS if each in rows})
        worst = max((far for distance in row.distances.values() for far in distance.values()), default=None)
        print(
            f"{name}: {len(row.distances)} meshes in {time.perf_counter() - begin:.0f} s, furthest {worst}", flush=True
        )
        for mesh, text in (*row.refused.items(), *row.failed.items()):
            print(f"  {mesh}: {text}", flush=True)
    write(read())


if __name__ == "__main__":
    main()
