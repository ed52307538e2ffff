"""Ways to train a model on several GPUs: torch's own, each set up as well as its documentation says, and ndcompile."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ndcompile as nd
from tests.bench.workloads import Batch, Workload

DATA = ("dp_replicate", "dp_shard")


class Way:
    """One way to train, on a mesh written like `dp_shard=2+tp=2`. Options follow: `ndcompile:tp=2/remat="block"`.

    `model` is what the optimizer's parameters come from. `step(batch)` is forward and backward; it returns the loss.
    """

    axes: ClassVar[tuple[str, ...]] = ()
    alone: ClassVar[bool] = False

    def __init__(self, workload: Workload, spec: str, device: torch.device, compiled: bool) -> None:
        spec, *options = spec.split("/")
        self.workload, self.device, self.compiled = workload, device, compiled
        self.sizes = {name: int(size) for name, _, size in (axis.partition("=") for axis in spec.split("+")) if name}
        self.options = {name: json.loads(text) for name, _, text in (option.partition("=") for option in options)}
        if not self.sizes and self.axes:
            self.sizes = {self.axes[0]: dist.get_world_size()}
        if set(self.sizes) - set(self.axes):
            raise ValueError(f"{type(self).__name__} has the axes {', '.join(self.axes)}, not {', '.join(self.sizes)}")
        self.model = self.build()

    def build(self) -> nn.Module:
        raise NotImplementedError

    def step(self, batch: Batch) -> Tensor:
        with self.autocast():
            loss = self.model(**batch).loss
        loss.backward()
        return loss.detach()

    @property
    def batches(self) -> tuple[int, int]:
        """How many ranks have batches of their own, and which of them this one is."""
        if self.alone:
            return dist.get_world_size(), dist.get_rank()
        data = [size for name, size in self.sizes.items() if name in DATA]
        count = 1
        for size in data:
            count *= size
        return count, dist.get_rank() // (dist.get_world_size() // count)

    def whole(self) -> nn.Module:
        """The untouched model, the same on every rank."""
        torch.manual_seed(0)
        with self.device:
            return self.workload.build()

    def by_region(self, model: nn.Module) -> nn.Module:
        if self.compiled:
            for block in self.workload.blocks(model):
                block.compile()
        return model

    def mesh(self) -> DeviceMesh:
        return init_device_mesh(self.device.type, tuple(self.sizes.values()), mesh_dim_names=tuple(self.sizes))

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, dtype=torch.bfloat16)


class Single(Way):
    """Every rank alone, on a batch of its own: what no parallel program should fall far below."""

    alone = True

    def build(self) -> nn.Module:
        return self.by_region(self.whole())


class Ddp(Way):
    """DDP. Dynamo's own cutting at bucket borders is off: it loses fusions and memory."""

    axes = ("dp_replicate",)

    def build(self) -> nn.Module:
        torch._dynamo.config.optimize_ddp = False
        where = [self.device.index] if self.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(self.by_region(self.whole()), device_ids=where)


class Fsdp2(Way):
    """`fully_shard` of each block and the root; with `tp` beside it, of what `parallelize_module` has made."""

    axes = ("dp_shard", "tp")

    def build(self) -> nn.Module:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = self.mesh()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = self.whole()
        if "tp" in self.sizes:
            parallelize(model, mesh["tp"])
        model = self.by_region(model)
        for part in (*self.workload.blocks(model), model):
            fully_shard(part, mesh=mesh["dp_shard"], mp_policy=policy)
        return model

    def step(self, batch: Batch) -> Tensor:
        with loss_on_shards("tp" in self.sizes):
            loss = self.model(**batch).loss
            loss.backward()
        return loss.detach()


class Tp(Way):
    """`parallelize_module` with sequence parallel norms and the loss on shards of the vocabulary; for a Llama."""

    axes = ("tp",)

    def build(self) -> nn.Module:
        model = self.whole()
        parallelize(model, self.mesh())
        return self.by_region(model)

    def step(self, batch: Batch) -> Tensor:
        with loss_on_shards(True):
            return super().step(batch)


class Cp(Way):
    """torch's `context_parallel`, for a Llama: its ring needs attention without the mask that transformers makes, which
    a hook takes off, inputs cut by hand, and gradients averaged by hand."""

    axes = ("cp",)

    def build(self) -> nn.Module:
        model: Any = self.whole()

        def causal(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return args, kwargs | dict(attention_mask=None, is_causal=True)

        for layer in model.model.layers:
            layer.self_attn.register_forward_pre_hook(causal, with_kwargs=True)
        self.device_mesh = self.mesh()
        return self.by_region(model)

    def step(self, batch: Batch) -> Tensor:
        from torch.distributed.tensor.experimental import context_parallel

        ids = batch["input_ids"].clone()
        labels = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:].contiguous()
        positions = torch.arange(ids.shape[1], device=ids.device)[None].contiguous()
        with context_parallel(self.device_mesh, buffers=[ids, labels, positions], buffer_seq_dims=[1, 1, 1]):
            with self.autocast():
                logits = self.model(input_ids=ids, position_ids=positions).logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
            loss.backward()
        for parameter in self.model.parameters():
            assert parameter.grad is not None, "every parameter of a Llama has a gradient"
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(dist.get_world_size())
        return loss.detach()


class NdCompile(Way):
    """`nd.parallelize` on any mesh, with any of its options."""

    axes = ("dp_replicate", "dp_shard", "cp", "tp")

    def build(self) -> nn.Module:
        example = self.workload.draw(self.workload.samples, torch.Generator(self.device).manual_seed(0))
        mesh = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        precision = nd.Precision(compute=torch.bfloat16, reduce=torch.float32)
        model = nd.parallelize(self.whole(), mesh, example, precision=precision, **self.options)
        if self.compiled:
            model.compile()
        return model

    def autocast(self) -> AbstractContextManager[Any]:
        return nullcontext()


WAYS: dict[str, type[Way]] = {
    "single": Single, "ddp": Ddp, "fsdp2": Fsdp2, "tp": Tp, "cp": Cp, "ndcompile": NdCompile,
}  # fmt: skip


def loss_on_shards(wanted: bool) -> AbstractContextManager[Any]:
    from torch.distributed.tensor.parallel import loss_parallel

    return loss_parallel() if wanted else nullcontext()


def parallelize(model: Any, mesh: DeviceMesh) -> None:
    """The plan of a Llama, as torch's tutorial for tensor parallelism has it."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )  # fmt: skip

    if type(model).__name__ != "LlamaForCausalLM":
        raise ValueError(f"there is no plan for tp of a {type(model).__name__}: parallelize_module needs one by hand")
    cut, whole = Shard(1), Replicate()
    out: dict[str, Any] = dict(output_layouts=cut, use_local_output=False)
    plan: dict[str, Any] = {"input_layernorm": SequenceParallel(), "post_attention_layernorm": SequenceParallel()}
    plan["self_attn"] = PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": cut}, desired_input_kwarg_layouts={"hidden_states": whole}
    )
    plan["mlp"] = PrepareModuleInput(input_layouts=(cut,), desired_input_layouts=(whole,))
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        plan[name] = ColwiseParallel()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        plan[name] = RowwiseParallel(**out)
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    root: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=whole, **out),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=cut, output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, root)
