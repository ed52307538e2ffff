"""What a kind of axis says of itself. All else follows from the rules and the conversion table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ndcompile.placement import Placement
from ndcompile.size import Shape, Size


@dataclass(frozen=True)
class AxisKind:
    """One kind of mesh axis.

    `symbol` is the input size that it shards (`b` or `s`), and `integers` says whether it may also shard fixed sizes.
    With `attends` it shards every sequence, head–tail, also inside dims that join it with the batch, and attention
    over it communicates (`runtime.context`).
    `parameter_uses` gives the placements a parameter may have where compute takes it; `stored` is where it then lies
    between steps (for one use placement, and the dim that data axes would shard). `outputs` are the placements that a
    result of the model may have. `price` is the cost, in moved bytes, of a byte of matrix that every rank holds.
    """

    symbol: str
    integers: bool
    shards_batch: bool
    parameter_uses: Callable[[Shape, int], list[Placement]]
    stored: Callable[[Placement, int | None], Placement]
    price: float
    attends: bool = False

    def shards(self, size: Size) -> bool:
        """Whether the axis may shard a factor of this size."""
        if size.constant:
            return self.integers
        if self.attends:
            return any(symbol != "b" for symbol in size.symbols)
        return set(size.symbols) == {self.symbol} or (self.shards_batch and "b" in size.symbols)
