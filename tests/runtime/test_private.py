"""The private torch APIs that ndcompile stands on are there, in each torch release that was tried."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ndcompile.runtime import private

TRIED = ("2.11", "2.13", "2.14")
"""The releases on which the suite, or a part of it, has run."""

OPS = {
    "all_reduce": ["input", "reduce_op", "group_name"],
    "all_gather_into_tensor": ["input", "group_size", "group_name"],
    "reduce_scatter_tensor": ["input", "reduce_op", "group_size", "group_name"],
    "all_to_all_single": ["input", "output_split_sizes", "input_split_sizes", "group_name"],
    "wait_tensor": ["tensor"],
}


def test_this_release_of_torch_was_tried() -> None:
    release = ".".join(torch.__version__.split(".")[:2])
    assert release in TRIED, f"torch {release} is new: run this file, then the suite, and add it to TRIED"


@pytest.mark.parametrize("name", OPS)
def test_functional_collectives_take_what_private_gives_them(name: str) -> None:
    schema = getattr(torch.ops._c10d_functional, name).default._schema
    assert [argument.name for argument in schema.arguments] == OPS[name]


ATTENTION = {
    "cudnn": "query key value attn_bias compute_log_sumexp dropout_p is_causal return_debug_mask scale",
    "flash": "query key value dropout_p is_causal return_debug_mask scale",
    "efficient": "query key value attn_bias compute_log_sumexp dropout_p is_causal scale",
    "cpu": "query key value dropout_p is_causal attn_mask scale",
}
BACKWARD = {
    "cudnn": "grad_out query key value out logsumexp philox_seed philox_offset attn_bias cum_seq_q cum_seq_k max_q "
    "max_k dropout_p is_causal scale",
    "flash": "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal philox_seed "
    "philox_offset scale",
    "efficient": "grad_out_ query key value attn_bias out logsumexp philox_seed philox_offset dropout_p "
    "grad_input_mask is_causal scale",
    "cpu": "grad_out query key value out logsumexp dropout_p is_causal attn_mask scale",
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_kernels_take_what_kernels_give_them(name: str) -> None:
    for op, names in zip(private.ATTENTION[name], (ATTENTION[name], BACKWARD[name]), strict=True):
        assert " ".join(argument.name for argument in op._schema.arguments) == names
    assert private.ATTENTION[name][0]._schema.returns[0].name == "output"


def test_dtensors_have_a_local_tensor_and_a_spec() -> None:
    assert {"_local_tensor", "_spec"} <= set(DTensor.__slots__)
    assert callable(DeviceMesh._flatten)


def test_strided_shards_take_a_split_factor() -> None:
    from torch.distributed.tensor.placement_types import _StridedShard

    assert _StridedShard(1, split_factor=4).split_factor == 4


def test_autograd_says_whether_a_backward_runs() -> None:
    seen = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda gradient: seen.append(torch._C._current_graph_task_id()))
    assert torch._C._current_graph_task_id() == -1
    x.sum().backward()
    assert seen and seen[0] != -1


def test_storages_are_told_apart_by_their_address() -> None:
    x = torch.ones(4)
    assert x.untyped_storage()._cdata == x[1:].untyped_storage()._cdata != x.clone().untyped_storage()._cdata


def test_symmetric_memory_has_what_peers_need() -> None:
    import torch.distributed._symmetric_memory as symmetric

    assert {"dtype", "device"} <= set(inspect.signature(symmetric.empty).parameters)
    assert list(inspect.signature(symmetric.rendezvous).parameters) == ["tensor", "group"]
    handle = torch._C._distributed_c10d._SymmetricMemory
    for name, arguments in {"get_buffer": ("rank", "sizes", "dtype"), "barrier": ("channel", "timeout_ms")}.items():
        told = str(getattr(handle, name).__doc__)
        places = [told.index(f"{argument}:") for argument in arguments]
        assert places == sorted(places), f"{name} takes {arguments} in this order"


def test_inductor_takes_an_order_and_a_last_pass() -> None:
    """That generated code keeps the order is in `test_halves`; here are the names that it stands on."""
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    own = private.inductor_options("max-autotune", lambda graph: None, __file__)
    assert own.keys() <= config.get_config_copy().keys() and own["max_autotune"] is True
    assert isinstance(own["post_grad_custom_post_pass"], CustomGraphPass) and config.reorder_for_peak_memory is True
    assert own["post_grad_custom_post_pass"].uuid() == own["post_grad_custom_post_pass"].uuid() != b""


AT_EXIT = """
import atexit, os, socket
import torch, torch.distributed as dist
import ndcompile as nd

def threads():
    names = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
    return sum("gloo" in name for name in names)

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = str(free.getsockname()[1])
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK="0", WORLD_SIZE="1")
atexit.register(lambda: print(threads(), "threads of gloo at the end"))  # runs after what is registered later
model = nd.parallelize(torch.nn.Linear(4, 4), "", torch.zeros(2, 4))
model(torch.zeros(2, 4)).sum().backward()
assert threads()
dist.destroy_process_group()
"""


def test_no_thread_of_a_process_group_outlives_the_interpreter() -> None:
    """One that frees a tensor then aborts the process, now and then; torch's caches keep the groups of DTensors."""
    done = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0 threads of gloo at the end\n"
