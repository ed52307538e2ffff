"""What was proved, what is equal over a prime field, what was tested, and what was not checked."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ndcompile.program import Program


@dataclass
class Claim:
    """One kind of evidence, in words that are not mixed with another's: `held` is None where nothing can be said."""

    kind: str
    held: bool | None
    evidence: list[str]
    seconds: float


@dataclass
class Report:
    """What `nd.verify` found; `print` shows it on one screen, `bool` says whether nothing differs."""

    title: str
    claims: list[Claim]
    sizes: list[str]
    """Of each case that ran, the mesh, and the sizes that are not the program's own."""
    differences: list[str] = field(default_factory=list)
    begins: str = ""
    """The first value that is wrong, and the line of the emitted text that makes it."""
    not_checked: list[str] = field(default_factory=list)
    program: Program | None = field(default=None, repr=False)
    """What the page shows more of: its collectives, and who reduces which gradient."""
    source: str = field(default="", repr=False)
    """The text that ran."""

    @property
    def equal(self) -> bool:
        """No claim failed, and at least one arithmetic compared the whole program."""
        compared = [c for c in self.claims if c.kind.startswith(("equal", "tested"))]
        return all(c.held is not False for c in self.claims) and any(c.held for c in compared)

    def __bool__(self) -> bool:
        return self.equal

    @property
    def seconds(self) -> float:
        return sum(claim.seconds for claim in self.claims)

    def __str__(self) -> str:
        lines = [f"{self.title}: {'equal to one device' if self.equal else 'NOT equal to one device'}"]
        for claim in self.claims:
            state = {True: "", False: "FAILED: ", None: "not said: "}[claim.held]
            lines += _row(claim.kind, [state + claim.evidence[0], *claim.evidence[1:]], f"{claim.seconds:.1f} s")
        lines += _row("sizes", self.sizes)
        if self.differences:
            more = [f"and {len(self.differences) - 5} more"] if len(self.differences) > 5 else []
            lines += _row("differences", [*self.differences[:5], *more])
        if self.begins:
            lines += _row("begins at", self.begins.splitlines())
        lines += _row("not checked", self.not_checked)
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The same as plain data."""
        claims = [asdict(claim) for claim in self.claims]
        texts = {name: getattr(self, name) for name in ("title", "sizes", "differences", "begins", "not_checked")}
        return dict(claims=claims, equal=self.equal, seconds=self.seconds, **texts)

    def to_markdown(self) -> str:
        """The claims as a table for a model card."""
        words = {True: "yes", False: "**no**", None: "not said"}
        told = ["; ".join(c.evidence).replace("|", "\\|") for c in self.claims]
        rows = [f"| {c.kind} | {words[c.held]} | {text} |" for c, text in zip(self.claims, told, strict=True)]
        verdict = "equal to one device" if self.equal else "**not equal to one device**"
        return "\n".join([f"{self.title}: {verdict}", "", "| claim | holds | evidence |", "|---|---|---|", *rows])

    def to_html(self) -> str:
        """The same as one page, which loads nothing from elsewhere; with the emitted source, a table of who reduces
        which gradient and one of the collectives.
        """
        from ndcompile.verify.page import page

        return page(self)


def _row(label: str, texts: list[str], tail: str = "") -> list[str]:
    first, *rest = texts or ["nothing"]
    return [f"  {label:<15} {first}{'   ' + tail if tail else ''}", *(f"  {'':<15} {text}" for text in rest)]
