"""A random sketch: inputs, statements, results; then a mesh and pins."""

from __future__ import annotations

import math
from random import Random

from hypothesis import strategies as st

from tests.programs import arithmetic, changes, layers, views
from tests.programs.builder import Builder, Rejected
from tests.programs.changes import attempt
from tests.programs.kinds import KINDS
from tests.programs.layers import VOCABULARY
from tests.programs.sketch import Input, Sketch, build

FAMILIES = (arithmetic, changes, layers, views)
"""The modules whose kinds are in the table."""

AXES = ("dp_replicate", "dp_shard", "tp")
WORLD = 8
PLACEMENTS = (
    "nd.S(0)", "nd.S(0)", "nd.S(1)", "nd.S(1)", "nd.R", "nd.I", "nd.S(-1)", "nd.S(2)", "Shard(0)", "Replicate()",
    "nd.P()",
)  # fmt: skip
"""Of pins; some are illegal, and must be refused."""


def generate(random: Random) -> Sketch:
    """A sketch of which every line fits its operands."""
    while True:
        try:
            return _sketch(random)
        except Rejected:
            continue


def _sketch(random: Random) -> Sketch:
    given = _inputs(random)
    g = Builder.of_inputs(random, given)
    _name_sizes(g, given)
    if given[0].high:
        layers.embedded(g)
    for _ in range(g.random.randint(1, 12)):
        attempt(g, KINDS)
    if g.chance(8):
        g.member("nn.Linear(3, 4)", prefix="unused")
    bodies = (*g.parts, g.body(_results(g)))
    used = tuple(x for x in given if x is given[0] or x.name in bodies[-1].text)
    names = tuple(x.name for x in used)
    bodies = (*bodies[:-1], bodies[-1].with_arguments(names))
    mesh = _mesh(g)
    sketch = Sketch(
        bodies, used, mesh, (), g.random.randint(1, 8), g.pick((6, 6, 8, 4, 3)), not g.chance(8)
    )  # fmt: skip
    return sketch.with_pins(_pins(g, sketch))


def _inputs(random: Random) -> list[Input]:
    """One main input, and others of which those are kept that are used."""
    width = (4, 6, 8, 12, 16)[random.randint(0, 4)]
    main = (
        Input("ids", ("b", "s"), VOCABULARY), Input("x", ("b", width)), Input("x", ("b", "s", width)),
        Input("x", ("b", 4, width)),
    )[(0, 0, 1, 2, 2, 3)[random.randint(0, 5)]]  # fmt: skip
    more = [Input("target", main.dims if not main.high else ("b",))]
    more.append(Input("labels", main.dims if main.high else main.dims[:-1], VOCABULARY))
    if main.dims[1] == "s":
        more += [Input("mask", ("b", "s"), 1), Input("place", ("b",), 2)]
    return [main, *more]


def _name_sizes(g: Builder, given: list[Input]) -> None:
    main = given[0]
    if main.dims[1] != "s":
        g.size_names(f"b = {main.name}.shape[0]")
    else:
        g.size_names(f"b, s = {main.name}.shape[:2]")


def _results(g: Builder) -> str:
    """A value, a tuple, a dict, a dict of lists; a scalar of all that was made, more often than not."""
    made = [v for v in g.values.values() if v.name[0] == "v" and v.floating]
    if not made:
        raise Rejected
    ends = [v for v in made if not any(v.name in s.uses for s in g.statements)] or made[-1:]
    sums = [f"{v}.{g.pick(('mean', 'sum'))}()" if v.rank else v.name for v in ends]
    loss = " + ".join(sums)
    one = g.pick(made[-4:]).name
    other = g.pick(made).name
    return g.pick(
        (
            loss, one, f"({loss}, {one})", f'{{"loss": {loss}, "y": {one}}}', f'{{"loss": {loss}, "y": {one}}}',
            f'{{"loss": {loss}, "kept": [{one}, {other}]}}', f"({one}, [{other}, None])", f"{loss}, {other}.detach()",
            f'{{"loss": {loss}, "count": 3, "y": {one}.tanh()}}',
        )
    )  # fmt: skip


def _mesh(g: Builder) -> str:
    """One to three axes of 2 to 4 ranks, of at most 8 together; `tp` may come in parts."""
    sizes: dict[str, int] = {}
    for axis in AXES:
        left = WORLD // math.prod(sizes.values())
        if left >= 2 and g.chance(75 if axis == "tp" else 45):
            sizes[axis] = g.pick([n for n in (2, 2, 3, 4) if n <= left])
    if not sizes:
        sizes["tp"] = 2
    if sizes.get("tp") == 4 and g.chance(30):
        sizes |= {"tp.0": 2, "tp.1": 2}
        del sizes["tp"]
    return ", ".join(f"{axis}={size}" for axis, size in sizes.items())


def _pins(g: Builder, sketch: Sketch) -> tuple[tuple[str, str, str], ...]:
    """Of a third of the programs with `tp`: parameters or modules by name or wildcard."""
    if "tp" not in sketch.mesh or not g.chance(33):
        return ()
    model = build(sketch)
    names = [name for name, _ in model.named_parameters()] + [name for name, _ in model.named_modules() if name]
    names += ["*.weight", "m*", "p*", "*"] + ["blocks*.0.*"] * any(n.startswith("blocks") for n in names)
    axis = "tp.1" if "tp.0" in sketch.mesh and g.chance(20) else "tp"
    return tuple((g.pick(names), axis, g.pick(PLACEMENTS)) for _ in range(g.pick((1, 1, 2))))


sketches = st.builds(generate, st.randoms(use_true_random=False))
"""Every choice is hypothesis'."""
