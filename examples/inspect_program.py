"""What a model becomes on a mesh, seen without running it: no process group, no GPU, no weights.

python examples/inspect_program.py
"""

from __future__ import annotations

from collections import Counter

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import ndcompile as nd


def make_model() -> torch.nn.Module:
    """A Llama of two blocks, with the widths of a model of 8 billion parameters, on the meta device."""
    with torch.device("meta"):
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=2,
                num_attention_heads=32, num_key_value_heads=8, use_cache=False,
            )
        )  # fmt: skip


def collectives(program: nd.Program, block: str) -> list[str]:
    """How many collectives of each kind one block has."""
    counts = Counter(f"{c.side:<8} {c}" for c in program.collectives() if c.block == block)
    return [f"{count} × {name}" for name, count in sorted(counts.items())]


def main() -> None:
    model, block, mesh = make_model(), "model.layers.0", "dp_shard=32, tp=8"
    program = nd.compile(model, mesh)
    print(program)

    print(f"\ncollectives of {block} on {program.mesh}")
    print("\n".join(collectives(program, block)))

    print("\nwhy a weight lies as it does")
    print(program.explain(f"{block}.mlp.down_proj.weight"))
    held = sum(p.local_bytes(program.mesh) for p in program.parameters.values())
    print(f"\na rank holds {held / 2**20:.1f} MiB of the parameters")

    pinned = nd.compile(model, mesh, placements={"model.layers.*.mlp.*_proj.weight": {"tp": nd.R}})
    print(f"\ncollectives of {block} with its MLP's weights pinned whole over tp")
    print("\n".join(collectives(pinned, block)))
    held = sum(p.local_bytes(program.mesh) for p in pinned.parameters.values())
    print(f"\na rank then holds {held / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
