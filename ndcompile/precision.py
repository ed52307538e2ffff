"""Which dtypes compute and reduce."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Precision:
    """`compute`: the dtype that parameters are cast to before they are gathered, and so of most activations.
    `reduce`: the dtype in which their gradients are summed over ranks. None leaves each as it is.

    >>> Precision(compute=torch.bfloat16, reduce=torch.float32)
    Precision(compute=torch.bfloat16, reduce=torch.float32)
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
