"""Changes in place, buffers that a forward writes, blocks in lists, parts that are called twice."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.programs.builder import POINTS, Builder, Rejected, Value
from tests.programs.kinds import IN_BLOCKS, kind

WHOLE = (
    "{}.mul_(0.5)",
    "{}.add_(1)",
    "{}.clamp_(-1, 1)",
    "{0}[{0} > 1] = 0",
    "{}.tanh_()",
    "{0} += {0}.mean()",
    "{}.neg_()",
)
PART = ("{}[{}] = 0", "{}[{}] *= 2", "{}[{}] += 1", "{}[{}].mul_(0.5)", "{0}[{1}] = {0}[{1}].tanh()", "{}[{}].zero_()")


@kind(3)
def change(g: Builder) -> None:
    """Of a value, or of a copy of it; inputs may not be changed, which is tried seldom."""
    forbidden = g.chance(4)
    x = g.value(lambda v: v.rank > 0 and (forbidden or v.name[0] == "v"))
    if g.chance(60):
        x = g.let(f"{x}.clone()" if g.chance(70) else f"{x} * 1")
    if g.chance(40):
        g.write(g.pick(WHOLE).format(x, x), x.name)
        return
    dim = g.dim(x, lambda d: min(d.sizes) > 2) % x.rank
    index = ", ".join([":"] * dim + [g.pick((":2", "1:", "0", "-1", "::2"))])
    if g.chance(25):
        y = g.value(lambda v: v.dims == x.dims)
        g.write(f"{x}[{index}] = {y}[{index}]", x.name)
    else:
        g.write(g.pick(PART).format(x, index), x.name)


@kind(1)
def change_view(g: Builder) -> None:
    """Through a view that is used later."""
    x = g.value(lambda v: v.rank > 1)
    x = g.let(f"{x} + 0.5")
    view = g.let(f"{x}{g.pick(('.transpose(0, 1)', '[:, :1]', '.flatten(0, 1)', '.unsqueeze(0)', '[..., 0]'))}")
    g.write(f"{view}.mul_(2)", view.name, x.name)


@kind(2, in_blocks=False)
def remembered(g: Builder) -> None:
    """A buffer that the forward writes."""
    x = g.value(lambda v: v.rank > 1 and v.last is not None)
    dims = ", ".join(str(d) for d in range(x.rank - 1))
    held = g.buffer(f"torch.zeros({x.last})")
    mean = f"{x}.detach().mean(({dims}{',' if x.rank == 2 else ''}))"
    if g.chance(50):
        y = g.let(f"{x} + {held}")
        g.write(f"{held}.mul_(0.9).add_({mean}, alpha=0.1)", y.name)
    else:
        g.write(f"with torch.no_grad():\n    {held}.lerp_({mean}, 0.1)")
        g.let(f"{x} - {held}")


def body_of(g: Builder, name: str, x: Value, other: Value | None, length: int) -> None:
    """Adds a class that maps values like `x` (with one like `other`) to values like `x`."""

    def like(value: Value) -> Callable[[int, int], Tensor]:
        at = {(b, s): place[value.name] for (b, s), place in zip(POINTS, g.places, strict=True)}
        return lambda b, s: torch.empty_like(at[b, s], requires_grad=False)

    arguments = [("x", like(x))] + ([("y", like(other))] if other is not None else [])
    inner = Builder(name, g.random, arguments)
    inner.size_names("b, s = x.shape[:2]" if x.rank > 1 and x.dims[1].text == "s" else "b = x.shape[0]")
    for _ in range(length):
        attempt(inner, IN_BLOCKS)
    results = [v for v in inner.values.values() if v.name[0] == "v" and v.dims == x.dims and v.dtype == x.dtype]
    if results:
        result = results[-1].name
    else:
        last = inner.value(lambda v: v.last is not None and v.dims[:-1] == x.dims[:-1])
        result = inner.let(f"{inner.member(f'nn.Linear({last.last}, {x.last})')}({last})").name
    g.add_part(inner.body(f"x + {result}" if g.chance(60) else result))


def attempt(g: Builder, kinds: list[Callable[[Builder], object]]) -> None:
    """One statement of some kind; the next choice where it does not fit."""
    for _ in range(12):
        mark = g.mark()
        try:
            g.pick(kinds)(g)
            return
        except Rejected:
            g.back_to(mark)


@kind(4, in_blocks=False)
def blocks(g: Builder) -> None:
    """A list of equal blocks, called one after the other."""
    x = g.value(lambda v: v.rank in (2, 3) and v.last is not None and v.last > 1 and v.dims[0].text == "b")
    other = g.value(lambda v: v.name != x.name) if g.chance(25) else None
    name = f"Block{len(g.parts)}"
    body_of(g, name, x, other, g.random.randint(1, 5))
    count = g.random.randint(2, 4)
    held = g.member(f"nn.ModuleList({name}() for _ in range({count}))", prefix="blocks")
    y, more = f"v{g.count}", f", {other}" if other is not None else ""
    loops = (
        "{y} = {x}\nfor block in {held}:\n    {y} = block({y}{more})",
        "{y} = {x}\nfor block in {held}:\n    {y} = {y} + block({y}{more})",
        "{y} = {x}\nfor i, block in enumerate({held}):\n    {y} = block({y}{more}) / (i + 1)",
        "{y} = {x}\nfor block in {held}:\n    {y} = block({y}{more}) + {x}",
        "{y} = {held}[0]({x}{more})\nfor block in {held}[1:]:\n    {y} = block({y}{more}).tanh()",
        "{y} = {x}\nkept = []\nfor block in {held}:\n    {y} = block({y}{more})\n    kept.append({y})\n{y} = sum(kept)",
    )
    text = g.pick((loops[0], loops[0], *loops)).format(x=x, y=y, held=held, more=more)
    g.write(text, y)


@kind(1, in_blocks=False)
def part_twice(g: Builder) -> None:
    """A module that is called twice."""
    x = g.value(lambda v: v.rank in (2, 3) and v.last is not None and v.last > 1 and v.dims[0].text == "b")
    name = f"Part{len(g.parts)}"
    body_of(g, name, x, None, g.random.randint(1, 3))
    part = g.member(f"{name}()", prefix="part")
    y = g.let(f"{part}({x})")
    g.let(g.pick((f"{part}({y})", f"{part}({x} * 0.5) + {y}", f"{y} - {part}({x}.tanh())")))
