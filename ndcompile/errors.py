"""The one shape of every error that a user sees: what, where, why, and what to try."""

from __future__ import annotations

from collections.abc import Iterable

_LABEL_WIDTH = 8


class CompileError(ValueError):
    """Something about the model, the mesh or the inputs cannot be compiled or run as asked.

    ``what`` is one line in the user's names, ``where`` maps a label ("node", "source") to a place, ``why`` is the
    reason, and ``tries`` are things that would help.

    >>> print(CompileError("axis 'tp' appears twice", source="mesh", why="an axis names one dimension of the mesh"))
    axis 'tp' appears twice
      source  mesh
      why     an axis names one dimension of the mesh
    """

    def __init__(
        self,
        what: str,
        *,
        node: str | None = None,
        source: str | None = None,
        why: str | None = None,
        tries: str | Iterable[str] = (),
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = {label: text for label, text in (("node", node), ("source", source)) if text}
        self.why = why
        self.tries = (tries,) if isinstance(tries, str) else tuple(tries)

    def __str__(self) -> str:
        rows = [*self.where.items()]
        if self.why:
            rows.append(("why", self.why))
        rows += [("try", text) for text in self.tries]
        return "\n".join([self.what, *(_row(label, text) for label, text in rows)])

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by state: errors cross from worker processes to the one that reports them."""
        return _restore, (type(self), self.what, self.__dict__)


def _row(label: str, text: str) -> str:
    first, *rest = text.splitlines() or [""]
    indent = " " * (_LABEL_WIDTH + 2)
    return "\n".join([f"  {label:<{_LABEL_WIDTH}}{first}", *(indent + line for line in rest)])


def _restore(kind: type[CompileError], what: str, state: dict[str, object]) -> CompileError:
    error = kind.__new__(kind)
    ValueError.__init__(error, what)
    error.__dict__.update(state)
    return error


class NotOneGraph(Exception):
    """What a model does that no graph holds, as it is traced: why, and what to try. Capture adds the model and line."""

    def __init__(self, why: str, *tries: str) -> None:
        super().__init__(why)
        self.why, self.tries = why, tries


class CheckError(CompileError):
    """A compiled graph breaks a law of placements: a bug of the compiler, or of a rule that was registered."""


def tries_of_read(source: str | None, otherwise: str) -> tuple[str, ...]:
    """What to try where a line reads a value: an `assert` changes nothing, and can be left out."""
    asserts = source is not None and source.partition("   ")[2].startswith("assert ")
    return ("the assert outside of forward", "python -O, which leaves asserts out") if asserts else (otherwise,)
