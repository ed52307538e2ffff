"""Every architecture of transformers that these sizes fit: compiled on three meshes as it comes, and verified.

    python -m tests.equivalence.architectures LOG --jobs 2 --seconds 2400   all that the log lacks
    python -m tests.equivalence.architectures LOG --only llama bert         some
    python -m tests.equivalence.architectures LOG --page                    docs/transformers.md from the log

The log has a line for each architecture and mesh. What is refused says why; a difference, or an error that is no
refusal, ends the command with status 1. Nobody chose these models: they are all that the library has.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import ndcompile as nd
from tests.verify.mutation import TooLong, limit

PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"
MESHES = ("dp_shard=2", "dp_shard=2, tp=2", "cp=2")
MOST = 30_000_000
"""Parameters of what is not small with these sizes."""
SECONDS = 150
"""For one architecture on one mesh."""

VOCABULARY, LENGTH, SAMPLES = 96, 16, 8
SIZES: dict[int, str] = {
    0: """pad_token_id hidden_dropout_prob attention_probs_dropout_prob dropout attention_dropout resid_pdrop embd_pdrop
        attn_pdrop activation_dropout hidden_dropout dropout_rate classifier_dropout layerdrop encoder_layerdrop
        decoder_layerdrop zero_expert_num""",
    1: """n_group topk_group n_groups mamba_n_groups first_k_dense_replace n_shared_experts num_shared_experts
        bos_token_id""",
    2: """num_hidden_layers n_layer n_layers num_layers num_decoder_layers encoder_layers decoder_layers
        num_key_value_heads num_global_key_value_heads linear_num_key_heads num_experts_per_tok moe_k moe_topk
        mamba_expand eos_token_id""",
    3: "num_channels",
    4: """num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_experts
        num_local_experts n_routed_experts moe_num_experts mamba_n_heads mamba_num_heads linear_num_value_heads
        num_v_heads linear_conv_kernel_dim patch_size window_size""",
    8: """head_dim kv_channels d_kv v_head_dim qk_rope_head_dim qk_nope_head_dim linear_key_head_dim
        linear_value_head_dim state_size mamba_d_state ssm_state_size mamba_chunk_size chunk_size sliding_window
        attention_window attention_window_size hidden_size_per_layer_input""",
    10: "num_labels",
    16: "q_lora_rank kv_lora_rank mamba_d_head mamba_head_dim image_size",
    32: """hidden_size d_model n_embd dim embedding_size emb_dim embed_dim moe_intermediate_size lru_width
        shared_expert_intermediate_size expert_ffn_hidden_size""",
    64: """intermediate_size ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim hidden_dim ffn_hidden_size
        max_position_embeddings n_positions n_ctx""",
    VOCABULARY: "vocab_size vocab_size_per_layer_input",
}
"""What is small, by the names that configurations have for it; nothing is dropped."""

SMALL: dict[str, Any] = {name: size for size, names in SIZES.items() for name in names.split()}
SMALL["use_cache"] = False

Batch = dict[str, Tensor]


def ids(length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCABULARY, (SAMPLES, length))


def of_text() -> Batch:
    tokens = ids()
    return dict(input_ids=tokens, labels=tokens)


def of_masked_text() -> Batch:
    tokens = ids()
    return dict(input_ids=tokens, labels=tokens.masked_fill(torch.rand(tokens.shape) > 0.4, -100))


KINDS: dict[str, tuple[Any, Any]] = {
    "causal": (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, of_text),
    "masked": (modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, of_masked_text),
    "sequence to sequence": (
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        lambda: dict(input_ids=ids(), labels=ids(12)),
    ),
    "image": (
        modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
        lambda: dict(pixel_values=torch.randn(SAMPLES, 3, 16, 16), labels=torch.randint(0, 10, (SAMPLES,))),
    ),
}
"""What a model is for: the names of its classes by architecture, and a batch."""

Row = dict[str, Any]


def small(config_class: Any) -> Any:
    """A configuration of small sizes, with two layers of different types where it has such."""
    plain = config_class()
    given = {name: size for name, size in SMALL.items() if _can_be(config_class, name, getattr(plain, name, ...))}
    given |= {name: float(size) for name, size in given.items() if isinstance(getattr(plain, name), float)}
    types = getattr(plain, "layer_types", None)
    if types and not isinstance(getattr(config_class, "layer_types", None), property):
        given["layer_types"] = (list(dict.fromkeys(types))[:2] * 2)[:2]
    config = config_class(**given)
    config.decoder_start_token_id = 1
    return config


def _can_be(config_class: Any, name: str, now: Any) -> bool:
    """Whether a configuration has one number of that name, or none yet, and lets it be another.

    A property of one class may refuse that; those that all configurations have (`num_labels`) do not.
    """
    found = getattr(config_class, name, None)
    settable = not isinstance(found, property) or found is getattr(transformers.PreTrainedConfig, name, None)
    return settable and (now is None or isinstance(now, (int, float)))


class NotSmall(Exception):
    """A model that these sizes do not make small."""


def made(kind: str, name: str) -> tuple[nn.Module, Batch]:
    """The model in training mode, and a batch that it runs with. Raises what transformers raises."""
    classes, batch = KINDS[kind]
    found = classes[name] if isinstance(classes[name], str) else classes[name][0]
    torch.manual_seed(0)
    for attention in ("sdpa", "eager"):
        config = small(CONFIG_MAPPING[name])
        config._attn_implementation = attention
        try:
            with torch.device("meta"):
                count = sum(p.numel() for p in getattr(transformers, found)(copy.deepcopy(config)).parameters())
            if count > MOST:
                raise NotSmall(f"{count:,} parameters")
            model = getattr(transformers, found)(config).train()
            break
        except (ValueError, ImportError):
            if attention == "eager":
                raise
    given = batch()
    with torch.no_grad():
        model(**given)
    return model, given


def rows_of(kind: str, name: str) -> Iterator[Row]:
    """What becomes of an architecture on each mesh, or why there is no model."""
    on = f"torch {torch.__version__.partition('+')[0]}, transformers {transformers.__version__}"
    about = dict(kind=kind, name=name, on=on)
    try:
        with limit(60):
            model, batch = made(kind, name)
    except (Exception, TooLong) as error:
        yield about | dict(mesh="", found="not made", why=f"{type(error).__name__}: {str(error)[:200]}")
        return
    for mesh in MESHES:
        if kind != "image" or "cp" not in mesh:
            yield about | dict(mesh=mesh) | judged(copy.deepcopy(model), mesh, batch)


def judged(model: nn.Module, mesh: str, batch: Batch) -> Row:
    try:
        with limit(SECONDS):
            report = nd.verify(nd.compile(model, mesh, batch), model, seeds=1)
    except TooLong:
        return dict(found="too long", why=f"{SECONDS} seconds")
    except nd.CompileError as error:
        own = type(error) is nd.CompileError  # else a check of the compiler's own work
        return dict(found="refused" if own else "failed", why=str(error))
    except Exception:  # whatever it is, the log tells it whole, and the exit status is 1
        return dict(found="failed", why=traceback.format_exc())
    unsaid = [claim.kind for claim in report.claims if claim.held is None]
    return dict(found="equal" if report.equal else "different", why="" if report.equal else str(report), unsaid=unsaid)


def done_of(log: Path) -> list[Row]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def work(kind: str, name: str, end: float) -> list[Row]:
    if time.time() > end:
        return []
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    return list(rows_of(kind, name))


def run(log: Path, only: list[str], jobs: int, end: float) -> None:
    known = {(row["kind"], row["name"]) for row in done_of(log)}
    wanted = [(kind, name) for kind, (classes, _) in KINDS.items() for name in classes if not only or name in only]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        running = [pool.submit(work, *each, end) for each in wanted if each not in known]
        for each in as_completed(running):
            with log.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in each.result())
            for row in each.result():
                print(
                    row["kind"], row["name"], row["mesh"], row["found"], row["why"].partition("\n")[0][:150], flush=True
                )


# ---- the page ------------------------------------------------------------------------------------------------------

HEAD = """# transformers' architectures

