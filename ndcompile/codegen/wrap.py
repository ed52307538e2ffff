"""How lines of an emitted module are laid out: indented, and long ones over several lines."""

from __future__ import annotations

WIDTH = 120


def wrapped(lines: list[str]) -> list[str]:
    """Each line without a comment that is too long: its targets, and what stands in its last parentheses, in rows."""
    return [part for line in lines for part in _split(line)]


def _split(line: str) -> list[str]:
    code = line.strip()
    margin = line[: len(line) - len(code)]
    if len(line) <= WIDTH or "  # " in line or not code:
        return [line]
    targets, equals, call = code.partition(" = ")
    if not equals:
        targets, call = "", code
    if call.startswith("return ") and not call.endswith(")"):
        return [f"{margin}return (", *_rows(call[len("return ") :], margin), f"{margin})"]
    opening = _opening(call)
    if opening is None:
        return [line]
    closing = call.rindex(")")
    head, inside, tail = call[: opening + 1], call[opening + 1 : closing], call[closing:]
    before = [f"{margin}(", *_rows(targets, margin)] if ", " in targets else []
    start = f"{margin}) = " if before else f"{margin}{targets}{equals}"
    return [*before, start + head, *_rows(inside, margin), margin + tail]


def _opening(call: str) -> int | None:
    """Where the last closing parenthesis was opened."""
    depth = 0
    for at in range(call.rfind(")"), -1, -1):
        depth += (call[at] == ")") - (call[at] == "(")
        if depth == 0:
            return at
    return None


def _rows(text: str, margin: str) -> list[str]:
    """Comma-separated parts, as many a row as fit."""
    rows = [f"{margin}   "]
    for part in _parts(text):
        if len(rows[-1]) + len(part) + 2 > WIDTH and rows[-1].strip():
            rows.append(f"{margin}   ")
        rows[-1] += f" {part},"
    return rows


def _parts(text: str) -> list[str]:
    """Cut at the commas that stand in no parentheses."""
    found, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            found.append("")
        else:
            found[-1] += letter
    return [part.strip() for part in found if part.strip()]


def indented(lines: list[str], width: int) -> list[str]:
    return [" " * width + line for line in lines]


def commented(code: str, comment: str) -> str:
    """A line of code, and behind it at one place for all a comment, if there is one."""
    return f"{code:<72}  # {comment}" if comment else code
