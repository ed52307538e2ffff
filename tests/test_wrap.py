"""Long statements of emitted text over several lines."""

from __future__ import annotations

import ast

from ndcompile.codegen.wrap import WIDTH, wrapped


def test_short_lines_and_commented_ones_stay() -> None:
    lines = ["    x = f(a, b)", "    x = f(" + "a, " * 60 + ")  # tp S(1)"]
    assert wrapped(lines) == lines


def test_targets_and_arguments_stand_in_rows() -> None:
    targets = ", ".join(f"count_{i}" for i in range(14))
    given = ", ".join(f'self.buffer("layers.{i}.running_mean")' for i in range(4))
    assert wrapped([f'    {targets} = self.block("blocks.0")(x, {given})']) == [
        "    (",
        "        " + "".join(f"count_{i}, " for i in range(12)).rstrip(),
        "        count_12, count_13,",
        '    ) = self.block("blocks.0")(',
        '        x, self.buffer("layers.0.running_mean"), self.buffer("layers.1.running_mean"),',
        '        self.buffer("layers.2.running_mean"), self.buffer("layers.3.running_mean"),',
        "    )",
    ]


def test_what_is_wrapped_means_the_same() -> None:
    many = ", ".join(f"value_{i}" for i in range(30))
    for line in (
        f"{many} = f(x, (a, b), g(x, y), {many})",
        f"x = self.block(0)({many})",
        f"def compute(w, {many}):\n    pass",
        f"def compute({many}):\n    return {many}",
    ):
        lines = wrapped(line.split("\n"))
        assert ast.dump(ast.parse("\n".join(lines))) == ast.dump(ast.parse(line))
        assert all(len(part) <= WIDTH for part in lines)