`python -m tests.equivalence.architectures LOG` makes a small model of every architecture that transformers has for
text and for images, compiles it as it comes on `dp_shard=2`, on `dp_shard=2, tp=2` and, but for images, on `cp=2`, and
verifies the program: types, the prime field (one seed), float64. Nobody chose these models. Left out are those that
the sizes at the head of that file do not fit, or do not make small. [models.md](models.md) has the models that are
compared on real ranks, on many meshes.
"""


def page(rows: list[Row]) -> str:
    tried = [row for row in rows if row["mesh"]]
    versions = "; ".join(dict.fromkeys(row["on"] for row in rows))
    lines = [
        HEAD,
        f"Of {versions}:",
        "",
        "| for | architectures | left out | on | equal | refused | too long | wrong |",
    ]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for kind in KINDS:
        names = {row["name"] for row in tried if row["kind"] == kind}
        out = {row["name"] for row in rows if row["kind"] == kind} - names
        for mesh in MESHES:
            found = Counter(row["found"] for row in tried if (row["kind"], row["mesh"]) == (kind, mesh))
            counts = [*(found[what] for what in ("equal", "refused", "too long")), found["different"] + found["failed"]]
            if any(counts):
                lines.append(f"| {' | '.join(map(str, [kind, len(names), len(out), f'`{mesh}`', *counts]))} |")
    unsaid = sorted({row["name"] for row in tried if row.get("unsaid")})
    if unsaid:
        lines += ["", f"Tested in float64 alone, since an op has no meaning in the field: {', '.join(unsaid)}."]
    return "\n".join([*lines, "", *refusals(tried)]) + "\n"


def refusals(tried: list[Row]) -> Iterator[str]:
    yield from ("## What is refused", "", "| architecture | on | error |", "|---|---|---|")
    meshes: dict[tuple[str, str, str], list[str]] = {}
    for row in tried:
        if row["found"] != "equal":
            error = row["why"].partition("\n")[0].replace("|", "\\|")
            meshes.setdefault((row["kind"], row["name"], error), []).append(row["mesh"])
    for (_, name, error), where in meshes.items():
        everywhere = set(where) >= set(MESHES[:2])
        yield f"| {name} | {'all' if everywhere else ', '.join(f'`{mesh}`' for mesh in where)} | {error} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path)
    parser.add_argument("--only", nargs="*", default=[], metavar="ARCHITECTURE")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--page", action="store_true")
    given = parser.parse_args()
    if given.page:
        PAGE.write_text(page(done_of(given.log)))
    else:
        run(given.log, given.only, given.jobs, time.time() + given.seconds)
    sys.exit(any(row["found"] in ("different", "failed") for row in done_of(given.log)))


if __name__ == "__main__":
    main()
