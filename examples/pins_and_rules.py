"""A rule for an op of one's own, and a pin on a weight.

    torchrun --nproc-per-node 2 examples/pins_and_rules.py
    python examples/pins_and_rules.py                       starts the two ranks itself

The compiler knows nothing of a custom op, and refuses a model with one until it has a rule. A rule is tried on random
tensors, parts against the whole, forward and gradient, before it is taken.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ndcompile as nd


@torch.library.custom_op("examples::scaled_tanh", mutates_args=())
def scaled_tanh(x: Tensor, scale: Tensor) -> Tensor:
    """tanh(x) · scale, with one scale a column."""
    return x.tanh() * scale


@scaled_tanh.register_fake
def _(x: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(x)


def keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    x, scale = ctx.saved_tensors
    return gradient * scale * (1 - x.tanh() ** 2), (gradient * x.tanh()).sum_to_size(scale.shape)


scaled_tanh.register_autograd(backward, setup_context=keep)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 16)
        self.scale = nn.Parameter(torch.rand(16))
        self.down = nn.Linear(16, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(scaled_tanh(self.up(x), self.scale))


def make_model() -> Model:
    torch.manual_seed(0)
    return Model().double()


def refusal(call: Callable[..., object], *args: object, **kwargs: object) -> str:
    try:
        call(*args, **kwargs)
    except ValueError as error:
        return str(error)
    raise AssertionError("it was not refused")


def distance(parallel: nn.Module, x: Tensor) -> float:
    """How far the gradients on the mesh are from those on one device."""
    model = make_model()
    for callee in (model, parallel):
        callee(x).square().sum().backward()
    expected = dict(model.named_parameters())
    far = [
        (p.grad.full_tensor() - expected[n].grad).norm() / expected[n].grad.norm()
        for n, p in parallel.named_parameters()
    ]
    return max(far).item()


def main() -> None:
    dist.init_process_group("gloo")
    show = print if dist.get_rank() == 0 else lambda *args, **kwargs: None
    x = torch.randn(4, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    op = torch.ops.examples.scaled_tanh.default

    show("without a rule\n" + refusal(nd.compile, make_model(), "tp=2", x))
    show("\nwith a wrong one: tanh is not linear\n" + refusal(nd.register_rule, op, "(* n)(n) -> * n"))
    nd.register_rule(op, "f(* n, n) -> * n")  # any dim may be sharded, alike in both; nothing may be a partial sum

    for title, pins in (("chosen", {}), ("pinned", {"up.weight": {"tp": nd.R}})):
        program = nd.compile(make_model(), "tp=2", x, placements=pins, float64=True)
        show(f"\nwith the rule, {title}")
        for name, parameter in program.parameters.items():
            show(f"  {name:<12}{parameter.layout}")
        show("  collectives " + ", ".join(f"{c} {c.side}" for c in program.collectives()))
        parallel = nd.parallelize(make_model(), "tp=2", x, placements=pins, float64=True)
        far = distance(parallel, x)
        show(f"  gradients are off by {far:.1e}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:  # started by python alone
        run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        os.execv(sys.executable, [sys.executable, *run, *sys.argv])
    main()
