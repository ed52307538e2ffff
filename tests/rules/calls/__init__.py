"""For every registered rule the calls of its op on which its rows are tried, drawn by hypothesis."""

from __future__ import annotations

from tests.rules.calls import contract, images, layers, pointwise, routing, views
from tests.rules.draw import Calls

CALLS: Calls = {
    **pointwise.CALLS, **contract.CALLS, **views.CALLS, **layers.CALLS, **routing.CALLS, **images.CALLS
}  # fmt: skip
