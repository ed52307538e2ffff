"""What backward recomputes and what forward gives back, as the user asks for it, a block or a pattern of blocks."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ndcompile.errors import CompileError
from ndcompile.runtime.remat import SAVABLE

Saved = tuple[str, ...] | None
"""The results in a block that are kept, where backward recomputes the rest; None: all that it needs is kept."""

Policy = str | Sequence[str]
"""`"none"`, `"block"`, or the names of the results that are saved."""

Remat = Policy | Mapping[str, Policy] | None
Reshard = bool | Mapping[str, bool]

ROOT = ""
"""The name of what stands between blocks, as `named_modules` has it."""


@dataclass(frozen=True)
class Kept:
    """What is kept from forward to backward: by block, the results saved; and where gathered weights stay."""

    saved: Mapping[str, tuple[str, ...]]
    """Blocks of which backward recomputes all but these results."""
    gathered: frozenset[str] = frozenset()
    """Blocks (and `""`, all between them) whose gathered weights stay until backward."""

    def marks(self) -> dict[str, str]:
        """What tells blocks apart, as pins do: a name in each block that is not like the others, with a text."""
        texts = {f"{block}.(recomputed)": str(saved) for block, saved in self.saved.items()}
        return texts | {f"{block}.(gathered)": "" for block in self.gathered if block}


def read_kept(remat: Remat, reshard: Reshard, blocks: Collection[str], checkpointed: Collection[str]) -> Kept:
    """The user's options for each of the model's blocks; without `remat`, those the model checkpoints are recomputed.

    Raises `CompileError` for a name that saves nothing known, and for a pattern without a block.
    """
    if remat is None:
        saved: dict[str, Saved] = dict.fromkeys(checkpointed, ())
    else:
        given = remat if isinstance(remat, Mapping) else {"*": remat}
        saved = {}
        for pattern, policy in given.items():
            saved |= dict.fromkeys(_matching(pattern, blocks, "remat", policy == "none"), saved_by(policy))
    places = [*blocks, ROOT]
    shards = reshard if isinstance(reshard, Mapping) else {"*": reshard}
    kept: dict[str, bool] = {}
    for pattern, again in shards.items():
        if not isinstance(again, bool):
            raise CompileError(
                f"reshard_after_forward={again!r} is no option",
                why="gathered weights are given back after forward, or kept until backward",
                tries=("True", "False"),
            )
        kept |= dict.fromkeys(_matching(pattern, places, "reshard_after_forward", True), not again)
    return Kept(
        {block: names for block, names in saved.items() if names is not None},
        frozenset(place for place, stays in kept.items() if stays),
    )


def saved_by(policy: object) -> Saved:
    """What a policy saves, in the order of the table. Raises `CompileError` for another name."""
    if policy == "none":
        return None
    if policy == "block":
        return ()
    names = policy if isinstance(policy, Sequence) and not isinstance(policy, str) else (policy,)
    for name in names:
        if name not in SAVABLE:
            close = [f"'{known}' for {name!r}" for known in difflib.get_close_matches(str(name), SAVABLE, n=1)]
            raise CompileError(
                f"remat={policy!r} is no option",
                why=f"{name!r} is not what a result is saved under: {', '.join(SAVABLE)}",
                tries=(*close, "'none', 'block', or names such as ('linear', 'attention')"),
            )
    return tuple(name for name in SAVABLE if name in names)


def _matching(pattern: str, places: Collection[str], option: str, may_miss: bool) -> list[str]:
    found = [place for place in places if place == pattern or fnmatch.fnmatchcase(place, pattern)]
    if found or (may_miss and pattern == "*"):
        return found
    raise CompileError(
        f"{option} names '{pattern}', which is no block" if pattern != "*" else f"{option}: the model has no blocks",
        why="a block is a child of an nn.ModuleList",
        tries=[f"'{name}'" for name in difflib.get_close_matches(pattern, list(places), n=2)]
        or "an nn.ModuleList of the modules that are to be recomputed",
    )
