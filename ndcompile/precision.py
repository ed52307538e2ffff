"""Which dtypes compute and reduce."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Precision:
    """`compute`: the dtype that parameters are cast to before they are gathered, and so of most activations.
    `reduce`: the dtype in which their gradients are summed over ranks. None leaves each as it is.

    `cast_inputs`: floating inputs are cast to `compute` too, as FSDP2's `cast_forward_inputs` does; the program still
    takes them in the dtype of the example inputs. Without it a model must cast what it multiplies by its parameters.

    >>> Precision(compute=torch.bfloat16, reduce=torch.float32)
    Precision(compute=torch.bfloat16, reduce=torch.float32, cast_inputs=True)
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    cast_inputs: bool = True

    @property
    def of_inputs(self) -> torch.dtype | None:
        """What floating inputs are cast to."""
        return self.compute if self.cast_inputs else None
