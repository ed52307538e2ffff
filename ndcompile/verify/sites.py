"""A call in an emitted text, in pieces: where bugs are planted."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from ndcompile.mesh import MeshSpec
from ndcompile.placement import BY_NAME


@dataclass(frozen=True)
class Site:
    """A call in the text: `name` of the function, and its source in pieces."""

    call: ast.Call
    name: str
    mesh: MeshSpec
    how: str = ""
    """`start` or `once`, where the call is of a block in halves: a wrong call in its place is done at once."""

    def arguments(self, skip: int = 0, /, **changed: str | None) -> str:
        """The arguments as written from the `skip`th on, with some keywords changed (None: left out)."""
        listed = [ast.unparse(a) for a in self.call.args[skip:]]
        words = {k.arg: ast.unparse(k.value) for k in self.call.keywords if k.arg} | changed
        return ", ".join(listed + [f"{k}={v}" for k, v in words.items() if v is not None])

    @property
    def text(self) -> str:
        return ast.unparse(self.call)

    @property
    def first(self) -> str:
        return ast.unparse(self.call.args[0])

    def keyword(self, name: str) -> str | None:
        return next((ast.unparse(k.value) for k in self.call.keywords if k.arg == name), None)

    @property
    def axis(self) -> str | None:
        """The variable of the axis that the call works over."""
        if self.name in BY_NAME:
            return ast.unparse(self.call.args[1])
        if self.name == "arange" and len(self.call.args) > 3:
            return ast.unparse(self.call.args[3])
        return self.keyword("axis")

    def with_axis(self, axis: str) -> str:
        """The call over another axis."""
        if self.axis is None:
            return self.text
        given = [ast.unparse(a) for a in self.call.args]
        at = 1 if self.name in BY_NAME else 3 if self.name == "arange" else None
        if at is None:
            return f"{self.name}({self.arguments(axis=axis)})"
        given[at] = axis
        words = [f"{k.arg}={ast.unparse(k.value)}" for k in self.call.keywords]
        return f"{self.name}({', '.join(given + words)})"

    @property
    def row(self) -> str:
        """The primitive that the forward of a conversion is."""
        return BY_NAME[self.name].forward if self.name in BY_NAME else ""

    @classmethod
    def of(cls, call: ast.Call, mesh: MeshSpec) -> Site | None:
        """The site of a call on one line; none where it has no name, or is a conversion without its ranks."""
        name, how = call.func.id if isinstance(call.func, ast.Name) else "", ""
        if name in ("start", "once") and isinstance(call.args[0], ast.Name):
            name, how = call.args[0].id, name
            call = ast.copy_location(ast.Call(call.args[0], call.args[1:], call.keywords), call)
        if not name or call.lineno != call.end_lineno or (name in BY_NAME and len(call.args) < 2):
            return None
        return cls(call, name, mesh, how)

    def others(self) -> list[str]:
        """Other axes of the mesh, of the same size."""
        axes = {name.replace(".", "_"): self.mesh.size(name) for name in self.mesh.names}
        return [name for name, size in axes.items() if name != self.axis and size == axes.get(self.axis or "")]
